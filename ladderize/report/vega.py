"""Drawings: a panel is a Vega-Lite specification, which the page shows and vl-convert-python (of the extra ``report``)
saves as PNG and SVG.

Colours are CSS variables, so that drawings follow the page's dark mode without being drawn again. A picture file gets
the light colours instead.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ladderize.console import printable

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


@dataclass(frozen=True)
class PlotPanel:
    """One drawing.

    title: the text above it, where a plot has several panels.
    picture_title: the title of a picture, where it is another.
    """

    spec: Spec
    title: str = ""
    picture_title: str = ""


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


def nominal(field: str, scale: Mapping[str, str] | None = None, *, colours: bool = False) -> Spec:
    """Return a nominal encoding.

    scale: the shape of each value, or (``colours``) its name in PALETTE.
    """
    if scale is None:
        return {"field": field, "type": "nominal"}
    ends = [f"var(--{end})" if colours else end for end in scale.values()]
    return {"field": field, "type": "nominal", "scale": {"domain": list(scale), "range": ends}}


def looks(field: str, table: Mapping[str, tuple[str, str]]) -> Spec:
    """Return colour and shape by one field.

    table: the name in PALETTE and the shape of each value.
    """
    return {
        "color": nominal(field, {value: colour for value, (colour, _) in table.items()}, colours=True),
        "shape": nominal(field, {value: shape for value, (_, shape) in table.items()}),
    }


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
