"""Plots and the parts that they share. A panel is a Vega-Lite specification, which vl-convert-python (of the extra
``report``) draws as SVG.

Colours are CSS variables, so that a drawing in the page follows its dark mode. A picture file gets the light colours.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from ladderize.console import printable

Spec = dict[str, Any]
PlotRows = Sequence[Mapping[str, Any]]  # the data of a plot; a mark is described by its row's ``words``
# name -> (light, dark); text has a contrast of 4.5 to the page in both, marks of 3
PALETTE = {
    "page": ("#ffffff", "#14171c"),
    "card": ("#f5f6f8", "#1d2129"),
    "ink": ("#1b1f26", "#e9ebef"),
    "muted": ("#555d6b", "#aab2c0"),
    "line": ("#d5d9e0", "#39404c"),
    "link": ("#1a56b0", "#8ab8ff"),
    "dense": ("#4a5261", "#c2c9d4"),
    "ladder": ("#1f63c9", "#78aefc"),
    "spd": ("#b4500c", "#f0a050"),
    "both": ("#0a7566", "#4fd0b6"),
    "delayed": ("#b02a5b", "#f08ab0"),
    "both-delayed": ("#756600", "#d6c34a"),
    "baseline": ("#8a3ea8", "#d59cf0"),
    "compute": ("#6b7482", "#8e98a8"),
    "hidden": ("#1f63c9", "#78aefc"),
    "waited": ("#b4500c", "#f0a050"),
}
DRAWING_WIDTH = 560  # of a drawing's axes, in pixels
# of an axis of differences: a plus, a true minus, or neither at 0
SIGNED_LABEL = "(datum.value > 0 ? '+' : datum.value < 0 ? '\u2212' : '') + format(abs(datum.value), '~f')"
TEXT: Spec = {"labelColor": "var(--ink)", "titleColor": "var(--ink)", "labelFontSize": 13}
VEGA_CONFIG: Spec = {
    "font": "sans-serif",
    "view": {"stroke": None},
    "title": {"color": "var(--ink)", "anchor": "start", "fontSize": 13, "offset": 8},
    "axis": {
        **TEXT,
        "labelColor": "var(--muted)",
        "titleFontWeight": 500,
        "titleFontSize": 13,
        "titlePadding": 8,
        "gridColor": "var(--line)",
        "domainColor": "var(--line)",
        "tickColor": "var(--line)",
    },
    "axisQuantitative": {"grid": True},
    "legend": {**TEXT, "title": None, "orient": "bottom", "columns": 4, "labelLimit": 0, "symbolOpacity": 1},
    "text": {"color": "var(--ink)", "fontSize": 13},
}
# of ``ReportModel.family`` and ``Setting.kind``, in the order of legends
FAMILY_COLOURS = {
    "dense": "dense",
    "ladder": "ladder",
    "delayed": "delayed",
    "spd": "spd",
    "spd + ladder": "both",
    "spd + delayed": "both-delayed",
    "ladder and delayed": "compute",
    "baseline": "baseline",
}
KIND_SHAPES = {"measured": "circle", "emulated": "diamond"}
# a row for each model
MODEL_ROWS: Spec = {"field": "name", "type": "nominal", "title": None, "sort": None, "axis": {"labelLimit": 0}}
POINT_TICKS = (-100, -50, -20, -10, -5, -2, -1, -0.5, 0, 0.5, 1, 2, 5, 10, 20, 50)
RATIOS = (0.1, 0.5, 0.8, 0.9, 0.95, 0.98, 1, 1.02, 1.05, 1.1, 1.2, 1.5, 2, 5, 10, 100, 1e3, 1e4, 1e5)
LOG_RATIOS, RATIO_LABEL = np.log(RATIOS).tolist(), "format(exp(datum.value), ',.3~r') + '\u00d7'"


@dataclass(frozen=True)
class Measure:
    """A distance from the dense model, on an axis that is logarithmic away from 0, so that small losses stay apart.

    name: of the property of ``ReportModel``.
    linear: the distance up to which the axis is nearly linear.
    label: Vega's expression for the text of a tick.
    """

    name: str
    title: str
    linear: float
    ticks: Sequence[float]
    label: str
    more_is_better: bool

    def axis(self, field: str, **more: Any) -> Spec:
        """Return the encoding of a field: better is up or to the right."""
        scale = {"type": "symlog", "constant": self.linear, "reverse": not self.more_is_better}
        scale |= {"zero": False, "nice": False, "padding": 16, **more}
        axis = {"values": self.ticks, "labelExpr": self.label, "labelOverlap": "greedy"}
        return quantitative(field, f"{self.title} (logarithmic)", scale=scale, axis=axis)

    def scaled(self, values: Any) -> Any:
        """Return a number, or an array, as the axis has it; more is better."""
        sizes = np.sign(values) * np.log1p(np.abs(values) / self.linear)
        return sizes if self.more_is_better else -sizes


ACCURACY = Measure("difference", "points from dense", 2, POINT_TICKS, SIGNED_LABEL, more_is_better=True)
PERPLEXITY = Measure("perplexity_growth", "perplexity over dense", 0.01, LOG_RATIOS, RATIO_LABEL, more_is_better=False)


@dataclass(frozen=True)
class ReportPlot:
    """A plot.

    name: of its figure and its pictures.
    panels: its drawings.
    """

    name: str
    title: str
    caption: str
    panels: list[Spec]

    @property
    def data(self) -> list[str]:
        """The descriptions of all marks."""
        rows = (row for panel in self.panels for row in panel["data"]["values"])
        return list(dict.fromkeys(row["words"] for row in rows))


# ---- parts of a specification ----


def make_spec(title: str, height: int, rows: PlotRows, layers: list[Spec]) -> Spec:
    """Return a layered specification.

    rows: the data of its layers.
    """
    return {
        "title": title,
        "width": DRAWING_WIDTH,
        "height": height,
        "padding": 8,
        "background": "var(--page)",
        "data": {"values": rows},
        "layer": layers,
        "config": VEGA_CONFIG,
    }


def quantitative(field: str, title: str, **more: Any) -> Spec:
    return {"field": field, "type": "quantitative", "title": title, **more}


def nominal(field: str, ends: Mapping[str, str]) -> Spec:
    """Return a nominal encoding.

    ends: the shape of each value, or the name of its colour in PALETTE.
    """
    shown = [f"var(--{end})" if end in PALETTE else end for end in ends.values()]
    return {"field": field, "type": "nominal", "scale": {"domain": list(ends), "range": shown}}


def looks(field: str, table: Mapping[str, tuple[str, str]], columns: int = 4) -> Spec:
    """Return colour and shape by one field.

    table: the name in PALETTE and the shape of each value.
    columns: of the legend.
    """
    colours, shapes = ({value: look[place] for value, look in table.items()} for place in (0, 1))
    legend = {"legend": {"columns": columns}}
    return {"color": {**nominal(field, colours), **legend}, "shape": {**nominal(field, shapes), **legend}}


def family_colour(rows: PlotRows) -> Spec:
    """Return the colours of the families in these rows; only those have a place in the legend."""
    families = {row["family"] for row in rows}
    return nominal("family", {name: colour for name, colour in FAMILY_COLOURS.items() if name in families})


def kind_shape() -> Spec:
    """Return the shapes of the kinds of timing, without a legend: the panel's title says the kind."""
    return {**nominal("kind", KIND_SHAPES), "legend": None}


def level(axis: str, value: float, *, dashed: bool = False) -> Spec:
    """Draw a line across the whole plot, which screen readers skip.

    axis: ``x`` or ``y``, the axis of the value.
    """
    dashes = {"strokeDash": [6, 4]} if dashed else {}
    return {
        "mark": {"type": "rule", "aria": False, "color": "var(--muted)", **dashes},
        "encoding": {axis: {"datum": value}},
    }


def intervals(axis: str, encoding: Spec) -> Spec:
    """Draw a bar for each row that has both ends, which screen readers skip.

    axis: ``x`` or ``y``. Its field's ends are in the fields of the same name with 1 and 2 behind it.
    """
    field = encoding[axis]["field"]
    return {
        "transform": [{"filter": f"isValid(datum.{field}1) && isValid(datum.{field}2)"}],
        "mark": {"type": "rule", "aria": False, "strokeWidth": 2, "opacity": 0.8},
        "encoding": {**encoding, axis: {**encoding[axis], "field": f"{field}1"}, f"{axis}2": {"field": f"{field}2"}},
    }


def marks(encoding: Spec, size: int) -> Spec:
    """Draw a mark for each row, described by its field ``words``."""
    return {
        "mark": {"type": "point", "filled": True, "size": size, "opacity": 1},
        "encoding": {**encoding, "description": {"field": "words"}},
    }


def lines(encoding: Spec, **mark: Any) -> Spec:
    return {"mark": {"type": "line", "aria": False, "strokeWidth": 1.5, **mark}, "encoding": encoding}


def row_height(rows: PlotRows) -> int:
    """Return the height of a drawing with a row for each model, in pixels."""
    return 24 * max(len({row["name"] for row in rows}), 1)


def dots(title: str, rows: PlotRows, x: Spec, levels: list[Spec]) -> Spec:
    """Draw a row for each model, with a mark and its interval. Where rows have a kind, shapes tell it."""
    encoding = {"x": x, "y": MODEL_ROWS, "color": family_colour(rows)}
    shape = {"shape": kind_shape()} if any("kind" in row for row in rows) else {}
    layers = [*levels, intervals("x", encoding), marks({**encoding, **shape}, 90)]
    return make_spec(title, row_height(rows), rows, layers)


# ---- drawing ----


def draw(panel: Spec) -> str:
    """Return a panel as SVG with the page's colours. A browser shows the description of the mark under the pointer."""
    import vl_convert

    svg = str(vl_convert.vegalite_to_svg(_printable(panel), allowed_base_urls=[]))
    svg = re.sub(r'<(path|rect) (aria-label="([^"]*)"[^>]*)/>', r"<\1 \2><title>\3</title></\1>", svg)
    return re.sub(r' xmlns:xlink="[^"]*"', "", svg)


def _printable(value: Any) -> Any:
    """Return a specification whose texts hold no character that XML forbids: vl-convert ends the process over one."""
    if isinstance(value, dict):
        return {key: _printable(entry) for key, entry in value.items()}
    if isinstance(value, list | tuple):
        return [_printable(entry) for entry in value]
    return printable(value) if isinstance(value, str) else value


def save_pictures(drawing: str, stem: Path) -> list[Path]:
    """Write ``stem``.png, for dense screens, and ``stem``.svg, both in light colours; return their paths."""
    import vl_convert

    for name, (light, _) in PALETTE.items():
        drawing = drawing.replace(f"var(--{name})", light)
    png, svg = stem.with_name(f"{stem.name}.png"), stem.with_name(f"{stem.name}.svg")
    png.write_bytes(vl_convert.svg_to_png(drawing, scale=2))
    svg.write_text(drawing, encoding="utf-8")
    return [png, svg]
