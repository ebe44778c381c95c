"""Plots and the parts that they share. A panel of a plot is a Vega-Lite specification, which the page shows and
vl-convert-python (of the extra ``report``) saves as PNG and SVG.

Colours are CSS variables, so that drawings follow the page's dark mode without being drawn again. A picture file gets
the light colours instead.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ladderize.console import printable
from ladderize.report.models import ReportModel, WithInterval, perplexity_text, points_text

Spec = dict[str, Any]
SCHEMA = "https://vega.github.io/schema/vega-lite/v6.json"  # a name; nothing is loaded from there
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
    "baseline": ("#8a3ea8", "#d59cf0"),
    "compute": ("#6b7482", "#8e98a8"),
    "hidden": ("#1f63c9", "#78aefc"),
    "waited": ("#b4500c", "#f0a050"),
}
PICTURE_WIDTH = 720
DASHES = [6, 4]
# of an axis of differences: a plus, a true minus, or neither at 0
SIGNED_LABEL = "(datum.value > 0 ? '+' : datum.value < 0 ? '\u2212' : '') + format(abs(datum.value), '~f')"
VEGA_AXIS = {
    "labelColor": "var(--muted)",
    "titleColor": "var(--ink)",
    "titleFontWeight": 500,
    "titleFontSize": 12,
    "labelFontSize": 12,
    "gridColor": "var(--line)",
    "domainColor": "var(--line)",
    "tickColor": "var(--line)",
    "labelLimit": 150,
    "titlePadding": 8,
}
VEGA_CONFIG = {
    "font": 'system-ui, -apple-system, "Segoe UI", Roboto, "Noto Sans", sans-serif',
    "view": {"stroke": None},
    "axis": VEGA_AXIS,
    "axisQuantitative": {"grid": True},
    "legend": {"disable": True},
    "text": {"color": "var(--ink)", "fontSize": 12},
}
# of ``ReportModel.family`` and ``Setting.kind``, in the order of legends
FAMILY_COLOURS = {"dense": "dense", "ladder": "ladder", "spd": "spd", "spd + ladder": "both", "baseline": "baseline"}
KIND_SHAPES = {"measured": "circle", "emulated": "diamond"}
# a row for each model
MODEL_ROWS: Spec = {"field": "name", "type": "nominal", "title": None, "sort": None, "axis": {"labelLimit": 170}}
# the data of a plot; rows of models have ``name``, ``family`` and perhaps ``kind``
PlotRows = Sequence[Mapping[str, Any]]
WIDE_RATIO = 4  # of the largest value to the least: beyond, a scale is logarithmic


@dataclass(frozen=True)
class PlotPanel:
    """One drawing.

    title: the text above it, where a plot has several panels.
    picture_title: the title of a picture, where it is another.
    """

    spec: Spec
    title: str = ""
    picture_title: str = ""


@dataclass(frozen=True)
class PlotChoice:
    """A selection that a reader makes in a plot.

    parameter: the name of the specification's parameter.
    options: value and text of each option.
    """

    parameter: str
    label: str
    options: list[tuple[str, str]]


@dataclass(frozen=True)
class ReportPlot:
    """A plot.

    name: of its figure and its pictures.
    summary: its content in words, for those who do not see it.
    legend: the text, the colour and the shape of each swatch.
    interactive: True if its marks take the focus.
    """

    name: str
    title: str
    caption: str
    summary: str
    panels: list[PlotPanel]
    legend: list[tuple[str, str, str]] = field(default_factory=list)
    choices: list[PlotChoice] = field(default_factory=list)
    interactive: bool = False

    @property
    def data(self) -> list[str]:
        """The descriptions of all marks."""
        rows = (row for panel in self.panels for row in panel.spec["data"]["values"])
        return list(dict.fromkeys(row["words"] for row in rows))


@dataclass(frozen=True)
class Measure:
    """A measure of a model's quality.

    is_more_better: True if a larger value is better; else a smaller one is.
    text: writes the number and its interval.
    """

    title: str
    is_more_better: bool
    text: Callable[[WithInterval], str]

    def value(self, one: ReportModel, reference: ReportModel | None) -> WithInterval | None:
        if not self.is_more_better:
            return one.perplexity
        return WithInterval(0.0) if one is reference and one.accuracy is not None else one.difference


# ---- parts of a specification ----


def make_spec(summary: str, height: int, rows: Sequence[Mapping[str, Any]], layers: list[Spec], **more: Any) -> Spec:
    """Return a layered specification as wide as its container.

    rows: the data of its layers.
    """
    return {
        "$schema": SCHEMA,
        "description": summary,
        "width": "container",
        "height": height,
        "padding": {"left": 2, "right": 6, "top": 6, "bottom": 2},
        "background": None,
        "data": {"values": rows},
        **more,
        "layer": layers,
        "config": VEGA_CONFIG,
    }


def quantitative(field: str, title: str, **more: Any) -> Spec:
    return {"field": field, "type": "quantitative", "title": title, **more}


def nominal(field: str, ends: Mapping[str, str] | None = None) -> Spec:
    """Return a nominal encoding.

    ends: the shape of each value, or the name of its colour in PALETTE.
    """
    if ends is None:
        return {"field": field, "type": "nominal"}
    shown = [f"var(--{end})" if end in PALETTE else end for end in ends.values()]
    return {"field": field, "type": "nominal", "scale": {"domain": list(ends), "range": shown}}


def looks(field: str, table: Mapping[str, tuple[str, str]]) -> Spec:
    """Return colour and shape by one field.

    table: the name in PALETTE and the shape of each value.
    """
    colours, shapes = ({value: look[place] for value, look in table.items()} for place in (0, 1))
    return {"color": nominal(field, colours), "shape": nominal(field, shapes)}


def level(axis: str, value: float, *, dashed: bool = False, **mark: Any) -> Spec:
    """Draw a line across the whole plot, which screen readers skip.

    axis: ``x`` or ``y``, the axis of the value.
    """
    dashes = {"strokeDash": DASHES} if dashed else {}
    line = {"type": "rule", "aria": False, "color": "var(--muted)", **dashes, **mark}
    return {"mark": line, "encoding": {axis: {"datum": value}}}


def intervals(axis: str, encoding: Spec, *, width: float = 1.5) -> Spec:
    """Draw a bar for each row that has both ends, which screen readers skip.

    axis: ``x`` or ``y``. Its field's ends are in the fields of the same name with 1 and 2 behind it.
    """
    field = encoding[axis]["field"]
    return {
        "transform": [{"filter": f"isValid(datum.{field}1) && isValid(datum.{field}2)"}],
        "mark": {"type": "rule", "aria": False, "strokeWidth": width, "opacity": 0.8},
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


# ---- parts of plots of models ----

BY_ACCURACY = Measure("points from dense", True, points_text)
BY_PERPLEXITY = Measure("perplexity", False, perplexity_text)


def is_wide(values: Sequence[float]) -> bool:
    """Return True if only a logarithmic scale tells the values apart."""
    return min(values) > 0 and max(values) / min(values) > WIDE_RATIO


def row_height(rows: PlotRows) -> int:
    """Return the height of a drawing with a row for each model, in pixels."""
    return 24 * max(len({row["name"] for row in rows}), 1)


def dots(summary: str, rows: PlotRows, x: Spec, levels: list[Spec], **more: Any) -> Spec:
    """Draw a row for each model, with a mark and its interval. Where rows have a kind, shapes tell it."""
    encoding = {"x": x, "y": MODEL_ROWS, "color": family_colour(rows)}
    shape = {"shape": kind_shape(rows)} if any("kind" in row for row in rows) else {}
    layers = [*levels, intervals("x", encoding, width=3), marks({**encoding, **shape}, 90)]
    return make_spec(summary, row_height(rows), rows, layers, **more)


def family_colour(rows: PlotRows) -> Spec:
    """Return the colours of the families in these rows; only those have a place in a picture's legend."""
    return nominal("family", _shown(rows, "family", FAMILY_COLOURS))


def kind_shape(rows: PlotRows) -> Spec:
    """Return the shapes of the kinds of timing in these rows."""
    return nominal("kind", _shown(rows, "kind", KIND_SHAPES))


def family_legend(rows: PlotRows) -> list[tuple[str, str, str]]:
    """Return swatches of the families and kinds that a plot shows."""
    families = [(name, colour, "circle") for name, colour in _shown(rows, "family", FAMILY_COLOURS).items()]
    return families + [(name, "ink", shape) for name, shape in _shown(rows, "kind", KIND_SHAPES).items()]


def _shown(rows: PlotRows, name: str, looks: Mapping[str, str]) -> dict[str, str]:
    found = {row.get(name) for row in rows}
    return {value: look for value, look in looks.items() if value in found}


# ---- pictures ----


def picture_spec(panel: PlotPanel) -> Spec:
    """Return a panel's specification for a file of its own: light colours, a width in pixels, a legend, a white
    background."""
    text = json.dumps(_printable(panel.spec))
    for name, (light, _) in PALETTE.items():
        text = text.replace(f"var(--{name})", light)
    spec: Spec = json.loads(text)
    title = printable(panel.picture_title or panel.title)
    spec |= {"width": PICTURE_WIDTH, "background": "white", "padding": 12}
    spec["title"] = {"text": title, "anchor": "start", "fontSize": 13, "offset": 8}
    spec["config"]["font"] = "sans-serif"
    spec["config"]["legend"] = {"orient": "bottom", "columns": 4, "title": None, "labelFontSize": 12, "labelLimit": 0}
    for encoding in (layer["encoding"] for layer in spec["layer"]):
        if "shape" in encoding and encoding["shape"].get("field") != encoding["color"].get("field"):
            encoding["shape"]["legend"] = None  # the title says the kind, and so does each shape
    return spec


def _printable(value: Any) -> Any:
    """Return a specification whose texts hold no character that XML forbids: vl-convert ends the process over one."""
    if isinstance(value, dict):
        return {_printable(key): _printable(entry) for key, entry in value.items()}
    if isinstance(value, list | tuple):
        return [_printable(entry) for entry in value]
    return printable(value) if isinstance(value, str) else value


def svg_picture(panel: PlotPanel) -> str:
    """Return a panel as SVG."""
    import vl_convert

    return str(vl_convert.vegalite_to_svg(picture_spec(panel), allowed_base_urls=[]))


def save_pictures(panel: PlotPanel, stem: Path) -> list[Path]:
    """Write ``stem``.png, for dense screens, and ``stem``.svg; return their paths."""
    import vl_convert

    png, svg = stem.with_name(f"{stem.name}.png"), stem.with_name(f"{stem.name}.svg")
    png.write_bytes(vl_convert.vegalite_to_png(picture_spec(panel), scale=2, allowed_base_urls=[]))
    svg.write_text(svg_picture(panel), encoding="utf-8")
    return [png, svg]
