"""``ladderize compare``: stored evaluations, each model against the first. Imports no torch."""

from collections.abc import Iterable, Sequence
from pathlib import Path

from ladderize.errors import UserError
from ladderize.eval.paired.compare import compare_results
from ladderize.eval.paired.document import CompareOptions, Comparisons
from ladderize.eval.paired.entry import StoredResults, open_results


def compare(
    files: Iterable[str | Path], options: CompareOptions | None = None, *, models: Sequence[str] = ()
) -> Comparisons:
    """Compare the models of stored evaluations in pairs: each with the first one of the first file.

    files: results.json of ``ladderize eval``, results_*.json of ``lm_eval --log_samples``, or folders with one. models:
    of the files that hold several take these alone, by their names or the last parts of these. Raises UserError, for
    models that were not asked the same with what differs.
    """
    stored = [open_results(Path(file)) for file in files]
    chosen = [read() for results, places in _chosen(stored, models) for read in (results.reads[p] for p in places)]
    if len(chosen) < 2:
        held = ", ".join(entry.name for entry in chosen) or "no model"
        raise UserError(f"there are no two models to compare, but only {held}; name another file")
    return Comparisons([compare_results(chosen[0], other, options or CompareOptions()) for other in chosen[1:]])


def _chosen(stored: list[StoredResults], models: Sequence[str]) -> list[tuple[StoredResults, list[int]]]:
    """The places of the models to compare in each file; raises UserError for a name that no file has."""
    for model in models:
        if not any(results.places(model) for results in stored):
            known = ", ".join(dict.fromkeys(name for results in stored for name in results.names))
            raise UserError(f"--model {model} is in no file; there are {known}")
    chosen = []
    for results in stored:
        named = sorted({place for model in models for place in results.places(model)})
        chosen.append((results, named if models and len(results.names) > 1 else list(range(len(results.names)))))
    return chosen
