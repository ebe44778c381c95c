"""The table of ``ladderize eval``: each model's measurements beside the first model's. Imports no torch."""

from dataclasses import dataclass
from pathlib import Path

from ladderize.eval.answers import leaf_tasks
from ladderize.eval.compare import MAIN_METRICS, metric_name
from ladderize.eval.comparison import ComparisonDocument
from ladderize.eval.results import EvalResults, ModelResult
from ladderize.eval.words import flip_words, interval_words, verdict_sentence


@dataclass(frozen=True)
class Measurement:
    """One measured number of a model.

    metric: as lm-eval names it, without the filter ``none``.
    """

    task: str
    metric: str
    value: float
    stderr: float | None


def comparison_rows(results: EvalResults) -> list[dict[str, str]]:
    """Return rows of tasks and models, for people: layout, value, standard error.

    With several models also the difference to the first one, its interval and the flips, which ``table_words``
    explains.
    """
    names = short_names([entry.model.model for entry in results.models])
    measured = [{(one.task, one.metric): one for one in measurements(entry)} for entry in results.models]
    compared = {document.other: _differences(document) for document in comparison_documents(results)}
    rows = []
    for key in dict.fromkeys(key for found in measured for key in found):
        base, (task, metric) = measured[0].get(key), key
        for name, entry, found in zip(names, results.models, measured, strict=True):
            if (one := found.get(key)) is None:
                continue
            row = {
                "task": task,
                "metric": metric,
                "model": name,
                "layout": entry.model.layout.partition(" layers: ")[2],
                "value": f"{one.value:.4f}",
                "stderr": "" if one.stderr is None else f"{one.stderr:.4f}",
            }
            if len(results.models) > 1:
                row["difference"] = "" if base is None or one is base else f"{one.value - base.value:+.4f}"
                row |= {"interval": "", "flips": ""}
                row |= compared.get(entry.model.model, {}).get(key, {}) if entry is not results.models[0] else {}
            rows.append(row)
            task = metric = ""  # shown once for all models
    return rows


def _differences(document: ComparisonDocument) -> dict[tuple[str, str], dict[str, str]]:
    """Return the columns of a model that was compared in pairs, by (task, metric)."""
    found = {}
    for one in document.tasks:
        found[one.task, metric_name(one.metric, one.filter)] = {
            "difference": f"{one.difference:+.4f}",
            "interval": interval_words(one.low, one.high, "+.4f"),
            "flips": flip_words(one),
        }
    if (text := document.perplexity) is not None:
        stderr = "" if text.stderr is None else f" ±{text.stderr:.4f}"
        found["perplexity", "perplexity"] = {
            "difference": f"{text.difference:+.4f}{stderr}",
            "interval": interval_words(text.low, text.high, "+.4f"),
        }
    return found


def comparison_documents(results: EvalResults) -> list[ComparisonDocument]:
    """Return the comparisons of results.json, each of a later model with the first. Raises UserError for malformed
    ones."""
    return [ComparisonDocument.from_dict(one, "results.json: comparisons") for one in results.comparisons]


def prediction_rows(results: EvalResults) -> list[dict[str, str]]:
    """Return rows, for people, of the distance of each model's predictions from the reference's; none without a
    reference."""
    compared = {one.other: one.predictions for one in comparison_documents(results) if one.predictions is not None}
    rows = []
    for name, entry in zip(short_names([entry.model.model for entry in results.models]), results.models, strict=True):
        if (found := entry.model.predictions) is None:
            continue
        interval = ""
        if (paired := compared.get(entry.model.model)) is not None:
            interval = interval_words(paired.low, paired.high, ".4g")
        rows.append(
            {
                "model": name,
                "mean KL": f"{found.mean_kl:.4g}",
                "interval": interval,
                "99th percentile": f"{found.p99_kl:.4g}",
                "same top token": f"{found.same_top_share:.2%}",
                "tokens": f"{found.tokens:,}",
            }
        )
    return rows


def verdicts(results: EvalResults) -> list[str]:
    """Return for each later model a sentence that says if it is at most the margin worse over all tasks."""
    models = [entry.model.model for entry in results.models]
    names = dict(zip(models, short_names(models), strict=True))
    return [
        f"{names.get(one.other, one.other)}: {verdict_sentence(one.overall, one.margin)}"
        for one in comparison_documents(results)
        if one.overall is not None
    ]


def table_words(rows: list[dict[str, str]]) -> str:
    """Return an explanation of the columns of ``comparison_rows`` that hold something."""
    words = []
    if any(row.get("interval") for row in rows):
        words.append("difference: to the first model on the same samples, with its 95 % interval")
        if any("±" in row["difference"] for row in rows):
            words[0] += " (±: standard error)"
    if any(row.get("flips") for row in rows):
        words.append("flips: answers that became wrong (-) and right (+)")
    return "; ".join(words)


def short_names(models: list[str]) -> list[str]:
    """Return the last part of each path, where these differ; else the whole paths."""
    last = [Path(model).name for model in models]
    return last if len(set(last)) == len(last) and all(last) else models  # the name of . is empty


def measurements(entry: ModelResult) -> list[Measurement]:
    """Return all measured numbers of one model, perplexity first."""
    found = []
    if (ours := entry.model.perplexity) is not None:
        found.append(Measurement("perplexity", "perplexity", ours.perplexity, ours.stderr))
    for task, values in entry.tasks.items():
        for key, value in values.items():
            metric, _, filtered = key.partition(",")
            if "_stderr" in key or not isinstance(value, int | float) or not filtered:
                continue
            stderr = values.get(f"{metric}_stderr,{filtered}")
            found.append(
                Measurement(
                    task, metric_name(metric, filtered), float(value), stderr if isinstance(stderr, float) else None
                )
            )
    return found


# ---- the mean accuracy: of the metrics that stand for a model's tasks ----


def by_task(entry: ModelResult) -> dict[str, list[Measurement]]:
    """Return all metrics of each task."""
    found: dict[str, list[Measurement]] = {}
    for one in measurements(entry):
        if one.task != "perplexity":
            found.setdefault(one.task, []).append(one)
    return found


def main_metric(found: list[Measurement]) -> Measurement:
    """Return the metric of a task that stands for it."""
    return min(found, key=_rank)


def is_share(one: Measurement) -> bool:
    """Return whether a metric is a share of right answers or similar, between 0 and 1."""
    return 0 <= one.value <= 1 and _rank(one) < len(MAIN_METRICS)


def mean_accuracy(entry: ModelResult) -> float | None:
    """Return the mean of main metrics over all tasks that are no groups; None where none is a share."""
    leaves = leaf_tasks(entry.harness)
    mains = [main_metric(found) for task, found in by_task(entry).items() if task in leaves]
    values = [one.value for one in mains if is_share(one)]
    return sum(values) / len(values) if values else None


def _rank(one: Measurement) -> int:
    name = one.metric.partition(" ")[0]
    return MAIN_METRICS.index(name) if name in MAIN_METRICS else len(MAIN_METRICS)
