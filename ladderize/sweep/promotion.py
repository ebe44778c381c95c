"""The promotion of the best layouts to a stage of adaptation that the others do not get."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from ladderize.errors import UserError
from ladderize.eval.results import EvalResults
from ladderize.eval.table import mean_accuracy
from ladderize.files.documents import read_document
from ladderize.layout import BLOCKING, Layout
from ladderize.report.tradeoff_plot import pareto_front
from ladderize.runtime.bench.document import BenchDocument


@dataclass(frozen=True)
class Entrant:
    """A layout before the stage.

    accuracy, speed: more is better.
    """

    name: str
    accuracy: float
    speed: float

    def matches(self, other: "Entrant") -> bool:
        """Return True if it is at least as accurate and as fast."""
        return self.accuracy >= other.accuracy and self.speed >= other.speed


def ranking(entrants: Sequence[Entrant]) -> list[Entrant]:
    """Return the entrants, the best first. Their numbers are finite.

    Those on the Pareto front come first, then those on the front of the rest, and so on; on one front the more accurate
    first.
    """
    left, ranked = list(entrants), []
    while left:
        on = pareto_front([(one.speed, one.accuracy) for one in left])
        ranked += sorted((one for one, is_on in zip(left, on, strict=True) if is_on), key=lambda one: -one.accuracy)
        left = [one for one, is_on in zip(left, on, strict=True) if not is_on]
    return ranked


def promoted(entrants: Sequence[Entrant], dense: Entrant | None, count: int) -> list[str | None]:
    """Return None for each of the ``count`` best, and the reason for each other one.

    dense: is ranked but takes no place: a layout that is neither faster nor better than dense comes after the others.
    """
    sound = [one for one in (dense, *entrants) if one is not None and math.isfinite(one.accuracy)]
    best = [one for one in ranking(sound) if one is not dense][:count]

    def reason(loser: Entrant) -> str | None:
        if any(one is loser for one in best):
            return None
        if not math.isfinite(loser.accuracy):
            return "its accuracy is not a number"
        better = next((one for one in sound if one is not loser and one.matches(loser)), None)
        if better is None:
            return f"it is on the Pareto front, but not among the {count} best of it"
        return f"{better.name} is at least as fast and as good"

    return [reason(one) for one in entrants]


def entrant(name: str, results: Path, bench: Path | None, layout: Layout | None, timed: str | None) -> Entrant:
    """Return the measurements of a layout. Raises UserError if its times are missing.

    bench: the file of its times; None: fewer blocking sync points count as faster.
    """
    assert layout is not None
    if bench is None:
        return Entrant(name, accuracy_in(results), -(layout.attention_sync + layout.mlp_sync).count(BLOCKING))
    rows = BenchDocument.from_dict(read_document(bench, "benchmark"), bench).rows
    row = next((row for row in rows if row.is_model and row.model == timed), None)
    if row is None:
        raise UserError(f"{bench} has no times of {timed}; remove its folder and run the sweep again")
    return Entrant(name, accuracy_in(results), row.speedup_end_to_end)


def accuracy_in(results: Path) -> float:
    """Return the mean over the tasks of results.json, or without tasks minus the perplexity."""
    models = EvalResults.from_dict(read_document(results, "results file"), results).models
    if len(models) != 1:
        raise UserError(f"{results} holds {len(models)} models, but a sweep's evaluation holds one; run it again")
    mean = mean_accuracy(models[0])
    if mean is None and models[0].model.perplexity is not None:
        mean = -models[0].model.perplexity.perplexity
    return mean if mean is not None else math.nan
