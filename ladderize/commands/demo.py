"""``demo``."""

from pathlib import Path
from typing import Annotated

import typer

from ladderize.commands.options import LOADING, OUTPUT, AsJson
from ladderize.console import Console


def demo(
    out: Annotated[
        Path | None,
        typer.Option(
            metavar="DIR",
            help="Keep the converted models and results here.",
            show_default="a temporary folder",
            rich_help_panel=OUTPUT,
        ),
    ] = None,
    quick: Annotated[
        bool, typer.Option("--quick", help="Few samples, and two of the four conversions.", rich_help_panel=OUTPUT)
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Convert the bundled tiny Llama to four layouts, retrain it, and compare accuracy and speed."""
    console = Console(as_json)
    with console.stage(LOADING):
        from ladderize.demo.run import run_demo

    console.document(run_demo(out, quick=quick, console=console))
