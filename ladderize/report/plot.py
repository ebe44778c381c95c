"""Parts that all plots share: a plot with its data as a table, the measures, and the looks of models."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ladderize.report.models import FAMILIES, KIND_ORDER, ReportModel, WithInterval, perplexity_text, points_text
from ladderize.report.vega import PlotPanel, Spec, intervals, make_spec, marks, nominal

FAMILY_COLOURS = dict(zip(FAMILIES, ("dense", "ladder", "spd", "both", "baseline"), strict=True))
KIND_SHAPES = dict(zip(KIND_ORDER, ("circle", "diamond"), strict=True))
# a row for each model
MODEL_ROWS: Spec = {"field": "name", "type": "nominal", "title": None, "sort": None, "axis": {"labelLimit": 170}}
# the data of a plot; rows of models have ``name``, ``family`` and perhaps ``kind``
PlotRows = Sequence[Mapping[str, Any]]
WIDE_RATIO = 4  # of the largest value to the least: beyond, a scale is logarithmic


# ---- tables ----


@dataclass(frozen=True)
class TableCell:
    """A cell of a table, with the text that is shown.

    value: the number that it is sorted by; None: by the text.
    """

    text: str
    value: float | None = None


@dataclass(frozen=True)
class ReportTable:
    """A table. Each row has a cell for every column; the first cell of a row is its header.

    note: the text below it.
    """

    caption: str
    columns: list[str]
    rows: list[list[TableCell]]
    note: str = ""

    @property
    def numeric(self) -> list[bool]:
        """True for each column that holds numbers."""
        return [any(row[place].value is not None for row in self.rows) for place in range(len(self.columns))]


def make_table(caption: str, rows: Iterable[Mapping[str, str | TableCell]], note: str = "") -> ReportTable:
    """Return a table of rows that all have the same keys, which are the columns."""
    made = [{name: TableCell(cell) if isinstance(cell, str) else cell for name, cell in row.items()} for row in rows]
    return ReportTable(caption, list(made[0]) if made else [], [list(row.values()) for row in made], note)


def number_cell(value: float | None, shown: Callable[[float], str] | str) -> TableCell:
    """Return a cell with a number; it is empty where there is none.

    shown: a format string or a function.
    """
    if value is None:
        return TableCell("")
    return TableCell(shown.format(value) if isinstance(shown, str) else shown(value), float(value))


def percent_cell(share: float | None) -> TableCell:
    return number_cell(share, lambda value: f"{100 * value:.1f} %")


def estimate_cell(estimate: WithInterval | None, text: Callable[[WithInterval], str]) -> TableCell:
    """Return the text of a number with its interval, sorted by the number."""
    return TableCell("") if estimate is None else TableCell(text(estimate), estimate.value)


# ---- plots ----


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

    def value(self, one: ReportModel, reference: ReportModel | None) -> WithInterval | None:
        if not self.is_more_better:
            return one.perplexity
        return WithInterval(0.0) if one is reference and one.accuracy is not None else one.difference

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


def dots(summary: str, rows: PlotRows, x: Spec, levels: list[Spec], **more: Any) -> Spec:
    """Draw a row for each model, with a mark and its interval. Where rows have a kind, shapes tell it."""
    encoding = {"x": x, "y": MODEL_ROWS, "color": family_colour(rows)}
    shape = {"shape": kind_shape(rows)} if any("kind" in row for row in rows) else {}
    layers = [*levels, intervals("x", encoding, width=3), marks({**encoding, **shape}, 90)]
    return make_spec(summary, row_height(rows), rows, layers, **more)


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
