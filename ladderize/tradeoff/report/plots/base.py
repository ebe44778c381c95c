"""What all plots share: colours, the parts of a Vega-Lite specification, and a plot with its data as a table.

Colours are CSS variables, so that plots follow the page's dark mode without being drawn again; a picture of its own
gets the light ones instead.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ladderize.tradeoff.report.content.subjects import FAMILIES, KIND_ORDER
from ladderize.tradeoff.report.content.tables import ReportTable

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
    "good": ("#1d7a3c", "#62cf88"),
    "bad": ("#b3261e", "#f59089"),
}
FAMILY_COLOURS = dict(zip(FAMILIES, ("dense", "ladder", "spd", "both", "baseline"), strict=True))
KIND_SHAPES = dict(zip(KIND_ORDER, ("circle", "diamond", "triangle-up"), strict=True))
PICTURE_WIDTH = 720
# of an axis of differences: a plus, a true minus, or neither at 0
SIGNED_LABEL = "(datum.value > 0 ? '+' : datum.value < 0 ? '\u2212' : '') + format(abs(datum.value), '~f')"


@dataclass(frozen=True)
class PlotChoice:
    """Something that a reader selects in a plot: a parameter of the specification. options: (value, text)."""

    parameter: str
    label: str
    options: list[tuple[str, str]]


@dataclass(frozen=True)
class PlotPanel:
    """One drawing. title: above it, where a plot has several; picture_title: of a picture, where that is another."""

    spec: Spec
    title: str = ""
    picture_title: str = ""


@dataclass(frozen=True)
class ReportPlot:
    """name: of its figure and its pictures. summary: what it shows, for those who do not see it. legend: (what a swatch
    shows, its colour, its shape). commands: what made the data. interactive: whether its marks take the focus."""

    name: str
    title: str
    caption: str
    summary: str
    panels: list[PlotPanel]
    table: ReportTable
    legend: list[tuple[str, str, str]] = field(default_factory=list)
    choices: list[PlotChoice] = field(default_factory=list)
    commands: list[str] = field(default_factory=list)
    interactive: bool = False


def row_height(rows: int) -> int:
    """Of a drawing with a row for each model."""
    return 24 * max(rows, 1)


def make_spec(summary: str, height: int, layers: list[Spec], **more: Any) -> Spec:
    """A layered specification as wide as its container."""
    return {
        "$schema": SCHEMA,
        "description": summary,
        "width": "container",
        "height": height,
        "padding": {"left": 2, "right": 6, "top": 6, "bottom": 2},
        "background": None,
        **more,
        "layer": layers,
        "config": _config(),
    }


def _config() -> Spec:
    font = 'system-ui, -apple-system, "Segoe UI", Roboto, "Noto Sans", sans-serif'
    return {
        "font": font,
        "view": {"stroke": None},
        "axis": {
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
        },
        "axisQuantitative": {"grid": True},
        "legend": {"disable": True},
        "text": {"color": "var(--ink)", "fontSize": 12},
    }


def picture_spec(panel: PlotPanel) -> Spec:
    """The same for a file of its own: light colours, a width, a legend, a white ground."""
    text = json.dumps(panel.spec)
    for name, (light, _) in PALETTE.items():
        text = text.replace(f"var(--{name})", light)
    alone: Spec = json.loads(text)
    alone["width"], alone["background"] = PICTURE_WIDTH, "white"
    alone["padding"] = 12
    alone["config"]["legend"] = {
        "orient": "bottom",
        "columns": 4,
        "title": None,
        "labelFontSize": 12,
    }
    for layer in alone["layer"]:
        if "shape" in layer["encoding"]:  # the title says the kind, and so does each shape
            layer["encoding"]["shape"]["legend"] = None
    alone["title"] = {"text": panel.picture_title or panel.title, "anchor": "start", "fontSize": 13, "offset": 8}
    alone["config"]["font"] = "sans-serif"
    return alone


def rule(encoding: Spec, **mark: Any) -> Spec:
    """A line that says nothing to those who do not see it: an axis of comparison, or the bar of an interval."""
    return {"mark": {"type": "rule", "aria": False, **mark}, "encoding": encoding}


def family_colour(rows: Sequence[Mapping[str, Any]]) -> Spec:
    """rows: what is drawn; only their families have a place in the scale, and in a picture's legend."""
    shown = [name for name in FAMILIES if any(row["family"] == name for row in rows)]
    scale = {"domain": shown, "range": [f"var(--{FAMILY_COLOURS[name]})" for name in shown]}
    return {"field": "family", "type": "nominal", "scale": scale}


def kind_shape(rows: Sequence[Mapping[str, Any]]) -> Spec:
    """The same of measured, emulated and predicted."""
    shown = [name for name in KIND_ORDER if any(row["kind"] == name for row in rows)]
    scale = {"domain": shown, "range": [KIND_SHAPES[name] for name in shown]}
    return {"field": "kind", "type": "nominal", "scale": scale}


def family_legend(families: set[str], kinds: set[str] | None = None) -> list[tuple[str, str, str]]:
    """Swatches of the families and kinds that a plot shows."""
    shown = [(name, FAMILY_COLOURS[name], "circle") for name in FAMILIES if name in families]
    return shown + [(name, "ink", KIND_SHAPES[name]) for name in KIND_ORDER if name in (kinds or ())]
