"""``demo``."""

from pathlib import Path
from typing import Annotated

import typer

from ladderize.commands.options import LOADING, OUTPUT, AsJson
from ladderize.console import Console

DEMO_FOLDER = Path("ladderize-demo")


def demo(
    out: Annotated[
        Path,
        typer.Option(
            metavar="DIR",
            help="Keep everything here. The same command goes on with an earlier demo.",
            rich_help_panel=OUTPUT,
        ),
    ] = DEMO_FOLDER,
    quick: Annotated[
        bool, typer.Option("--quick", help="Two layouts and few samples: a minute.", rich_help_panel=OUTPUT)
    ] = False,
    open_page: Annotated[
        bool, typer.Option("--open", help="Show the report in a browser.", rich_help_panel=OUTPUT)
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Sweep layouts of the bundled tiny Llama, from conversion to speed, and write a report."""
    console = Console(as_json)
    with console.stage(LOADING):
        from ladderize.demo.run import run_demo

    console.document(run_demo(out, quick=quick, open_page=open_page, console=console))
