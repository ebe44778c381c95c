"""Two models that answered the same questions, compared in pairs. Imports no torch."""

from collections.abc import Iterable, Sequence
from pathlib import Path

from ladderize.errors import UserError
from ladderize.eval.paired.answers import check_cluster_field
from ladderize.eval.paired.comparable import (
    PERPLEXITY,
    check_same_samples,
    check_settings,
    common_tasks,
    evaluation_remarks,
)
from ladderize.eval.paired.document import CONFIDENCE, CompareOptions, ComparisonDocument, Comparisons
from ladderize.eval.paired.entry import ComparedModel, StoredResults, open_results
from ladderize.eval.paired.pooled import pool
from ladderize.eval.paired.tasks import Compared, compare_task
from ladderize.eval.paired.windows import compare_perplexity, compare_predictions


def compare_results(reference: ComparedModel, other: ComparedModel, options: CompareOptions) -> ComparisonDocument:
    """The difference of ``other`` to ``reference`` in all that both were asked. Raises UserError, which says what
    differs, unless they were asked the same under the same settings."""
    tasks, only_one = common_tasks(reference, other, common=options.common)
    check_settings(reference, other, tasks)
    check_cluster_field(options.cluster_by, {task: reference.answers[task] for task in tasks})
    left_out = [f"{task}: only one of the models has it" for task in only_one]
    compared: list[Compared] = []
    for task in tasks:
        check_same_samples(reference, other, task)
        found, not_compared = compare_task(reference, other, task, options)
        compared += found
        left_out += not_compared
    metrics = {one.comparison.metric for one in compared}
    if tasks and (unknown := [metric for metric in options.metrics or () if metric not in metrics]):
        raise UserError(f"--metric {unknown[0]} is none that could be compared; leave it out to see which there are")
    main = {one.comparison.task: one for one in compared if one.comparison.main}
    if main:
        left_out += [
            f"{task}: not in the pooled values, since no metric of it is between 0 and 1"
            for task in tasks
            if task not in main
        ]
    both = [entry.model is not None and entry.model.perplexity is not None for entry in (reference, other)]
    has_perplexity = all(both) and PERPLEXITY not in only_one
    return ComparisonDocument(
        reference=reference.name,
        other=other.name,
        margin=options.margin,
        level=CONFIDENCE,
        resamples=options.resamples,
        seed=options.seed,
        cluster_by=options.cluster_by,
        tasks=[one.comparison for one in compared],
        pooled=pool(reference, main, options) if main else [],
        perplexity=compare_perplexity(reference, other, options) if has_perplexity else None,
        predictions=compare_predictions(reference, other, options) if has_perplexity else None,
        left_out=left_out,
        remarks=evaluation_remarks(reference, other),
    )


# ---- stored evaluations, each model against the first ----


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
