"""The pieces of the page's plots, in Altair, and their drawing by vl-convert. Both are of the extra ``report``."""

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

Row = dict[str, Any]  # of a panel's data; its mark is described by the field ``description``
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


@dataclass(frozen=True)
class Measure:
    """A distance from the dense model, on an axis that is logarithmic away from 0, so that small losses stay apart.

    name: of the field of ``ReportModel``.
    linear: the distance up to which the axis is nearly linear.
    label: Vega's expression for the text of a tick.
    """

    name: str
    title: str
    linear: float
    ticks: Sequence[float]
    label: str
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
    """name: of its figure and its pictures."""

    name: str
    title: str
    caption: str
    panels: list[alt.LayerChart]

    @property
    def data(self) -> list[str]:
        """The descriptions of all marks."""
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


def margin_level(measure: Measure, margin: float) -> list[alt.Chart]:
    return [level(alt.Y, -margin, dashed=True)] if measure is ACCURACY else []


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
