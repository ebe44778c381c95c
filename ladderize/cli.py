"""The command line: parse, call, print. Heavy imports live inside the commands, so that ``--help`` is instant."""

import os
import sys
from pathlib import Path
from typing import Annotated

import typer

from ladderize import __version__
from ladderize.commands import adapt as adaptation
from ladderize.commands import convert as checkpoints
from ladderize.commands import eval as evaluation
from ladderize.commands import generate as runtime
from ladderize.commands import merge as merging
from ladderize.commands import spd as blockwise
from ladderize.commands.options import AsJson
from ladderize.console import DEBUG, Console, error_boundary

app = typer.Typer(
    name="ladderize",
    help="Turn a dense Llama checkpoint into one that waits less for communication under tensor parallelism.",
    epilog="--debug, given anywhere, shows the traceback behind an error.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)


def main() -> None:
    """The console script."""
    arguments = [argument for argument in sys.argv[1:] if argument != "--debug"]
    debug = len(arguments) < len(sys.argv) - 1
    if debug:
        os.environ[DEBUG] = "1"  # for the ranks that a command starts
    with error_boundary(debug=debug):
        app(arguments, prog_name="ladderize")


def _version(wanted: bool) -> None:
    if wanted:
        print(f"ladderize {__version__}")
        raise typer.Exit


@app.callback()
def root(version: Annotated[bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version.")] = False) -> None:
    pass


app.command()(checkpoints.convert)
app.command()(checkpoints.inspect)
app.command("eval")(evaluation.evaluate)
app.command()(evaluation.sensitivity)
app.command()(adaptation.adapt)
app.command()(blockwise.spd)
app.command()(merging.merge)
app.command()(runtime.generate)
app.command()(runtime.bench)


@app.command()
def demo(
    out: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Keep the converted models and results here.  [default: a temporary folder]")
    ] = None,
    quick: Annotated[bool, typer.Option("--quick", help="Few samples, two of the four conversions.")] = False,
    as_json: AsJson = False,
) -> None:
    """Convert the bundled tiny Llama to four layouts, win one's accuracy back; see what each costs in accuracy and gains in time."""
    from ladderize.demo.run import run_demo

    console = Console(as_json)
    console.document(run_demo(out, quick=quick, console=console))
