"""Parts that all plots share: a plot with its data as a table, the measures, and the looks of models."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ladderize.report.subjects import (
    FAMILIES,
    KIND_ORDER,
    Subject,
    WithInterval,
    perplexity_text,
    points_text,
)
from ladderize.report.tables import ReportTable
from ladderize.report.vega import PlotPanel, Spec, intervals, make_spec, marks, nominal

FAMILY_COLOURS = dict(zip(FAMILIES, ("dense", "ladder", "spd", "both", "baseline"), strict=True))
KIND_SHAPES = dict(zip(KIND_ORDER, ("circle", "diamond", "triangle-up"), strict=True))
# a row for each model
MODEL_ROWS: Spec = {"field": "name", "type": "nominal", "title": None, "sort": None, "axis": {"labelLimit": 170}}
# the data of a plot; rows of models have ``name``, ``family`` and perhaps ``kind``
PlotRows = Sequence[Mapping[str, Any]]
TOKENS_AXIS: Spec = {"format": "~s", "labelExpr": "datum.value === 0 ? '0' : datum.label", "tickCount": 5}
WIDE_RATIO = 4  # of the largest value to the least: beyond, a scale is logarithmic


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
    """A plot with its data.

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
    table: ReportTable
    legend: list[tuple[str, str, str]] = field(default_factory=list)
    choices: list[PlotChoice] = field(default_factory=list)
    interactive: bool = False


@dataclass(frozen=True)
class Measure:
    """A measure of a model's quality.

    is_more_better: True if a larger value is better; else a smaller one is.
    """

    title: str
    is_more_better: bool

    def value(self, subject: Subject, reference: Subject | None) -> WithInterval | None:
        if not self.is_more_better:
            return subject.perplexity
        return WithInterval(0.0) if subject is reference and subject.accuracy is not None else subject.difference

    def text(self, value: WithInterval) -> str:
        """Return the number and its interval."""
        return points_text(value) if self.is_more_better else perplexity_text(value)

    def words(self, value: WithInterval) -> str:
        return f"{self.text(value)} {self.title}" if self.is_more_better else f"{self.title} {self.text(value)}"


BY_ACCURACY, BY_PERPLEXITY = Measure("points from dense", True), Measure("perplexity", False)


def is_wide(values: Sequence[float]) -> bool:
    """Return True if only a logarithmic scale tells the values apart."""
    return min(values) > 0 and max(values) / min(values) > WIDE_RATIO


def row_height(rows: PlotRows) -> int:
    """Return the height of a drawing with a row for each model, in pixels."""
    return 24 * max(len({row["name"] for row in rows}), 1)


def dots(summary: str, rows: PlotRows, x: Spec, levels: list[Spec], *, kinds: bool = False, **more: Any) -> Spec:
    """Draw a row for each model, with a mark and its interval.

    kinds: the marks' shapes tell measured from predicted.
    """
    encoding = {"x": x, "y": MODEL_ROWS, "color": family_colour(rows)}
    points = marks({**encoding, "shape": kind_shape(rows)} if kinds else encoding, 90)
    return make_spec(summary, row_height(rows), rows, [*levels, intervals("x", encoding, width=3), points], **more)


def family_colour(rows: PlotRows) -> Spec:
    """Return the colours of the families in these rows; only those have a place in a picture's legend."""
    return nominal("family", {name: FAMILY_COLOURS[name] for name in _shown(rows, "family", FAMILIES)}, colours=True)


def kind_shape(rows: PlotRows) -> Spec:
    """Return the shapes of the kinds of timing in these rows."""
    return nominal("kind", {name: KIND_SHAPES[name] for name in _shown(rows, "kind", KIND_ORDER)})


def family_legend(rows: PlotRows) -> list[tuple[str, str, str]]:
    """Return swatches of the families and kinds that a plot shows."""
    return [(name, FAMILY_COLOURS[name], "circle") for name in _shown(rows, "family", FAMILIES)] + [
        (name, "ink", KIND_SHAPES[name]) for name in _shown(rows, "kind", KIND_ORDER)
    ]


def _shown(rows: PlotRows, name: str, order: Sequence[str]) -> list[Any]:
    found = {row.get(name) for row in rows}
    return [value for value in order if value in found]
