"""A comparison for people: tables, and sentences that say as much as the intervals show. Imports no torch."""

from collections.abc import Iterator
from pathlib import PurePath

from ladderize.eval.paired.document import ALL, POINT, ComparisonDocument, PooledComparison, TaskComparison


def heading(document: ComparisonDocument) -> str:
    """What is compared with what."""
    reference, other = (PurePath(name).name or name for name in (document.reference, document.other))
    if reference == other:
        reference, other = document.reference, document.other
    return f"{other} against {reference} ({document.level:.0%} intervals)"


def difference_rows(document: ComparisonDocument) -> list[dict[str, str]]:
    """Metrics between 0 and 1 in points, tasks first, then what is pooled."""
    margin = f"\u2264{document.margin:g} worse"
    rows = []
    compared: list[TaskComparison | PooledComparison] = [*document.tasks, *document.pooled]
    for one in compared:
        if one.verdict is None:
            continue
        rows.append(
            {
                "task": one.task if isinstance(one, TaskComparison) else pooled_name(one),
                "metric": metric_name(one.metric, one.filter) if isinstance(one, TaskComparison) else "",
                "ref.": f"{one.reference_value / POINT:.1f}",
                "other": f"{one.value / POINT:.1f}",
                "points": f"{one.difference / POINT:+.1f}",
                "interval": interval_words(one.low, one.high, "+.1f", unit=POINT),
                margin: one.verdict.removesuffix(" samples"),
            }
        )
    return rows


def other_rows(document: ComparisonDocument) -> list[dict[str, str]]:
    """Metrics of tasks that have no points: perplexities, and whatever goes beyond 0 to 1."""
    return [
        {
            "task": one.task,
            "metric": metric_name(one.metric, one.filter),
            "ref.": f"{one.reference_value:.4g}",
            "other": f"{one.value:.4g}",
            "difference": f"{one.difference:+.4g}",
            "interval": interval_words(one.low, one.high, "+.4g"),
        }
        for one in document.tasks
        if one.verdict is None
    ]


def flip_rows(document: ComparisonDocument) -> list[dict[str, str]]:
    """How many answers changed, of metrics that are 0 or 1."""
    return [
        {
            "task": one.task,
            "metric": metric_name(one.metric, one.filter),
            "samples": f"{one.samples:,}",
            "right to wrong": f"{one.right_to_wrong:,}",
            "wrong to right": f"{one.wrong_to_right:,}",
            "McNemar's p": f"{one.mcnemar_p:.4f}" if one.mcnemar_p >= 0.0001 else f"{one.mcnemar_p:.0e}",
        }
        for one in document.tasks
        if one.mcnemar_p is not None
    ]


def comparison_sentences(document: ComparisonDocument) -> Iterator[str]:
    """What the whole comparison shows, then what to keep in mind."""
    if document.overall is not None:
        yield verdict_sentence(document.overall, document.margin)
    lost = sum(one.right_to_wrong or 0 for one in document.tasks if one.main)
    gained = sum(one.wrong_to_right or 0 for one in document.tasks if one.main)
    if lost + gained:
        yield f"{_answers(lost)} turned from right to wrong, {_answers(gained)} from wrong to right."
    if (perplexity := document.perplexity) is not None:
        stderr = "" if perplexity.stderr is None else f" (standard error {perplexity.stderr:.4f})"
        yield (
            f"Perplexity {perplexity.reference_value:.4f} to {perplexity.value:.4f}, a difference of"
            f" {perplexity.difference:+.4f}{stderr}{_from_to(perplexity.low, perplexity.high)}; a factor of"
            f" {perplexity.ratio:.4f}{_from_to(perplexity.ratio_low, perplexity.ratio_high, '.4f')}."
        )
    if (predictions := document.predictions) is not None:
        yield (
            f"Predictions: mean KL divergence {predictions.mean_kl:.4g} nats per token"
            f"{_from_to(predictions.low, predictions.high, '.4f')}, 99th percentile {predictions.p99_kl:.4g}; the"
            f" same most likely next token in {predictions.same_top_share:.1%} of {predictions.tokens:,} tokens."
        )
    clusters = [one for one in document.tasks if one.main and one.clusters < one.samples]
    if clusters:
        counts = ", ".join(f"{one.task} {one.clusters:,}" for one in clusters[:3])
        more = f" and {len(clusters) - 3} more tasks" if len(clusters) > 3 else ""
        yield f"Samples that share a passage were resampled together: {counts} clusters{more}."
    yield from (f"Left out: {sentence}." for sentence in document.left_out)
    yield from (f"Note: {sentence}." for sentence in document.remarks)


def verdict_sentence(one: PooledComparison | TaskComparison, margin: float) -> str:
    """Whether the other model is at most the margin worse, in words that claim no more than the interval shows."""
    where = f"over {pooled_name(one)}" if isinstance(one, PooledComparison) else f"in {one.task}"
    points = margin_text(margin)
    interval = _from_to(one.low, one.high, "+.2f", unit=POINT)
    found = f"{one.difference / POINT:+.2f} points{interval}, {one.samples:,} samples"
    if one.verdict == "too few samples":
        return (
            f"At most {points} worse {where}: too few samples ({found}); about {one.samples_needed:,} would be needed"
            " if the models are equally good, more if they are not."
        )
    claim, shown = ("More than", "shown") if one.verdict == "worse" else ("At most", one.verdict)
    return f"{claim} {points} worse {where}: {shown} ({found})."


def margin_text(margin: float) -> str:
    """``1 point``."""
    return f"{margin:g} point{'s' * (margin != 1)}"


def pooled_name(one: PooledComparison) -> str:
    """What is pooled, and how."""
    count = len(one.tasks)
    tasks = "the task" if count == 1 else f"all {count} tasks" if one.name == ALL else f"group {one.name}"
    return f"{tasks} by samples" if one.name == ALL and one.weights == "samples" else tasks


def metric_name(metric: str, filtered: str) -> str:
    """The metric, with lm-eval's filter where it has a name."""
    return metric if filtered == "none" else f"{metric} ({filtered})"


def interval_words(low: float | None, high: float | None, digits: str, *, unit: float = 1.0) -> str:
    """``-0.1 to +0.2``. digits: how the ends are written, as for ``format``."""
    return "none" if low is None or high is None else f"{low / unit:{digits}} to {high / unit:{digits}}"


def _from_to(low: float | None, high: float | None, digits: str = "+.4f", *, unit: float = 1.0) -> str:
    return ", no interval" if low is None or high is None else f", {interval_words(low, high, digits, unit=unit)}"


def _answers(count: int) -> str:
    return f"{count:,} answer{'' if count == 1 else 's'}"
