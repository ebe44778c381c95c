"""The options of ``ladderize report``, with their defaults. Imports no torch."""

from dataclasses import dataclass
from pathlib import Path

from ladderize.errors import UsageError
from ladderize.files.records import Record

DEFAULT_MARGIN = 1.0  # points


@dataclass(frozen=True)
class ReportOptions(Record):
    """What a report shows. margin: what of the accuracy may be lost, in points; None takes that of the sweep, or 1.

    markdown: a file that gets the answer, the table and links to the pictures. pictures: a folder that gets each plot
    as PNG and SVG; None with ``markdown`` takes the folder ``STEM-pictures`` beside that file.
    """

    margin: float | None = None
    title: str | None = None
    markdown: Path | None = None
    pictures: Path | None = None

    def __post_init__(self) -> None:
        if self.margin is not None and not 0 < self.margin <= 100:
            raise UsageError(f"--margin must be above 0 and at most 100 points, not {self.margin:g}")
        if self.markdown is not None and self.markdown.suffix.lower() not in (".md", ".markdown"):
            raise UsageError(f"--markdown {self.markdown} must end in .md")

    @property
    def picture_folder(self) -> Path | None:
        if self.pictures is None and self.markdown is not None:
            return self.markdown.with_name(f"{self.markdown.stem}-pictures")
        return self.pictures
