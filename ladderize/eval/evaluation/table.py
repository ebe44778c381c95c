"""The table of ``ladderize eval``: each model's measurements beside the first model's. Imports no torch."""

from dataclasses import dataclass
from pathlib import Path

from ladderize.eval.results import EvalResults, ModelResult


@dataclass(frozen=True)
class Measurement:
    """One number that a model got. metric: as lm-eval names it, without its filter's ``none``."""

    task: str
    metric: str
    value: float
    stderr: float | None


def comparison_rows(results: EvalResults) -> list[dict[str, str]]:
    """Rows task x model, for people: layout, value, standard error, and the difference to the first model."""
    layouts = [entry.model.layout.partition(" layers: ")[2] for entry in results.models]
    names = short_names([entry.model.model for entry in results.models])
    measured = [{(one.task, one.metric): one for one in measurements(entry)} for entry in results.models]
    rows = []
    for task, metric in dict.fromkeys(key for found in measured for key in found):
        base = measured[0].get((task, metric))
        first = True
        for name, layout, found in zip(names, layouts, measured, strict=True):
            if (one := found.get((task, metric))) is None:
                continue
            rows.append(
                {
                    "task": task if first else "",
                    "metric": metric if first else "",
                    "model": name,
                    "layout": layout,
                    "value": f"{one.value:.4f}",
                    "stderr": "" if one.stderr is None else f"{one.stderr:.4f}",
                    "difference": "" if base is None or one is base else f"{one.value - base.value:+.4f}",
                }
            )
            first = False
    return rows


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
            name = metric if filtered == "none" else f"{metric} ({filtered})"
            found.append(Measurement(task, name, float(value), stderr if isinstance(stderr, float) else None))
    return found
