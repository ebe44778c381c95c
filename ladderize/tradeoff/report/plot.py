"""What the plots of a report share: a plot with its data as a table, and the looks of families and kinds of times."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ladderize.figure import PlotPanel, Spec, nominal
from ladderize.tradeoff.report.subjects import FAMILIES, KIND_ORDER
from ladderize.tradeoff.report.words import ReportTable

FAMILY_COLOURS = dict(zip(FAMILIES, ("dense", "ladder", "spd", "both", "baseline"), strict=True))
KIND_SHAPES = dict(zip(KIND_ORDER, ("circle", "diamond", "triangle-up"), strict=True))
# a row for each model
MODEL_ROWS: Spec = {"field": "name", "type": "nominal", "title": None, "sort": None, "axis": {"labelLimit": 170}}


@dataclass(frozen=True)
class PlotChoice:
    """Something that a reader selects in a plot."""

    parameter: str  # of the specification
    label: str
    options: list[tuple[str, str]]  # value, text


@dataclass(frozen=True)
class ReportPlot:
    name: str  # of its figure and its pictures
    title: str
    caption: str
    summary: str  # what it shows, for those who do not see it
    panels: list[PlotPanel]
    table: ReportTable
    legend: list[tuple[str, str, str]] = field(default_factory=list)  # what a swatch shows, its colour, its shape
    choices: list[PlotChoice] = field(default_factory=list)
    commands: list[str] = field(default_factory=list)  # what made the data
    interactive: bool = False  # whether its marks take the focus


def row_height(rows: Sequence[Mapping[str, Any]]) -> int:
    """Of a drawing with a row for each model."""
    return 24 * max(len({row["name"] for row in rows}), 1)


def family_colour(rows: Sequence[Mapping[str, Any]]) -> Spec:
    """rows: what is drawn; only their families have a place in the scale, and in a picture's legend."""
    shown = {row["family"] for row in rows}
    return nominal("family", {name: FAMILY_COLOURS[name] for name in FAMILIES if name in shown}, colours=True)


def kind_shape(rows: Sequence[Mapping[str, Any]]) -> Spec:
    """The same of measured, emulated and predicted."""
    shown = {row["kind"] for row in rows}
    return nominal("kind", {name: KIND_SHAPES[name] for name in KIND_ORDER if name in shown})


def family_legend(families: set[str], kinds: set[str] | None = None) -> list[tuple[str, str, str]]:
    """Swatches of the families and kinds that a plot shows."""
    shown = [(name, FAMILY_COLOURS[name], "circle") for name in FAMILIES if name in families]
    return shown + [(name, "ink", KIND_SHAPES[name]) for name in KIND_ORDER if name in (kinds or ())]
