"""``report``."""

from dataclasses import dataclass
from pathlib import Path

from ladderize.choices import AS_JSON, argument, option
from ladderize.commands.builder import MEASUREMENT, OUTPUT, GivenOptions, command
from ladderize.console import Console
from ladderize.tradeoff.report.options import ReportOptions


@dataclass(frozen=True)
class ReportArguments:
    sources: tuple[Path, ...] = argument(
        "DIR_OR_JSON...",
        "A sweep's folder; or results.json, bench.json, plan.json, sensitivity.json, or folders with these or with"
        " a retraining's metrics.jsonl.",
    )
    out: Path = option("Write the page to FILE.html.", Path("report.html"), metavar="FILE")
    as_json: bool = option(AS_JSON, False)


@command(
    ReportOptions,
    ReportArguments,
    panels={OUTPUT: "out markdown pictures title json", MEASUREMENT: "margin"},
    configurable=False,
)
def report(given: GivenOptions) -> None:
    """Show accuracy against speed on one page: an HTML file that needs no network."""
    own, options = given.fill(ReportArguments), given.fill(ReportOptions)
    console = Console(own.as_json)
    from ladderize.tradeoff.report.page import report as write_report

    summary = write_report(own.sources, own.out, options, console=console)
    console.document(summary.to_dict())
    console.prose(summary.headline)
    console.result(f"wrote {summary.out}")
