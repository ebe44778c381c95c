"""The table of ``ladderize eval``: each model's measurements beside the first model's. Imports no torch."""

from dataclasses import dataclass
from pathlib import Path

from ladderize.eval.paired.document import ComparisonDocument
from ladderize.eval.paired.words import metric_name, verdict_sentence
from ladderize.eval.results import EvalResults, ModelResult


@dataclass(frozen=True)
class Measurement:
    """One number that a model got. metric: as lm-eval names it, without its filter's ``none``."""

    task: str
    metric: str
    value: float
    stderr: float | None


def comparison_rows(results: EvalResults) -> list[dict[str, str]]:
    """Rows task x model, for people: layout, value, standard error; with several models also the difference to the
    first one, its interval and the flips. What the interval is of, and what flips are: ``table_words``."""
    layouts = [entry.model.layout.partition(" layers: ")[2] for entry in results.models]
    names = short_names([entry.model.model for entry in results.models])
    measured = [{(one.task, one.metric): one for one in measurements(entry)} for entry in results.models]
    compared: list[dict[tuple[str, str], Difference]] = [{}, *paired_differences(results)]
    rows = []
    for task, metric in dict.fromkeys(key for found in measured for key in found):
        base = measured[0].get((task, metric))
        first = True
        for name, layout, found, known in zip(names, layouts, measured, compared, strict=True):
            if (one := found.get((task, metric))) is None:
                continue
            row = {
                "task": task if first else "",
                "metric": metric if first else "",
                "model": name,
                "layout": layout,
                "value": f"{one.value:.4f}",
                "stderr": "" if one.stderr is None else f"{one.stderr:.4f}",
            }
            if len(results.models) > 1:
                alone = Difference("" if base is None or one is base else f"{one.value - base.value:+.4f}", "", "")
                row |= vars(known.get((task, metric), alone))
            rows.append(row)
            first = False
    return rows


@dataclass(frozen=True)
class Difference:
    """A difference to the first model in words; the fields are columns of the table."""

    difference: str
    interval: str
    flips: str


def paired_differences(results: EvalResults) -> list[dict[tuple[str, str], Difference]]:
    """Of each model after the first: (task, metric) -> its difference, where the models were compared in pairs."""
    documents = {document.other: document for document in comparison_documents(results)}
    found = []
    for entry in results.models[1:]:
        known: dict[tuple[str, str], Difference] = {}
        if (document := documents.get(entry.model.model)) is not None:
            for one in document.tasks:
                flips = "" if one.right_to_wrong is None else f"-{one.right_to_wrong} +{one.wrong_to_right}"
                difference = Difference(f"{one.difference:+.4f}", _interval(one.low, one.high), flips)
                known[one.task, metric_name(one.metric, one.filter)] = difference
            if (text := document.perplexity) is not None:
                stderr = "" if text.stderr is None else f" ±{text.stderr:.4f}"
                known["perplexity", "perplexity"] = Difference(
                    f"{text.difference:+.4f}{stderr}", _interval(text.low, text.high), ""
                )
        found.append(known)
    return found


def comparison_documents(results: EvalResults) -> list[ComparisonDocument]:
    """The comparisons of results.json, each later model with the first."""
    return [ComparisonDocument.from_dict(one, "results.json: comparisons") for one in results.comparisons]


def prediction_rows(results: EvalResults) -> list[dict[str, str]]:
    """Rows for people: how far each model's predictions are from the reference's; none where nothing was compared."""
    intervals = {
        one.other: "none"
        if one.predictions.low is None or one.predictions.high is None
        else f"{one.predictions.low:.4g} to {one.predictions.high:.4g}"
        for one in comparison_documents(results)
        if one.predictions is not None
    }
    rows = []
    for name, entry in zip(short_names([entry.model.model for entry in results.models]), results.models, strict=True):
        if (found := entry.model.predictions) is not None:
            rows.append(
                {
                    "model": name,
                    "mean KL": f"{found.mean_kl:.4g}",
                    "interval": intervals.get(entry.model.model, ""),
                    "99th percentile": f"{found.p99_kl:.4g}",
                    "same top token": f"{found.same_top_share:.2%}",
                    "tokens": f"{found.tokens:,}",
                }
            )
    return rows


def verdicts(results: EvalResults) -> list[str]:
    """For each later model a sentence on whether it is at most the margin worse over all tasks, where there are any."""
    models = [entry.model.model for entry in results.models]
    names = dict(zip(models, short_names(models), strict=True))
    return [
        f"{names.get(one.other, one.other)}: {verdict_sentence(one.overall, one.margin)}"
        for one in comparison_documents(results)
        if one.overall is not None
    ]


def table_words(rows: list[dict[str, str]]) -> str:
    """What the columns of ``comparison_rows`` mean, as far as they hold something."""
    words = []
    if any(row.get("interval") for row in rows):
        words.append("difference: to the first model on the same samples, with its 95 % interval")
        if any("±" in row["difference"] for row in rows):
            words[0] += " (±: standard error)"
    if any(row.get("flips") for row in rows):
        words.append("flips: answers that became wrong (-) and right (+)")
    return "; ".join(words)


def _interval(low: float | None, high: float | None) -> str:
    return "none" if low is None or high is None else f"{low:+.4f} to {high:+.4f}"


def short_names(models: list[str]) -> list[str]:
    """The last part of each path, where these differ; else the whole."""
    last = [Path(model).name for model in models]
    return last if len(set(last)) == len(last) else models


def measurements(entry: ModelResult) -> list[Measurement]:
    """All numbers of one model, perplexity first."""
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
