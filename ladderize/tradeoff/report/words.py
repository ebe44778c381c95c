"""Numbers and intervals in words, and the tables that hold them: the same in the page, the plots and Markdown. Imports
no torch."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

from ladderize.eval.paired.words import margin_text
from ladderize.tradeoff.report.subjects import Accuracy, Subject, WithInterval

MINUS = "\u2212"


@dataclass(frozen=True)
class TableCell:
    """What is shown. value: what it is sorted by, where that is a number."""

    text: str
    value: float | None = None


@dataclass(frozen=True)
class ReportTable:
    """Each row has a cell for every column; the first cell of a row is its header."""

    caption: str
    columns: list[str]
    rows: list[list[TableCell]]
    note: str = ""  # below it

    @property
    def numeric(self) -> list[bool]:
        """Of each column, whether it holds numbers."""
        return [any(row[place].value is not None for row in self.rows) for place in range(len(self.columns))]


def make_table(caption: str, rows: Iterable[Mapping[str, str | TableCell]]) -> ReportTable:
    """Of rows that all have the same keys, which are the columns."""
    made = [{name: TableCell(cell) if isinstance(cell, str) else cell for name, cell in row.items()} for row in rows]
    return ReportTable(caption, list(made[0]) if made else [], [list(row.values()) for row in made])


def number_cell(value: float | None, shown: Callable[[float], str] | str) -> TableCell:
    """shown: a format string or a function; empty where there is no value."""
    if value is None:
        return TableCell("")
    return TableCell(shown.format(value) if isinstance(shown, str) else shown(value), float(value))


def percent_cell(share: float | None) -> TableCell:
    return number_cell(share, lambda value: f"{100 * value:.1f} %")


def estimate_cell(estimate: WithInterval | None, text: Callable[[WithInterval], str]) -> TableCell:
    """What ``text`` says of it, in the order of its values."""
    return TableCell("") if estimate is None else TableCell(text(estimate), estimate.value)


def interval_cell(estimate: WithInterval, digits: int, *, sign: bool = False) -> TableCell:
    return TableCell(interval_text(estimate, digits, sign=sign), estimate.low)


def number_text(value: float, digits: int = 2, *, sign: bool = False) -> str:
    """With a true minus sign; ``sign``: also a plus. What rounds to 0 has none."""
    text = f"{abs(value):,.{digits}f}"
    if not float(text.replace(",", "")):
        return text
    return (MINUS if value < 0 else "+" if sign else "") + text


def interval_text(estimate: WithInterval, digits: int = 2, *, sign: bool = False) -> str:
    """``0.98 to 1.04``; empty where there is no interval."""
    if estimate.low is None or estimate.high is None:
        return ""
    return f"{number_text(estimate.low, digits, sign=sign)} to {number_text(estimate.high, digits, sign=sign)}"


def estimate_text(estimate: WithInterval, digits: int = 2, *, sign: bool = False, unit: str = "") -> str:
    """``1.01x (0.98 to 1.04)``."""
    interval = interval_text(estimate, digits, sign=sign)
    return number_text(estimate.value, digits, sign=sign) + unit + (f" ({interval})" if interval else "")


def speedup_text(estimate: WithInterval) -> str:
    return estimate_text(estimate, 2, unit="\u00d7")


def points_text(estimate: WithInterval) -> str:
    """A difference in points."""
    return estimate_text(estimate, 1, sign=True)


def perplexity_text(estimate: WithInterval) -> str:
    return estimate_text(estimate, 3)


def verdict_text(accuracy: Accuracy, margin: float) -> str:
    """Whether it is within the margin, in words that claim no more than the interval shows."""
    if accuracy.verdict is None:
        return "not compared"
    if accuracy.verdict == "worse":
        return f"more than {margin_text(margin)} worse: shown"
    text = f"within {margin_text(margin)} of dense: {accuracy.verdict}"
    if accuracy.verdict == "too few samples":
        return text + (f": {accuracy.needed:,} needed" if accuracy.needed else "")
    return text + (" (unpaired)" if accuracy.verdict == "not shown" and not accuracy.paired else "")


def control_text(difference: WithInterval | None) -> str:
    """What the interval of a difference to the control shows."""
    if difference is None or difference.low is None or difference.high is None:
        return "not compared in pairs"
    if difference.low > 0:
        return "shown to be better"
    return "shown to be worse" if difference.high < 0 else "neither shown to be better nor worse"


def named(subject: Subject) -> str:
    """Name and layout; the name alone where it says the layout, as a sweep's does."""
    return subject.name if subject.layout_words in subject.name else f"{subject.name} ({subject.layout_words})"


def subject_text(subject: Subject) -> str:
    """The same, and how it was adapted."""
    return named(subject) + (f"; adapted ({subject.adaptation})" if subject.adaptation else "")
