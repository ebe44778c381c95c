"""Accuracy: differences to the dense model task by task, what adaptation wins back by the tokens that it reads,
retrainings while they ran, and the sensitivity of each layer."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from ladderize.convert.sensitivity_file import INTERVAL, SensitivityDocument, dense_line
from ladderize.eval.compare import metric_name
from ladderize.eval.results import TaskComparison
from ladderize.report.documents import FoundDocuments, RetrainingRun
from ladderize.report.join import ReportContent
from ladderize.report.models import ReportModel, WithInterval, points_text
from ladderize.report.plot import (
    ACCURACY,
    PERPLEXITY,
    Measure,
    ReportPlot,
    Spec,
    dots,
    family_colour,
    intervals,
    level,
    lines,
    looks,
    make_spec,
    marks,
    quantitative,
)
from ladderize.sweep_document import AS_CONVERTED, THEN, SweepPoint

TOKENS_AXIS: Spec = {"format": "~s", "labelExpr": "datum.value === 0 ? '0' : datum.label", "tickCount": 5}
KIND_LOOKS = {
    "ladder": ("ladder", "circle"),
    "delayed": ("delayed", "triangle-up"),
    "spd": ("spd", "square"),
    "spd+ladder": ("both", "diamond"),
}
LEAST_COST = 0.05  # of perplexity; less is next to nothing
TICKS = [0, *(sign * 10.0**exponent for sign in (-1, 1) for exponent in range(-1, 7))]
RUN_COLOURS = ("ladder", "spd", "both", "baseline", "dense")
RUN_SHAPES = ("circle", "square", "diamond", "triangle-up")  # with the colours, different for the first twenty runs


# ---- tasks ----


def task_plots(content: ReportContent) -> list[ReportPlot]:
    """Return one plot with a panel for each task; none where nothing was compared."""
    compared = [(one, task) for one in content.models if one.comparison is not None for task in one.comparison.tasks]
    # the metric that stands for its task, where it has a meaning in points
    rows = [_task_row(one, task) for one, task in compared if task.main and task.verdict is not None]
    if not rows:
        return []
    tasks = dict.fromkeys(row["task"] for row in rows)
    caption = (
        "Points from dense on the same questions; bars are 95 % intervals of paired differences. Left of 0 is worse."
        " The dashed line is the margin."
    )
    levels = [level("x", 0), level("x", -content.margin, dashed=True)]
    panels = []
    for task in tasks:
        own = [row for row in rows if row["task"] == task]
        x = {**ACCURACY.axis("x"), "title": f"points of {own[-1]['metric']} from dense (logarithmic)"}
        panels.append(dots(task, own, x, levels))
    return [ReportPlot("tasks", "Differences task by task", caption, panels)]


def _task_row(one: ReportModel, task: TaskComparison) -> dict[str, Any]:
    points = WithInterval(task.difference, task.low, task.high).mapped(lambda value: 100 * value)
    lost, gained = task.right_to_wrong, task.wrong_to_right
    has_flips = lost is not None and gained is not None
    flips = f"; {len(lost or ())} right to wrong, {len(gained or ())} wrong to right" if has_flips else ""
    return {
        "task": task.task,
        "metric": metric_name(task.metric, task.filter),
        "name": one.name,
        "family": one.family,
        **points.fields("x"),
        "words": f"{one.title}; {task.task}: {points_text(points)} points{flips}",
    }


# ---- recovery: adapted models by their tokens, and retrainings by their validations ----


def recovery_plots(content: ReportContent) -> list[ReportPlot]:
    """Return one plot of adapted models by tokens; none where no model was adapted."""
    adapted = [one for one in content.models if one.adapted is not None]
    trained = {conversion(one) for one in adapted if one.tokens}
    same = sorted((one for one in adapted if conversion(one) in trained), key=lambda one: one.tokens or 0)
    measure = ACCURACY if any(one.difference is not None for one in same) else PERPLEXITY
    known = [(one, value) for one in same if (value := getattr(one, measure.name)) is not None]
    if len(known) < 2:
        return []
    rows = [
        {
            "line": f"{one.layout_words}, {end}",
            "of": conversion(one)[1],
            "is_end": one.adapted == end,
            "name": one.name,
            "family": one.family,
            "tokens": one.tokens or 0,
            **value.fields("y"),
            "words": f"{one.title}; {one.scores}",
        }
        for one, value in known
        for end in dict.fromkeys(str(other.adapted) for other, _ in known if conversion(other) == conversion(one))
        if one.adapted == AS_CONVERTED or f"{end}{THEN}".startswith(f"{one.adapted}{THEN}")
    ]
    caption = (
        f"Each line is one layout and way of adapting it: {measure.title} against the tokens that it read; 0 tokens is"
        " the converted model as it is. A line goes through the models that its stages made. Bars are 95 % intervals of"
        " the difference to dense."
    )
    return [ReportPlot("recovery", "Recovery against tokens", caption, [_models_panel(rows, measure, content.margin)])]


def conversion(one: ReportModel) -> tuple[Any, str]:
    """Return the layout, and the folder of the stage that converted: heads may lie otherwise in another one of the
    same layout."""
    stages = one.row.stages if isinstance(one.row, SweepPoint) else []
    return one.modes, next((stage.output for stage in stages if stage.stage == "convert"), "")


def _models_panel(rows: list[dict[str, Any]], measure: Measure, margin: float) -> Spec:
    constant = max(1.0, max(row["tokens"] for row in rows) / 100)
    x = quantitative("tokens", "tokens read", scale={"type": "symlog", "constant": constant}, axis=TOKENS_AXIS)
    levels = [level("y", 0), *([level("y", -margin, dashed=True)] if measure is ACCURACY else [])]
    encoding = {"x": x, "y": measure.axis("y"), "color": family_colour(rows)}
    by_line = lines({**encoding, "detail": [{"field": key, "type": "nominal"} for key in ("line", "of")]}, opacity=0.8)
    models = {**marks(encoding, 80), "transform": [{"filter": "datum.is_end"}]}
    return make_spec("", 300, rows, [*levels, by_line, intervals("y", encoding), models])


def retraining_plots(found: Sequence[RetrainingRun]) -> list[ReportPlot]:
    """Return one plot of all runs that held text out: of the KL where all runs measured it, else of the perplexity."""
    runs = [run for run in found if run.validations]
    if len({run.name for run in runs}) < len(runs):
        runs = [replace(run, name=f"{run.folder.parent.name}/{run.folder.name}") for run in runs]
    validations = [(run.name, line) for run in runs for line in run.validations]
    has_teacher = all(line.heldout_divergence is not None for _, line in validations)
    key, quality = ("heldout_divergence", "KL to dense") if has_teacher else ("heldout_perplexity", "perplexity")
    rows: list[dict[str, Any]] = [
        {
            "name": name,
            "step": line.step,
            "tokens": line.tokens,
            "y": value,
            "words": f"{name}: {line.tokens:,} tokens, {quality} {value:.4g}",
        }
        for name, line in validations
        if (value := line.value(key)) is not None
    ]
    if not rows:
        return []
    dense = {line.value("dense_heldout_perplexity") for _, line in validations}
    levels = [] if has_teacher else sorted({round(value, 6) for value in dense if value is not None})
    dashed = f"Dashed: the dense model, {', '.join(f'{value:.4g}' for value in levels)}." if levels else ""
    names = dict.fromkeys(run.name for run in runs)
    table = {name: (RUN_COLOURS[i % len(RUN_COLOURS)], RUN_SHAPES[i % len(RUN_SHAPES)]) for i, name in enumerate(names)}
    title = f"held-out {quality}{', nats' * has_teacher}"
    scale: Spec = {"type": "log", "nice": False} if all(row["y"] > 0 for row in rows) else {"zero": False}
    y = quantitative("y", title, scale=scale, axis={"format": "~g", "tickCount": 6})
    encoding, look = {"x": quantitative("tokens", "tokens read", axis=TOKENS_AXIS), "y": y}, looks("name", table, 1)
    drawn = [lines({**encoding, "color": look["color"]}), marks({**encoding, **look}, 55)]
    panel = make_spec(dashed, 280, rows, [*(level("y", value, dashed=True) for value in levels), *drawn])
    caption = f"Of text that was held out, by the tokens that were read. {dashed}"
    return [ReportPlot("heldout", f"Held-out {quality} while retraining", caption, [panel])]


# ---- sensitivity ----


def sensitivity_plots(found: FoundDocuments) -> list[ReportPlot]:
    """Return one plot for each file."""
    return [
        ReportPlot(
            name="sensitivity" if number == 1 else f"sensitivity-{number}",
            title="Sensitivity of each layer",
            caption=f"{dense_line(document).capitalize()}. Bars are {INTERVAL:.0%} bootstrap intervals.",
            panels=[_sensitivity_panel(document)],
        )
        for number, document in enumerate(found.sensitivities, 1)
    ]


def _sensitivity_panel(document: SensitivityDocument) -> Spec:
    """Return a panel of each layer's sensitivity by kind, with its interval.

    A few layers dwarf the others, so the scale is logarithmic away from 0.
    """
    rows: list[dict[str, Any]] = [
        {
            "layer": cost.layer,
            "kind": cost.kind,
            "y": cost.sensitivity,
            "y1": cost.low,
            "y2": cost.high,
            "words": f"layer {cost.layer} as {cost.kind}: {cost.sensitivity:.4g} ({cost.low:.4g} to {cost.high:.4g})",
        }
        for cost in document.costs
    ]
    scale = {"type": "symlog", "constant": LEAST_COST, "nice": False, "padding": 8}
    axis = {"values": TICKS, "format": "~g", "labelOverlap": True}
    x: Spec = {"field": "layer", "type": "ordinal", "title": "layer", "axis": {"labelAngle": 0, "labelOverlap": True}}
    look = looks("kind", {kind: KIND_LOOKS[kind] for kind in document.kinds})
    encoding = {
        "x": x,
        "y": quantitative("y", "increase of perplexity", scale=scale, axis=axis),
        "xOffset": {"field": "kind", "type": "nominal", "sort": document.kinds},
    }
    layers = [
        level("y", 0),
        intervals("y", {**encoding, "color": look["color"]}),
        marks({**encoding, **look}, 50),
    ]
    ranks = f", {document.sync_tp_size} virtual ranks" if document.sync_tp_size else ""
    aligned = ", aligned" if document.aligned is not None else ""
    return make_spec(f"{Path(document.model).name}{ranks}{aligned}", 280, rows, layers)
