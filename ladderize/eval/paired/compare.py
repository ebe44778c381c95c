"""Two models that answered the same questions, compared in pairs. Imports no torch."""

from collections.abc import Sequence

from ladderize.errors import UserError
from ladderize.eval.paired.clusters import check_cluster_field
from ladderize.eval.paired.comparable import (
    PERPLEXITY,
    check_same_samples,
    check_settings,
    common_tasks,
    evaluation_remarks,
)
from ladderize.eval.paired.document import CompareOptions, ComparisonDocument
from ladderize.eval.paired.entry import ComparedModel
from ladderize.eval.paired.pooled import pool
from ladderize.eval.paired.statistics.terms import CONFIDENCE
from ladderize.eval.paired.tasks import Compared, compare_task, main_metrics
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
    _check_metrics(compared, tasks, options)
    main = {one.comparison.task: one for one in main_metrics(compared)}
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


def _check_metrics(compared: Sequence[Compared], tasks: Sequence[str], options: CompareOptions) -> None:
    """Raise UserError for --metric that is no metric of any task."""
    found = {one.comparison.metric for one in compared}
    for metric in options.metrics or ():
        if metric not in found and tasks:
            raise UserError(f"--metric {metric} is none that could be compared; leave it out to see which there are")
