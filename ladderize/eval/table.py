"""Measurements and comparisons for people: tables, and sentences that claim no more than the intervals show. Imports no
torch."""

import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from ladderize.console import Console
from ladderize.eval.compare import MAIN_METRICS, metric_name, pooled_units
from ladderize.eval.comparison import CONFIDENCE, POINT, ComparisonDocument, Predictions, TaskComparison
from ladderize.eval.results import EvalResults, ModelResult

# ---- what was measured of each model ----


def measurements(entry: ModelResult) -> dict[tuple[str, str], tuple[float, float | None]]:
    """Return all measured numbers of one model with their standard errors, by task and metric; perplexity first."""
    measured = {}
    if (text := entry.model.perplexity) is not None:
        measured["perplexity", "perplexity"] = text.perplexity, text.stderr
    for task, values in entry.tasks.items():
        for key, value in values.items():
            metric, _, filtered = key.partition(",")
            if "_stderr" not in key and filtered and isinstance(value, int | float):
                stderr = values.get(f"{metric}_stderr,{filtered}")
                known = stderr if isinstance(stderr, float) else None
                measured[task, metric_name(metric, filtered)] = float(value), known
    return measured


def result_rows(results: EvalResults) -> list[dict[str, str]]:
    """Return a row for each metric and model: layout, value, standard error."""
    names = short_names([entry.model.model for entry in results.models])
    measured = [measurements(entry) for entry in results.models]
    rows = []
    for task, metric in dict.fromkeys(key for known in measured for key in known):
        shown = [task, metric]
        for name, entry, known in zip(names, results.models, measured, strict=True):
            if (task, metric) in known:
                value, stderr = known[task, metric]
                row = {"task": shown[0], "metric": shown[1], "model": name}
                row |= {"layout": entry.model.layout.partition(" layers: ")[2], "value": f"{value:.4f}"}
                rows.append({**row, "stderr": "" if stderr is None else f"{stderr:.4f}"})
                shown = ["", ""]  # once for all models
    return rows


def short_names(models: Sequence[str]) -> list[str]:
    """Return the last part of each path, with those before it where two names would be equal."""
    paths = [Path(model) for model in models]
    names = [path.name or "." for path in paths]
    for count in range(2, max((len(path.parts) for path in paths), default=0) + 1):
        longer = [str(Path(*path.parts[-count:])) for path in paths]
        names = [name if names.count(name) == 1 else more for name, more in zip(names, longer, strict=True)]
    return names


def mean_accuracy(entry: ModelResult) -> float | None:
    """Return the mean over the tasks of the metric that stands for each, pooled as comparisons are; None where none is
    a share of right answers or similar, between 0 and 1."""
    parts = entry.parts()
    mains: dict[str, dict[str, float]] = {task: {} for task in parts.leaves}
    for (task, metric), (value, _) in measurements(entry).items():
        if task in mains:
            mains[task].setdefault(metric.partition(" ")[0], value)
    values: dict[str, float] = {}
    for task, own in mains.items():
        better = (name for name, more in parts.higher_is_better.get(task, {}).items() if more is True)
        value = next((own[name] for name in (*MAIN_METRICS, *better) if name in own), math.nan)
        if 0 <= value <= 1:
            values[task] = value
    means = []
    for unit in pooled_units(parts.group_subtasks, list(values)):
        counts = [_sample_count(entry, task) for task in unit]
        means.append(sum(count * values[task] for task, count in zip(unit, counts, strict=True)) / sum(counts))
    return sum(means) / len(means) if means else None


def _sample_count(entry: ModelResult, task: str) -> int:
    """Return the number of a task's questions; 1 where the file does not say it."""
    counts = entry.harness.get("n-samples")
    own = counts.get(task) if isinstance(counts, Mapping) else None
    count = own.get("effective") if isinstance(own, Mapping) else None
    return count if isinstance(count, int) and count > 0 else 1


# ---- comparisons ----


def show_comparison(document: ComparisonDocument, console: Console) -> None:
    """Print a heading, a table of all metrics of tasks, and sentences."""
    reference, other = short_names([document.reference, document.other])
    console.result(f"{other} against {reference} ({CONFIDENCE:.0%} intervals)\n")
    if document.tasks:
        rows = [_row(one, document.margin) for one in document.tasks]
        console.table(rows, right=[key for key in rows[0] if key not in ("task", "metric")])
        console.result("")
    for sentence in comparison_sentences(document):
        console.prose(sentence)


def _row(one: TaskComparison, margin: float) -> dict[str, str]:
    unit, digits = (1.0, ".4g") if one.verdict is None else (POINT, ".1f")  # metrics between 0 and 1 are in points
    has_flips = one.right_to_wrong is not None and one.wrong_to_right is not None
    return {
        "task": one.task,
        "metric": metric_name(one.metric, one.filter),
        "ref.": f"{one.reference_value / unit:{digits}}",
        "other": f"{one.value / unit:{digits}}",
        "change": f"{one.difference / unit:+{digits}}",
        "interval": interval_words(one.low, one.high, f"+{digits}", unit=unit),
        "flips": f"-{len(one.right_to_wrong or ())} +{len(one.wrong_to_right or ())}" if has_flips else "",
        "p": "" if one.mcnemar_p is None else f"{one.mcnemar_p:.2g}",
        f"\u2264{margin:g} worse": (one.verdict or "").removesuffix(" samples"),
    }


def comparison_sentences(document: ComparisonDocument) -> Iterator[str]:
    """Yield the results of the whole comparison, which claim no more than the intervals show, then its limits."""
    if (one := document.overall) is not None:
        claim, shown = ("More than", "shown") if one.verdict == "worse" else ("At most", one.verdict)
        tasks = "the task" if len(one.tasks) == 1 else f"all {len(one.tasks)} tasks"
        needed = "" if one.samples_needed is None else f"; equally good models would need {one.samples_needed:,}"
        yield (
            f"{claim} {margin_text(document.margin)} worse over {tasks}: {shown} ({one.difference / POINT:+.2f} points,"
            f" {interval_words(one.low, one.high, '+.2f', unit=POINT)}, {one.samples:,} samples{needed})."
        )
    if (text := document.perplexity) is not None:
        yield (
            f"Perplexity {text.reference_value:.4f} to {text.value:.4f}, a difference of {text.difference:+.4f}"
            f" ({interval_words(text.low, text.high, '+.4f')})."
        )
    if (predictions := document.predictions) is not None:
        yield prediction_words(predictions)
    yield from (f"Left out: {sentence}." for sentence in document.left_out)
    yield from (f"Note: {sentence}." for sentence in document.remarks)


def prediction_words(predictions: Predictions) -> str:
    """Return how far predictions are from the reference's."""
    return (
        f"Predictions: mean KL divergence {predictions.mean_kl:.4g} nats per token"
        f" ({interval_words(predictions.low, predictions.high, '.4f')}), 99th percentile {predictions.p99_kl:.4g};"
        f" the same most likely next token in {predictions.same_top_share:.1%} of {predictions.tokens:,} tokens."
    )


def margin_text(margin: float) -> str:
    """Return the margin in words, such as ``1 point``."""
    return f"{margin:g} point{'s' * (margin != 1)}"


def interval_words(low: float | None, high: float | None, digits: str, *, unit: float = 1.0) -> str:
    """Return an interval, such as ``-0.1 to +0.2``.

    digits: the format of its ends, as for ``format``.
    """
    return "no interval" if low is None or high is None else f"{low / unit:{digits}} to {high / unit:{digits}}"
