"""The command line: parse, call, print. Heavy imports live inside the commands, so that ``--help`` is instant."""

import os
import sys
from typing import Annotated

import typer

from ladderize import __version__
from ladderize.commands import adapt, bench, convert, demo, evaluate, generate, inspect, merge, sensitivity, spd
from ladderize.console import DEBUG, error_boundary

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
def root(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    pass


app.command()(convert.convert)
app.command()(inspect.inspect)
app.command("eval")(evaluate.evaluate)
app.command()(sensitivity.sensitivity)
app.command()(adapt.adapt)
app.command()(spd.spd)
app.command()(merge.merge)
app.command()(generate.generate)
app.command()(bench.bench)
app.command()(demo.demo)
