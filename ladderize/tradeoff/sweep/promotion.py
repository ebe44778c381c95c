"""A tournament of layouts: which of them go on to a stage of adaptation that only the best get."""

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path

from ladderize.errors import UserError
from ladderize.eval.results import EvalResults
from ladderize.eval.table import mean_accuracy
from ladderize.files.documents import read_document
from ladderize.layout import BLOCKING, Layout
from ladderize.report.tradeoff_plot import pareto_front
from ladderize.runtime.bench.document import BenchDocument
from ladderize.tradeoff.sweep.points import Held, PlannedPoint
from ladderize.tradeoff.sweep.stages import BENCH_JSON, Stage, finished_stage

WAITING = Held("waiting")


@dataclass(frozen=True)
class Entrant:
    """A layout before the stage. accuracy, speed: more is better."""

    name: str
    accuracy: float
    speed: float

    def matches(self, other: "Entrant") -> bool:
        """Whether it is at least as accurate and as fast."""
        return self.accuracy >= other.accuracy and self.speed >= other.speed


def ranking(entrants: Sequence[Entrant]) -> list[Entrant]:
    """The best first: those on the Pareto front of accuracy and speed, then those on the front of the rest, and so on;
    of one front the more accurate first. Their numbers are finite."""
    left, ranked = list(entrants), []
    while left:
        on = pareto_front([(one.speed, one.accuracy) for one in left])
        ranked += sorted((one for one, is_on in zip(left, on, strict=True) if is_on), key=lambda one: -one.accuracy)
        left = [one for one, is_on in zip(left, on, strict=True) if not is_on]
    return ranked


def promoted(entrants: Sequence[Entrant], dense: Entrant | None, count: int) -> list[str | None]:
    """Of each None for the ``count`` best, else why it is not promoted.

    dense: takes part, but no place: what is neither faster nor better than the dense model comes after what is.
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


@dataclass(frozen=True)
class Judge:
    """Decides by what earlier stages have measured. root: the sweep's folder. bench: times all layouts; None: the fewer
    blocking sync points a layout has, the faster it counts. lost: keys of stages that failed or were skipped."""

    root: Path
    dense: PlannedPoint
    bench: Stage | None
    lost: Collection[str]

    def held(self, before: Sequence[PlannedPoint], count: int) -> list[Held | None]:
        """before: of each layout the model before the stage. Of each None where it goes on, else why it does not.
        Raises UserError for documents that cannot be read."""
        if self.bench is not None and self.bench.key in self.lost:
            return [Held("skipped", "the benchmark that decides it failed")] * len(before)
        dense = None if self._is_lost(self.dense) else self.dense
        left = [point for point in before if not self._is_lost(point)]
        stages = [point.evaluating for point in (dense, *left) if point is not None]
        stages += [self.bench] if self.bench is not None else []
        if any(stage is None or finished_stage(stage, self.root) is None for stage in stages):
            found: list[Held | None] = [WAITING] * len(left)
        else:
            reasons = promoted(list(map(self._entrant, left)), self._entrant(dense) if dense else None, count)
            found = [Held("not promoted", why) if why is not None else None for why in reasons]
        verdicts = iter(found)
        failed = Held("skipped", "the evaluation that decides it failed")
        return [failed if self._is_lost(point) else next(verdicts) for point in before]

    def _is_lost(self, point: PlannedPoint) -> bool:
        """Whether it will never be evaluated."""
        if point.layout is None:
            return point.group.problem is not None or not set(point.group.awaits).isdisjoint(self.lost)
        return point.evaluating is None or point.evaluating.key in self.lost

    def _entrant(self, point: PlannedPoint) -> Entrant:
        assert point.layout is not None
        assert point.results is not None
        return Entrant(point.name, accuracy_in(self.root / point.results), self._speed(point, point.layout))

    def _speed(self, point: PlannedPoint, layout: Layout) -> float:
        if self.bench is None:
            return -(layout.attention_sync + layout.mlp_sync).count(BLOCKING)
        path = self.root / self.bench.output / BENCH_JSON
        rows = BenchDocument.from_dict(read_document(path, "benchmark"), path).rows
        row = next((row for row in rows if row.is_model and row.model == point.timed), None)
        if row is None:
            raise UserError(f"{path} has no times of {point.timed}; remove its folder and run the sweep again")
        return row.speedup_end_to_end


def accuracy_in(results: Path) -> float:
    """The mean over the tasks of results.json, or where it has none the perplexity with a minus; more is better."""
    (entry,) = EvalResults.from_dict(read_document(results, "results file"), results).models
    mean = mean_accuracy(entry)
    if mean is None and entry.model.perplexity is not None:
        mean = -entry.model.perplexity.perplexity
    return mean if mean is not None else math.nan
