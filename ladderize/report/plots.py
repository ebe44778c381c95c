"""The plots of a report, in Altair, drawn by vl-convert; both are of the extra ``report``. Each function of a section
returns its plots: none where nothing of it was measured."""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import altair as alt
import numpy as np
import vl_convert

from ladderize.console import printable
from ladderize.convert.sensitivity_file import INTERVAL, LAYER_CHANGES, SensitivityDocument, dense_line
from ladderize.eval.compare import metric_name
from ladderize.eval.table import margin_text
from ladderize.files.documents import read_yaml
from ladderize.report.documents import FoundDocuments, RetrainingRun
from ladderize.report.join import ReportContent
from ladderize.report.models import ReportModel, Setting, Timing, WithInterval, pareto_front, points_text, speedup_text
from ladderize.sweep_document import AS_CONVERTED, THEN

Row = dict[str, Any]  # of a panel's data; its mark is described by the field ``description``
CAPTIONS = Path(__file__).parent / "templates" / "captions.yaml"
WIDTH = 420  # of a drawing's axes, in pixels; the page enlarges it
# in this order they have colours that stand out, but for the last but two
FAMILIES = ["dense", "ladder", "delayed", "spd", "ladder and delayed", "spd + delayed", "spd + ladder", "baseline"]
KINDS = alt.Scale(domain=["measured", "emulated"], range=["circle", "diamond"])
POINT_TICKS = (-100, -50, -20, -10, -5, -2, -1, -0.5, 0, 0.5, 1, 2, 5, 10, 20, 50)
RATIO_TICKS = np.log(
    [0.1, 0.5, 0.8, 0.9, 0.95, 0.98, 1, 1.02, 1.05, 1.1, 1.2, 1.5, 2, 5, 10, 100, 1e3, 1e4, 1e5]
).tolist()
# of names, on no other name and on the middle of no mark: of Vega, which Vega-Lite cannot ask for
LABEL_TRANSFORM = {
    "type": "label",
    "size": {"signal": "[width, height]"},
    "sort": {"field": "datum.x", "order": "descending"},
    "anchor": ["top-right", "top-left", "bottom-right", "bottom-left", "top", "bottom", "right", "left"],
    "offset": [8],
}
SPEED_SCALE, SPEED_AXIS = alt.Scale(zero=False, nice=False, padding=16), alt.Axis(tickCount=6)
STAGES = {"as converted": 50, "aligned": 90, "trained": 150}  # the sizes of marks
TIMES = ["compute", "compute with communication beneath it", "waiting for communication"]
PHASE_TITLES = {"prefill": "Prefill", "decode": "Decode, one token of each row"}
TOKENS_AXIS = alt.Axis(format="~s", labelExpr="datum.value ? datum.label : '0'", tickCount=5)
LEAST_COST = 0.05  # of perplexity; less is next to nothing
COST_TICKS = [-100, -10, -1, -0.1, 0, 0.1, 1, 10, 100, 1e3, 1e4, 1e5, 1e6]
RUN_SHAPES = ["circle", "square", "diamond", "triangle-up", "cross"]  # with eight colours: forty different runs


@dataclass(frozen=True)
class Measure:
    """A distance from the dense model, on an axis that is logarithmic away from 0, so that small losses stay apart."""

    name: str  # of the field of ``ReportModel``
    title: str
    linear: float  # the distance up to which the axis is nearly linear
    ticks: Sequence[float]
    label: str  # Vega's expression for the text of a tick
    more_is_better: bool

    def axis(self, channel: Any) -> Any:
        """Return a channel, ``alt.X`` or ``alt.Y``, on which better is up or to the right."""
        reverse = not self.more_is_better
        scale = alt.Scale(type="symlog", constant=self.linear, reverse=reverse, zero=False, nice=False, padding=16)
        axis = alt.Axis(values=self.ticks, labelExpr=self.label, labelOverlap="greedy")
        return channel.title(f"{self.title} (logarithmic)").scale(scale).axis(axis)


SIGNED_LABEL = "format(datum.value, datum.value ? '+~f' : 'd')"
RATIO_LABEL = "format(exp(datum.value), ',.3~r') + '\u00d7'"
ACCURACY = Measure("difference", "points from dense", 2, POINT_TICKS, SIGNED_LABEL, more_is_better=True)
PERPLEXITY = Measure("perplexity_growth", "perplexity over dense", 0.01, RATIO_TICKS, RATIO_LABEL, more_is_better=False)


def _draw(panel: alt.LayerChart) -> str:
    """Return a panel as SVG. A browser shows the description of the mark under the pointer."""
    vega = vl_convert.vegalite_to_vega(_printable(panel.to_dict()))
    for mark in vega["marks"]:
        if mark["type"] == "text":
            mark["transform"] = [LABEL_TRANSFORM]
    svg = str(vl_convert.vega_to_svg(vega, allowed_base_urls=[]))
    svg = re.sub(r'<(path|rect) (aria-label="([^"]*)"[^>]*)/>', r"<\1 \2><title>\3</title></\1>", svg)
    return re.sub(r' xmlns:xlink="[^"]*"', "", svg)


def _printable(value: Any) -> Any:
    """Return a specification whose texts hold no character that XML forbids: vl-convert ends the process over one."""
    if isinstance(value, dict):
        return {key: _printable(entry) for key, entry in value.items()}
    if isinstance(value, list):
        return [_printable(entry) for entry in value]
    return printable(value) if isinstance(value, str) else value


@dataclass
class ReportPlot:
    name: str  # of its figure and its pictures
    title: str
    caption: str
    panels: list[alt.LayerChart]

    @property
    def data(self) -> list[str]:
        return list(dict.fromkeys(row["description"] for panel in self.panels for row in panel.data.values))

    @cached_property
    def drawings(self) -> list[str]:
        return [_draw(panel) for panel in self.panels]

    def save_pictures(self, folder: Path) -> list[Path]:
        """Write each drawing as PNG, for dense screens, and as SVG; return the paths. Several are numbered."""
        paths = []
        for number, drawing in enumerate(self.drawings, 1):
            stem = f"{self.name}-{number}" if len(self.panels) > 1 else self.name
            png, svg = folder / f"{stem}.png", folder / f"{stem}.svg"
            png.write_bytes(vl_convert.svg_to_png(drawing, scale=3))
            svg.write_text(drawing, encoding="utf-8")
            paths += [png, svg]
        return paths


def make_panel(title: str, height: Any, rows: list[Row], layers: list[Any]) -> alt.LayerChart:
    config = alt.Config(
        axis=alt.AxisConfig(labelLimit=0),
        axisQuantitative=alt.AxisConfig(grid=True),
        legend=alt.LegendConfig(title=None, orient="bottom", columns=4, labelLimit=0),
        range=alt.RangeConfig(category={"scheme": "dark2"}),
        title=alt.TitleConfig(anchor="start", fontSize=11),
        view=alt.ViewConfig(stroke=None),
    )
    data = alt.InlineData(values=rows)
    return alt.layer(*layers, data=data, title=title, width=WIDTH, height=height, config=config)


def family_colour(rows: list[Row]) -> alt.Color:
    """Return the colours of the families, which are the same in all panels; the legend has those of these rows."""
    families = {row["family"] for row in rows}
    legend = alt.Legend(values=[family for family in FAMILIES if family in families])
    return alt.Color("family:N", scale=alt.Scale(domain=FAMILIES), legend=legend)


def level(channel: Any, value: float, *, dashed: bool = False) -> alt.Chart:
    """Draw a line across the whole plot at a value of ``alt.X`` or ``alt.Y``, which screen readers skip."""
    rule = alt.Chart(alt.InlineData(values=[{}])).encode(channel(datum=value))
    return rule.mark_rule(aria=False, color="gray", strokeDash=[6, 4] if dashed else alt.Undefined)


def intervals(chart: alt.Chart, axis: str) -> alt.Chart:
    """Draw a bar for each row that has the ends of an interval of ``x`` or ``y``, which screen readers skip."""
    bars = chart.mark_rule(aria=False, strokeWidth=2)
    return bars.encode(x="x_low:Q", x2="x_high:Q") if axis == "x" else bars.encode(y="y_low:Q", y2="y_high:Q")


def marks(chart: alt.Chart, size: int) -> alt.Chart:
    return chart.mark_point(filled=True, size=size, opacity=1).encode(description="description:N")


def dots(title: str, rows: list[Row], x: alt.X, levels: list[alt.Chart]) -> alt.LayerChart:
    """Draw a row for each model, with a mark and its interval. Where rows have a kind, shapes tell it."""
    chart = alt.Chart().encode(x, alt.Y("name:N", title=None, sort=None), family_colour(rows))
    points = marks(chart, 80)
    if any("kind" in row for row in rows):
        points = points.encode(alt.Shape("kind:N", scale=KINDS, legend=None))
    return make_panel(title, alt.Step(22), rows, [*levels, intervals(chart, "x"), points])


def filled(plots: list[ReportPlot], least: int = 1) -> list[ReportPlot]:
    """Return the plots that have any panels, with the panels that have ``least`` rows or more."""
    for plot in plots:
        plot.panels = [panel for panel in plot.panels if len(panel.data.values) >= least]
    return [plot for plot in plots if plot.panels]


def tradeoff_plots(content: ReportContent, first: Setting | None) -> list[ReportPlot]:
    """Return a plot for each measure, with a panel for each setting, the ``first`` one first."""
    settings = sorted(content.settings, key=lambda setting: setting != first)
    caption = read_yaml(CAPTIONS)["tradeoff"]
    margin = f" The dashed line is the margin, {margin_text(content.margin)}."
    panels = [_tradeoff_panel(content, ACCURACY, setting) for setting in settings]
    accuracy = ReportPlot("tradeoff", "Speed-up against accuracy", caption + margin, panels)
    panels = [_tradeoff_panel(content, PERPLEXITY, setting) for setting in settings]
    perplexity = ReportPlot("tradeoff-perplexity", "Speed-up against perplexity", caption, panels)
    return filled([accuracy, perplexity], 2)


def _tradeoff_panel(content: ReportContent, measure: Measure, setting: Setting) -> alt.LayerChart:
    rows: list[Row] = []
    for model in content.models:
        timing, score = model.timings.get(setting), getattr(model, measure.name)
        if timing is not None and score is not None:
            speed = timing.speedup()
            row: Row = {"name": model.name, "family": model.family, "kind": setting.kind}
            row["stage"] = [*STAGES][bool(model.adaptation) + model.was_trained]
            row["description"] = f"{model.title}; end to end {speedup_text(speed)}, {setting.title}; {model.scores}"
            rows.append(row | speed.fields("x") | score.fields("y"))
    sign = 1 if measure.more_is_better else -1
    for row, is_front in zip(rows, pareto_front([(row["x"], sign * row["y"]) for row in rows]), strict=True):
        row["front"] = is_front
        row["description"] += "; on the Pareto front" * is_front
    x = alt.X("x:Q", title="speed-up over dense (\u00d7)", scale=SPEED_SCALE, axis=SPEED_AXIS)
    chart = alt.Chart().encode(x, measure.axis(alt.Y("y:Q")))
    coloured = chart.encode(family_colour(rows))
    sizes = alt.Scale(type="ordinal", domain=[*STAGES], range=[*STAGES.values()])
    points = coloured.encode(
        alt.Shape("kind:N", scale=KINDS, legend=None),
        alt.Size("stage:O", scale=sizes, legend=None),
        description="description:N",
    )
    front = chart.transform_filter("datum.front").mark_line(aria=False, color="gray", strokeDash=[2, 3])
    layers = [
        level(alt.X, 1),
        level(alt.Y, 0),
        *[level(alt.Y, -content.margin, dashed=True)] * (measure is ACCURACY),
        front.encode(order="x:Q"),
        intervals(coloured, "x"),
        intervals(coloured, "y"),
        points.transform_filter("!datum.front").mark_point(fill="white", opacity=1),
        points.transform_filter("datum.front").mark_point(filled=True, opacity=1),
        chart.mark_text(aria=False).encode(text=alt.condition("datum.front", "name:N", alt.value(""))),
    ]
    return make_panel(setting.title, 300, rows, layers)


def _timings(content: ReportContent, setting: Setting) -> list[tuple[ReportModel, Timing]]:
    """Return all times in a setting, without those that a model shares with another."""
    models = [model for model in content.every if setting in model.timings and model.timed_as is None]
    return [(model, model.timings[setting]) for model in models]


def speed_plots(content: ReportContent) -> list[ReportPlot]:
    caption = read_yaml(CAPTIONS)["speed"]
    if any(setting.is_random for setting in content.settings):
        caption += " Random weights: only the times mean something."
    panels = []
    for setting in content.settings:
        rows: list[Row] = []
        for model, timing in _timings(content, setting):
            if not timing.is_first:
                ms = timing.row.ms
                row = {"name": model.name, "family": model.family, "kind": setting.kind}
                row["description"] = (
                    f"{model.title}; {setting.title}; end to end {speedup_text(timing.speedup())};"
                    f" prefill {speedup_text(timing.speedup('prefill'))}, {ms['prefill']:.3f} ms;"
                    f" decode {speedup_text(timing.speedup('decode'))}, {ms['decode']:.3f} ms,"
                    f" {timing.row.tokens_per_s:.1f} tokens/s"
                )
                rows.append(row | timing.speedup().fields("x"))
        x = alt.X("x:Q", title="speed-up (\u00d7)", scale=SPEED_SCALE, axis=SPEED_AXIS)
        panels.append(dots(setting.title, rows, x, [level(alt.X, 1)]))
    return filled([ReportPlot("speed", "Speed-up in each setting", caption, panels)])


def time_plots(content: ReportContent) -> list[ReportPlot]:
    """Return one plot for each phase, with a panel for each setting where communication was measured."""
    # one rank has nothing to wait for, so its waits are noise
    settings = [setting for setting in content.settings if setting.tp_size > 1]
    plots = []
    for phase, title in PHASE_TITLES.items():
        panels = [_time_panel(phase, setting, _timings(content, setting)) for setting in settings]
        plots.append(ReportPlot(f"time-{phase}", title, read_yaml(CAPTIONS)["time"], panels))
    return filled(plots)


def _time_panel(phase: str, setting: Setting, timings: list[tuple[ReportModel, Timing]]) -> alt.LayerChart:
    rows: list[Row] = []
    for model, timing in timings:
        if (sent := (timing.row.communication or {}).get(phase)) is None:
            continue
        # a difference of two medians: it may come out below 0, or above all communication, which no time can be
        computed = min(sent.no_communication_ms, timing.row.ms[phase])
        most = min(sent.alone_ms, computed)
        hidden = min(max(0.0, sent.alone_ms - sent.exposed_ms), most) if timing.row.overlaps(phase) else 0.0
        waited = WithInterval(sent.exposed_ms, *sent.exposed_interval_ms)
        for order, time in enumerate((WithInterval(computed - hidden), WithInterval(hidden), waited)):
            if time.value > 0:
                row: Row = {"name": model.name, "time": TIMES[order], "order": order, "ms": time.value}
                row["description"] = f"{model.title}: {TIMES[order]} {time.text(3)} ms; {setting.title}"
                rows.append(row)
    bars = alt.Chart().encode(
        alt.X("ms:Q", title="ms"),
        alt.Y("name:N", title=None, sort=None),
        alt.Color("time:N", scale=alt.Scale(domain=TIMES), legend=alt.Legend(columns=2)),
        order="order:Q",
        description="description:N",
    )
    return make_panel(setting.title, alt.Step(22), rows, [bars.mark_bar(height={"band": 0.7})])


def task_plots(content: ReportContent) -> list[ReportPlot]:
    tasks: dict[str, list[Row]] = {}
    titles = {}
    compared = [(model, model.comparison) for model in content.models if model.comparison is not None]
    for model, comparison in compared:
        for task in comparison.tasks:
            if not task.main or task.verdict is None:  # another metric, or one without a meaning in points
                continue
            points = WithInterval.of(task).mapped(lambda value: 100 * value)
            description = f"{model.title}; {task.task}: {points_text(points)} points"
            if task.right_to_wrong is not None and task.wrong_to_right is not None:
                lost, won = len(task.right_to_wrong), len(task.wrong_to_right)
                description += f"; {lost} right to wrong, {won} wrong to right"
            row: Row = {"name": model.name, "family": model.family, "description": description}
            tasks.setdefault(task.task, []).append(row | points.fields("x"))
            titles[task.task] = f"points of {metric_name(task.metric, task.filter)} from dense (logarithmic)"
    levels = [level(alt.X, 0), level(alt.X, -content.margin, dashed=True)]
    axes = {name: ACCURACY.axis(alt.X("x:Q")).title(title) for name, title in titles.items()}
    panels = [dots(name, rows, axes[name], levels) for name, rows in tasks.items()]
    return filled([ReportPlot("tasks", "Differences task by task", read_yaml(CAPTIONS)["tasks"], panels)])


def recovery_plots(content: ReportContent) -> list[ReportPlot]:
    """Return one plot of adapted models by tokens."""
    adapted = [model for model in content.models if model.adapted is not None]
    trained = {model.origin for model in adapted if model.tokens}
    models = sorted((model for model in adapted if model.origin in trained), key=lambda model: model.tokens or 0)
    measure = ACCURACY if any(model.difference for model in models) else PERPLEXITY
    models = [model for model in models if getattr(model, measure.name) is not None]
    rows: list[Row] = []
    for model in models:
        for adapted_as in dict.fromkeys(other.adapted for other in models if other.origin == model.origin):
            if model.adapted == AS_CONVERTED or f"{adapted_as}{THEN}".startswith(f"{model.adapted}{THEN}"):
                row: Row = {"line": f"{model.layout.words}, {adapted_as}", "conversion": model.conversion}
                row |= {"name": model.name, "family": model.family, "description": f"{model.title}; {model.scores}"}
                row |= {"tokens": model.tokens or 0, "is_end": model.adapted == adapted_as}
                rows.append(row | getattr(model, measure.name).fields("y"))
    scale = alt.Scale(type="symlog", constant=max(1.0, max((row["tokens"] for row in rows), default=0) / 100))
    x = alt.X("tokens:Q", title="tokens read", scale=scale, axis=TOKENS_AXIS)
    chart = alt.Chart().encode(x, measure.axis(alt.Y("y:Q")), family_colour(rows))
    layers = [
        level(alt.Y, 0),
        *[level(alt.Y, -content.margin, dashed=True)] * (measure is ACCURACY),
        chart.mark_line(aria=False, opacity=0.8).encode(alt.Detail(["line:N", "conversion:N"])),
        intervals(chart, "y"),
        marks(chart.transform_filter("datum.is_end"), 60),
    ]
    caption = f"Each line is one layout and way of adapting it: {measure.title} {read_yaml(CAPTIONS)['recovery']}"
    panel = make_panel("", 240, rows, layers)
    return filled([ReportPlot("recovery", "Recovery against tokens", caption, [panel])], 2)


def retraining_plots(documents: FoundDocuments) -> list[ReportPlot]:
    """Return one plot of all runs that held text out: of the KL where all runs measured it, else of the perplexity."""
    runs = [(folder, run) for folder, run in documents.of(RetrainingRun) if run.validations]
    names = [run.name for _, run in runs]
    if len(set(names)) < len(names):
        names = [f"{folder.parent.name}/{folder.name}" for folder, _ in runs]
    validations = [(name, line) for name, (_, run) in zip(names, runs, strict=True) for line in run.validations]
    has_teacher = all(line.heldout_divergence is not None for _, line in validations)
    key, quality = ("heldout_divergence", "KL to dense") if has_teacher else ("heldout_perplexity", "perplexity")
    rows: list[Row] = []
    for name, line in validations:
        value = line.value(key)
        if value is not None:
            row = {"name": name, "step": line.step, "tokens": line.tokens, "y": value}
            rows.append({**row, "description": f"{name}: {line.tokens:,} tokens, {quality} {value:.4g}"})
    dense = {line.value("dense_heldout_perplexity") for _, line in validations}
    levels = [] if has_teacher else sorted({round(value, 6) for value in dense if value is not None})
    dashed = f"Dashed: the dense model, {', '.join(f'{value:.4g}' for value in levels)}." if levels else ""
    scale = alt.Scale(type="log", nice=False) if all(row["y"] > 0 for row in rows) else alt.Scale(zero=False)
    y_axis = alt.Axis(format="~g", tickCount=6)
    chart = alt.Chart().encode(
        alt.X("tokens:Q", title="tokens read", axis=TOKENS_AXIS),
        alt.Y("y:Q", title=f"held-out {quality}{', nats' * has_teacher}", scale=scale, axis=y_axis),
        alt.Color("name:N", scale=alt.Scale(domain=names)),
    )
    points = marks(chart, 40).encode(alt.Shape("name:N", scale=alt.Scale(domain=names, range=RUN_SHAPES)))
    layers = [*(level(alt.Y, value, dashed=True) for value in levels), chart.mark_line(aria=False), points]
    caption = f"Of text that was held out, by the tokens that were read. {dashed}"
    panels = [make_panel(dashed, 220, rows, layers)]
    return filled([ReportPlot("heldout", f"Held-out {quality} while retraining", caption, panels)])


def sensitivity_plots(documents: FoundDocuments) -> list[ReportPlot]:
    plots = []
    for number, (_, document) in enumerate(documents.of(SensitivityDocument), 1):
        name = "sensitivity" if number == 1 else f"sensitivity-{number}"
        caption = f"{dense_line(document).capitalize()}. Bars are {INTERVAL:.0%} bootstrap intervals."
        plots.append(ReportPlot(name, "Sensitivity of each layer", caption, [_sensitivity_panel(document)]))
    return plots


def _sensitivity_panel(document: SensitivityDocument) -> alt.LayerChart:
    """Return a panel of each layer's sensitivity by kind; logarithmic away from 0, as a few layers dwarf the others."""
    rows: list[Row] = []
    for cost in document.costs:
        text = f"{cost.sensitivity:.4g} ({cost.low:.4g} to {cost.high:.4g})"
        row = {"layer": cost.layer, "kind": cost.kind, "description": f"layer {cost.layer} as {cost.kind}: {text}"}
        rows.append(row | WithInterval(cost.sensitivity, cost.low, cost.high).fields("y"))
    scale = alt.Scale(type="symlog", constant=LEAST_COST, nice=False, padding=8)
    axis = alt.Axis(values=COST_TICKS, format="~g", labelOverlap=True)
    chart = alt.Chart().encode(
        alt.X("layer:O", title="layer", axis=alt.Axis(labelAngle=0, labelOverlap=True)),
        alt.Y("y:Q", title="increase of perplexity", scale=scale, axis=axis),
        alt.XOffset("kind:N", sort=document.kinds),
        alt.Color("kind:N", scale=alt.Scale(domain=LAYER_CHANGES), legend=alt.Legend(values=document.kinds)),
    )
    points = marks(chart, 40).encode(alt.Shape("kind:N", scale=alt.Scale(domain=LAYER_CHANGES)))
    ranks = f", {document.sync_tp_size} virtual ranks" if document.sync_tp_size else ""
    title = f"{Path(document.model).name}{ranks}{', aligned' if document.aligned is not None else ''}"
    return make_panel(title, 220, rows, [level(alt.Y, 0), intervals(chart, "y"), points])
