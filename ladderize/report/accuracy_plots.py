"""Accuracy: differences to the dense model task by task, what adaptation wins back by the tokens that it reads,
retrainings while they ran, and the sensitivity of each layer."""

import statistics
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from ladderize.convert.sensitivity_file import INTERVAL, LADDER, SPD, SPD_LADDER, SensitivityDocument, dense_line
from ladderize.eval.compare import metric_name
from ladderize.eval.comparison import TaskComparison
from ladderize.report.documents import FoundDocuments, RetrainingRun
from ladderize.report.join import ReportContent
from ladderize.report.models import ReportModel, WithInterval, points_text
from ladderize.report.plot import (
    BY_ACCURACY,
    BY_PERPLEXITY,
    SIGNED_LABEL,
    Measure,
    PlotPanel,
    ReportPlot,
    Spec,
    dots,
    family_colour,
    family_legend,
    intervals,
    is_wide,
    level,
    lines,
    looks,
    make_spec,
    marks,
    nominal,
    quantitative,
)
from ladderize.sweep_document import AS_CONVERTED, THEN

TOKENS_AXIS: Spec = {"format": "~s", "labelExpr": "datum.value === 0 ? '0' : datum.label", "tickCount": 5}
KIND_LOOKS = {LADDER: ("ladder", "circle"), SPD: ("spd", "square"), SPD_LADDER: ("both", "diamond")}
LEAST_COST = 0.05  # of perplexity; less is next to nothing
WIDE_RANGE = 20  # times the middle value: where the highest is above, the scale is logarithmic away from 0
POWERS = [10.0**exponent for exponent in range(-3, 7)]
RUN_COLOURS = ("ladder", "spd", "both", "baseline", "dense")
RUN_SHAPES = ("circle", "square", "diamond", "triangle-up")  # with the colours, different for the first twenty runs


# ---- tasks ----


def task_plots(content: ReportContent) -> list[ReportPlot]:
    """Return one plot with a panel for each task; none where nothing was compared."""
    compared = [(one, task) for one in content.models if one.comparison is not None for task in one.comparison.tasks]
    # the metric that stands for its task, where it has a meaning in points
    drawn = [(one, task) for one, task in compared if task.main and task.verdict is not None]
    if not drawn:
        return []
    rows = [_task_row(one, task) for one, task in drawn]
    tasks = list(dict.fromkeys(row["task"] for row in rows))
    return [
        ReportPlot(
            name="tasks",
            title="Differences task by task",
            caption="Points from dense on the same questions; bars are 95 % intervals of paired differences. Left of 0"
            " is worse. The dashed line is the margin.",
            summary=f"Differences to dense in {len(tasks)} tasks, in points, with 95 % intervals.",
            panels=[_task_panel(task, [row for row in rows if row["task"] == task], content.margin) for task in tasks],
            legend=family_legend(rows),
        )
    ]


def _task_row(one: ReportModel, task: TaskComparison) -> dict[str, Any]:
    points = WithInterval(task.difference, task.low, task.high).scaled(100)
    lost, gained = task.right_to_wrong, task.wrong_to_right
    flips = (
        f"; {len(lost)} right to wrong, {len(gained)} wrong to right" if lost is not None and gained is not None else ""
    )
    return {
        "task": task.task,
        "metric": metric_name(task.metric, task.filter),
        "name": one.name,
        "family": one.family,
        **points.fields("x"),
        "words": f"{one.title}; {task.task}: {points_text(points)} points{flips}",
    }


def _task_panel(task: str, rows: list[dict[str, Any]], margin: float) -> PlotPanel:
    title = f"points of {rows[-1]['metric']} from dense"
    x = quantitative("x", title, axis={"labelExpr": SIGNED_LABEL, "tickCount": 5})
    levels = [level("x", 0), level("x", -margin, dashed=True)]
    return PlotPanel(dots(f"{task}: points from dense", rows, x, levels), task)


# ---- recovery: adapted models by their tokens, and retrainings by their validations ----


def recovery_plots(content: ReportContent) -> list[ReportPlot]:
    """Return the plots of adapted models by tokens and of retrainings; none where no model was adapted."""
    return [*_models_plot(content), *_retraining_plot(content.found.retrainings)]


def _models_plot(content: ReportContent) -> list[ReportPlot]:
    adapted = [one for one in content.models if one.adapted is not None]
    trained = {one.modes for one in adapted if one.tokens}
    same = sorted((one for one in adapted if one.modes in trained), key=lambda one: one.tokens or 0)
    measure = BY_ACCURACY if any(one.difference is not None for one in same) else BY_PERPLEXITY
    known = [(one, value) for one in same if (value := measure.value(one, content.reference)) is not None]
    if len(known) < 2:
        return []
    rows = [
        {
            "line": f"{one.layout_words}, {end}",
            "name": one.name,
            "family": one.family,
            "tokens": one.tokens or 0,
            **value.fields("y"),
            "words": f"{one.title}; {one.tokens or 0:,} tokens; {measure.title} {measure.text(value)}",
        }
        for one, value in known
        for end in _last_ways([other for other, _ in known if other.modes == one.modes])
        if _begins(str(one.adapted), end)
    ]
    return [
        ReportPlot(
            name="recovery",
            title="Recovery against tokens",
            caption=f"Each line is one layout and way of adapting it: {measure.title} against the tokens that it read;"
            " 0 tokens is the converted model as it is. A line goes through the models that its stages made. Bars are"
            " 95 % intervals.",
            summary=f"{measure.title.capitalize()} of {len(known)} models against the tokens that they read.",
            panels=[PlotPanel(_models_spec(rows, measure, content.margin))],
            legend=family_legend(rows),
        )
    ]


def _begins(method: str, other: str) -> bool:
    """Return True if one way of adapting is the other, or becomes it by further stages."""
    return method == AS_CONVERTED or f"{other}{THEN}".startswith(f"{method}{THEN}")


def _last_ways(models: Sequence[ReportModel]) -> list[str]:
    """Return the ways of adapting that no other way continues."""
    methods = {str(one.adapted) for one in models}
    return sorted(one for one in methods if not any(_begins(one, other) for other in methods - {one}))


def _models_spec(rows: list[dict[str, Any]], measure: Measure, margin: float) -> Spec:
    constant = max(1.0, max(row["tokens"] for row in rows) / 100)
    x = quantitative("tokens", "tokens read", scale={"type": "symlog", "constant": constant}, axis=TOKENS_AXIS)
    y = quantitative("y", measure.title, scale={"zero": False})
    levels = []
    if measure.is_more_better:
        y["axis"] = {"labelExpr": SIGNED_LABEL, "tickCount": 6}
        levels = [level("y", 0), level("y", -margin, dashed=True)]
    encoding = {"x": x, "y": y, "color": family_colour(rows)}
    by_line = lines({**encoding, "detail": nominal("line")}, opacity=0.8)
    layers = [*levels, by_line, intervals("y", encoding), marks(encoding, 80)]
    return make_spec(f"{measure.title} against tokens read", 300, rows, layers)


def _retraining_plot(found: Sequence[RetrainingRun]) -> list[ReportPlot]:
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
    dashed = f" Dashed: the dense model, {', '.join(f'{value:.4g}' for value in levels)}." if levels else ""
    title = f"Held-out {quality} while retraining"
    names = dict.fromkeys(run.name for run in runs)
    table = {name: (RUN_COLOURS[i % len(RUN_COLOURS)], RUN_SHAPES[i % len(RUN_SHAPES)]) for i, name in enumerate(names)}
    scale: Spec = {"type": "log", "nice": False} if is_wide([row["y"] for row in rows]) else {"zero": False}
    y = quantitative(
        "y", f"held-out {quality}{', nats' * has_teacher}", scale=scale, axis={"format": "~g", "tickCount": 6}
    )
    encoding, look = {"x": quantitative("tokens", "tokens read", axis=TOKENS_AXIS), "y": y}, looks("name", table)
    drawn = [lines({**encoding, "color": look["color"]}), marks({**encoding, **look}, 55)]
    layers = [*(level("y", value, dashed=True) for value in levels), *drawn]
    spec = make_spec(f"Held-out {quality} by tokens", 280, rows, layers)
    return [
        ReportPlot(
            name="heldout",
            title=title,
            caption=f"Of text that was held out, by the tokens that were read.{dashed}",
            summary=f"Held-out {quality} of {len(runs)} trainings, by tokens read.",
            panels=[PlotPanel(spec, picture_title=f"{title}.{dashed}")],
            legend=[(name, *look) for name, look in table.items()],
        )
    ]


# ---- sensitivity ----


def sensitivity_plots(found: FoundDocuments) -> list[ReportPlot]:
    """Return one plot for each file."""
    return [
        _plot(one.document, "sensitivity" if number == 1 else f"sensitivity-{number}")
        for number, one in enumerate(found.sensitivities, 1)
    ]


def _plot(document: SensitivityDocument, name: str) -> ReportPlot:
    ranks = f", {document.sync_tp_size} virtual ranks" if document.sync_tp_size else ""
    aligned = ", aligned" if document.aligned is not None else ""
    windows = f"{document.data.samples} x {document.data.seq_len} tokens"
    return ReportPlot(
        name=name,
        title="Sensitivity of each layer",
        caption=f"{Path(document.model).name}{ranks}{aligned}; {windows}, {INTERVAL:.0%} bootstrap intervals:"
        f" {dense_line(document)}.",
        summary=f"The cost of {document.num_layers} layers as {', '.join(document.kinds)}, each with its interval.",
        panels=[_panel(document)],
        legend=[(kind, *KIND_LOOKS[kind]) for kind in document.kinds],
    )


def _panel(document: SensitivityDocument) -> PlotPanel:
    """Return a panel of each layer's sensitivity by kind, with its interval. Its scale is logarithmic where a few
    layers dwarf the others."""
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
    lowest, highest = min(cost.low for cost in document.costs), max(cost.high for cost in document.costs)
    y = quantitative("y", "increase of perplexity")
    threshold = max(statistics.median(abs(cost.sensitivity) for cost in document.costs), LEAST_COST)
    if highest > WIDE_RANGE * threshold:
        powers = [power for power in POWERS if power >= threshold]
        ticks = [*(-power for power in reversed(powers) if -power >= lowest), 0, *(p for p in powers if p <= highest)]
        y["scale"] = {"type": "symlog", "constant": threshold, "nice": False, "padding": 8}
        y["axis"] = {"values": ticks, "format": "~g", "labelOverlap": True}
    x: Spec = {"field": "layer", "type": "ordinal", "title": "layer", "axis": {"labelAngle": 0, "labelOverlap": True}}
    look = looks("kind", {kind: KIND_LOOKS[kind] for kind in document.kinds})
    encoding = {"x": x, "y": y, "xOffset": {"field": "kind", "type": "nominal", "sort": document.kinds}}
    layers = [
        level("y", 0),
        intervals("y", {**encoding, "color": look["color"]}, width=2),
        marks({**encoding, **look}, 50),
    ]
    spec = make_spec("Sensitivity of each layer", 280, rows, layers)
    return PlotPanel(spec, picture_title="Increase of the perplexity by each layer")
