"""Measurements and comparisons for people: sentences claim no more than the intervals show. Imports no torch."""

import math
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np

from ladderize.console import Console
from ladderize.eval.compare import CONFIDENCE, MAIN_METRICS, POINT, metric_name, pooled_units
from ladderize.eval.results import ComparisonDocument, EvalResults, ModelResult, Predictions, TaskComparison


def result_rows(results: EvalResults) -> list[dict[str, str]]:
    """Return a row for each metric and model, those of the perplexity first."""
    rows: dict[tuple[str, str], list[dict[str, str]]] = {}  # by task and metric
    names = short_names([entry.model.model for entry in results.models])
    for name, entry in zip(names, results.models, strict=True):
        text, measured = entry.model.perplexity, {}
        if text is not None:
            measured["perplexity"] = {"perplexity,none": text.perplexity, "perplexity_stderr,none": text.stderr}
        for task, values in {**measured, **entry.reported.results}.items():
            for key, value in values.items():
                metric, _, filtered = key.partition(",")
                if "_stderr" in key or not filtered or not isinstance(value, int | float):
                    continue
                alike, stderr = rows.setdefault((task, key), []), values.get(f"{metric}_stderr,{filtered}")
                row = {"task": "", "metric": "", "model": name}
                if not alike:  # once for all models
                    row |= {"task": task, "metric": metric_name(metric, filtered)}
                row |= {"layout": entry.model.layout.partition(" layers: ")[2], "value": f"{value:.4f}"}
                alike.append({**row, "stderr": f"{stderr:.4f}" if isinstance(stderr, float) else ""})
    return [row for alike in rows.values() for row in alike]


def short_names(models: Sequence[str]) -> list[str]:
    """Return the last part of each path, with those before it where two names would be equal."""
    paths = [Path(model) for model in models]
    names = [path.name or "." for path in paths]
    for count in range(2, max((len(path.parts) for path in paths), default=0) + 1):
        longer = [str(Path(*path.parts[-count:])) for path in paths]
        names = [name if names.count(name) == 1 else more for name, more in zip(names, longer, strict=True)]
    return names


def mean_accuracy(entry: ModelResult) -> float | None:
    """Return the mean over tasks of the metric that stands for each, if between 0 and 1, pooled as comparisons are."""
    reported = entry.reported
    values: dict[str, float] = {}
    for task in reported.leaves:
        numbers = [(key, value) for key, value in reported.results[task].items() if isinstance(value, int | float)]
        metrics = {key.partition(",")[0]: value for key, value in reversed(numbers)}  # of several filters the first
        better = (name for name, more in reported.higher_is_better.get(task, {}).items() if more is True)
        value = next((metrics[name] for name in (*MAIN_METRICS, *better) if name in metrics), math.nan)
        if 0 <= value <= 1:
            values[task] = value
    means = []
    for unit in pooled_units(reported.group_subtasks, list(values)):
        counts = [entry.harness.get("n-samples", {}).get(task, {}).get("effective", 1) for task in unit]
        means.append(np.average([values[task] for task in unit], weights=counts))
    return float(np.mean(means)) if means else None


def show_comparison(document: ComparisonDocument, console: Console) -> None:
    reference, other = short_names([document.reference, document.other])
    console.result(f"{other} against {reference} ({CONFIDENCE:.0%} intervals)\n")
    if document.tasks:
        rows = [_row(task, document.margin) for task in document.tasks]
        console.table(rows, right=[key for key in rows[0] if key not in ("task", "metric")])
        console.result("")
    for sentence in _sentences(document):
        console.prose(sentence)


def _row(task: TaskComparison, margin: float) -> dict[str, str]:
    unit, digits = (1.0, ".4g") if task.verdict is None else (POINT, ".1f")  # metrics between 0 and 1 are in points
    lost, gained = task.right_to_wrong, task.wrong_to_right
    return {
        "task": task.task,
        "metric": metric_name(task.metric, task.filter),
        "ref.": f"{task.reference_value / unit:{digits}}",
        "other": f"{task.value / unit:{digits}}",
        "change": f"{task.difference / unit:+{digits}}",
        "interval": interval_words(task.low, task.high, f"+{digits}", unit=unit),
        "flips": "" if lost is None or gained is None else f"-{len(lost)} +{len(gained)}",
        "p": "" if task.mcnemar_p is None else f"{task.mcnemar_p:.2g}",
        f"\u2264{margin:g} worse": task.verdict or "",
    }


def _sentences(document: ComparisonDocument) -> Iterator[str]:
    """Yield the results of the whole comparison, then its limits."""
    overall, text = document.overall, document.perplexity
    if overall is not None:
        claim, shown = ("More than", "shown") if overall.verdict == "worse" else ("At most", overall.verdict)
        tasks = "the task" if len(overall.tasks) == 1 else f"all {len(overall.tasks)} tasks"
        yield (
            f"{claim} {margin_text(document.margin)} worse over {tasks}: {shown} ({overall.difference / POINT:+.2f}"
            f" points, {interval_words(overall.low, overall.high, '+.2f', unit=POINT)}, {overall.samples:,} samples)."
        )
    if text is not None:
        yield (
            f"Perplexity {text.reference_value:.4f} to {text.value:.4f}, a difference of {text.difference:+.4f}"
            f" ({interval_words(text.low, text.high, '+.4f')})."
        )
    if document.predictions is not None:
        yield prediction_words(document.predictions)
    yield from (f"Left out: {sentence}." for sentence in document.left_out)
    yield from (f"Note: {sentence}." for sentence in document.remarks)


def prediction_words(predictions: Predictions) -> str:
    return (
        f"Predictions: mean KL divergence {predictions.mean_kl:.4g} nats per token"
        f" ({interval_words(predictions.low, predictions.high, '.4f')}), 99th percentile {predictions.p99_kl:.4g};"
        f" the same most likely next token in {predictions.same_top_share:.1%} of {predictions.tokens:,} tokens."
    )


def margin_text(margin: float) -> str:
    return f"{margin:g} point{'s' * (margin != 1)}"


def interval_words(low: float | None, high: float | None, digits: str, *, unit: float = 1.0) -> str:
    """Return an interval, such as ``-0.1 to +0.2``; digits: the format of its ends."""
    return "no interval" if low is None or high is None else f"{low / unit:{digits}} to {high / unit:{digits}}"
