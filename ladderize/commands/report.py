"""Draw accuracy against speed on one page."""

from dataclasses import dataclass
from pathlib import Path

from ladderize.choices import MEASUREMENT, OUTPUT, argument, check_options, option
from ladderize.console import Console


@dataclass(frozen=True)
class ReportOptions:
    sources: tuple[Path, ...] = argument(
        "DIR_OR_JSON...",
        "A sweep's folder; or results.json, bench.json, sensitivity.json, or folders with these or with a retraining's"
        " metrics.jsonl.",
    )
    out: Path = option("Write the page to FILE.html.", Path("report.html"), panel=OUTPUT, metavar="FILE")
    markdown: Path | None = option(
        "Also write FILE.md, for a README or a model card, and its pictures to FILE-pictures/.",
        panel=OUTPUT,
        metavar="FILE",
    )
    margin: float | None = option(
        "How much accuracy may be lost, in points.", panel=MEASUREMENT, metavar="POINTS", shown="the sweep's, else 1"
    )

    def __post_init__(self) -> None:
        check_options(self)


def report(options: ReportOptions, console: Console) -> None:
    """Show accuracy against speed on one page: an HTML file that needs no network."""
    from ladderize.report.page import write_report

    summary = write_report(
        options.sources, options.out, margin=options.margin, markdown=options.markdown, console=console
    )
    console.document(summary.to_dict())
    console.prose(summary.headline)
    console.result(f"wrote {summary.out}")
