"""``report``."""

from pathlib import Path
from typing import Annotated

import typer

from ladderize.commands.options import MEASUREMENT, OUTPUT, AsJson, options_from
from ladderize.console import Console
from ladderize.tradeoff.report.content.options import ReportOptions


def report(
    ctx: typer.Context,
    sources: Annotated[
        list[Path],
        typer.Argument(
            metavar="DIR_OR_JSON...",
            help="A sweep's folder; or results.json, bench.json, plan.json, sensitivity.json, or folders with these or"
            " with training curves.",
        ),
    ],
    out: Annotated[
        Path, typer.Option(metavar="FILE", help="Write the page to FILE.html.", rich_help_panel=OUTPUT)
    ] = Path("report.html"),
    markdown: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Also write FILE.md, for a README or a model card.", rich_help_panel=OUTPUT),
    ] = None,
    pictures: Annotated[
        Path | None,
        typer.Option(
            metavar="DIR",
            help="Also write each plot to DIR as PNG and SVG.",
            show_default="with --markdown: beside that file",
            rich_help_panel=OUTPUT,
        ),
    ] = None,
    margin: Annotated[
        float | None,
        typer.Option(
            metavar="POINTS",
            help="How much accuracy may be lost, in points.",
            show_default="the sweep's, else 1",
            rich_help_panel=MEASUREMENT,
        ),
    ] = None,
    title: Annotated[
        str | None, typer.Option(metavar="TEXT", help="Title of the page.", rich_help_panel=OUTPUT)
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Show accuracy against speed on one page: an HTML file that needs no network."""
    options = options_from(ReportOptions, ctx.params)
    console = Console(as_json)
    from ladderize.tradeoff.report.run import report as write_report

    summary = write_report(sources, out, options, console=console)
    console.document(summary.to_dict())
    console.prose(summary.headline)
    console.result(f"wrote {summary.out}")
