"""``demo``."""

from pathlib import Path
from typing import Annotated

import typer

from ladderize.commands.options import AsJson
from ladderize.console import Console


def demo(
    out: Annotated[
        Path | None,
        typer.Option(metavar="DIR", help="Keep the converted models and results here.  [default: a temporary folder]"),
    ] = None,
    quick: Annotated[bool, typer.Option("--quick", help="Few samples, two of the four conversions.")] = False,
    as_json: AsJson = False,
) -> None:
    """Convert the bundled tiny Llama to four layouts, win one's accuracy back; see what each costs in accuracy and
    gains in time."""
    from ladderize.demo.run import run_demo

    console = Console(as_json)
    console.document(run_demo(out, quick=quick, console=console))
