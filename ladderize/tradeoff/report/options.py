"""The options of ``ladderize report``, with their defaults. Imports no torch."""

from dataclasses import dataclass
from pathlib import Path

from ladderize.choices import option
from ladderize.errors import UsageError
from ladderize.eval.paired.document import check_margin
from ladderize.files.records import Record


@dataclass(frozen=True)
class ReportOptions(Record):
    """What a report shows. margin: None takes that of the sweep, or 1."""

    margin: float | None = option(
        "How much accuracy may be lost, in points.", metavar="POINTS", shown="the sweep's, else 1"
    )
    title: str | None = option("Title of the page.", metavar="TEXT")
    markdown: Path | None = option("Also write FILE.md, for a README or a model card.", metavar="FILE")
    pictures: Path | None = option(
        "Also write each plot to DIR as PNG and SVG.", metavar="DIR", shown="with --markdown: beside that file"
    )

    def __post_init__(self) -> None:
        if self.margin is not None:
            check_margin(self.margin)
        if self.markdown is not None and self.markdown.suffix.lower() not in (".md", ".markdown"):
            raise UsageError(f"--markdown {self.markdown} must end in .md")

    @property
    def picture_folder(self) -> Path | None:
        if self.pictures is None and self.markdown is not None:
            return self.markdown.with_name(f"{self.markdown.stem}-pictures")
        return self.pictures
