"""Tables of a report: the same rows become HTML and Markdown. Imports no torch."""

from dataclasses import dataclass, field


@dataclass(frozen=True)
class TableCell:
    """What is shown. value: what it is sorted by, where that is a number."""

    text: str
    value: float | None = None


@dataclass(frozen=True)
class TableColumn:
    label: str
    numeric: bool = False


@dataclass(frozen=True)
class ReportTable:
    """Each row has a cell for every column; the first cell of a row is its header."""

    caption: str
    columns: list[TableColumn]
    rows: list[list[TableCell]] = field(default_factory=list)

    @classmethod
    def of(cls, caption: str, texts: list[str], numbers: list[str]) -> "ReportTable":
        """Columns of text, then columns of numbers."""
        return cls(caption, [TableColumn(label) for label in texts] + [TableColumn(label, True) for label in numbers])

    def add(self, *cells: str | TableCell) -> None:
        row = [cell if isinstance(cell, TableCell) else TableCell(cell) for cell in cells]
        if len(row) != len(self.columns):
            raise ValueError(f"{len(row)} cells for {len(self.columns)} columns of {self.caption!r}")
        self.rows.append(row)
