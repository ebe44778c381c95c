"""The command line: parse, call, print. Heavy imports live inside the commands, so that ``--help`` is instant."""

import io
import os
import sys
from typing import Annotated, Any

import typer

from ladderize import __version__
from ladderize.boundary import DEBUG, INTERRUPTED, error_boundary
from ladderize.commands.convert import convert, inspect
from ladderize.commands.measure import bench, compare, evaluate, generate, report
from ladderize.commands.parser import BadCommandLine, add
from ladderize.commands.plan import calibrate, plan
from ladderize.commands.recover import adapt, merge, sensitivity, spd
from ladderize.console import is_text
from ladderize.demo.command import demo
from ladderize.errors import UsageError
from ladderize.ranks.environment import end_rank, launched
from ladderize.sweep.command import sweep

app = typer.Typer(
    name="ladderize",
    help="Turn a dense checkpoint into one that waits less for communication under tensor parallelism.",
    epilog="Every error is one sentence; --debug, given anywhere, shows the traceback behind it.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
    context_settings={"help_option_names": ["-h", "--help"]},
)


def main() -> None:
    """Run the command line of ``sys.argv``. It is the console script."""
    arguments = [argument for argument in sys.argv[1:] if argument != "--debug"]
    debug = len(arguments) < len(sys.argv) - 1
    if debug:
        os.environ[DEBUG] = "1"  # for the ranks that a command starts
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:  # closed, as by `2>&-`: the next opened file would take its place
            setattr(sys, name, open(os.devnull, "w"))  # noqa: SIM115
        if isinstance(stream := getattr(sys, name), io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")  # the locale may lack characters of a model's text
    with error_boundary(debug=debug):
        for argument in filter(lambda argument: not is_text(argument), arguments):
            raise UsageError(f"the argument {argument!a} is not UTF-8 text")
        try:
            code = app(arguments, prog_name="ladderize", standalone_mode=False)
            if code == INTERRUPTED:  # newer versions of typer turn Ctrl-C into an exit that says nothing
                raise KeyboardInterrupt
            end_rank(code or 0)
            sys.exit(code)
        except BadCommandLine as error:
            if not error.format_message():  # help was shown, since nothing was given
                sys.exit(error.exit_code)
            raise UsageError(_command_line_error(error)) from None


def _command_line_error(error: Any) -> str:
    """Return the error in the command line, and the command that shows help."""
    context = error.ctx
    message = str(error.format_message()).replace("Value error, ", "").rstrip(".")
    return f"{message} (see {context.command_path if context is not None else 'ladderize'} -h)"


def _version(wanted: bool) -> None:
    if wanted:
        print(f"ladderize {__version__}")
        raise typer.Exit


@app.callback()
def root(
    version: Annotated[
        bool, typer.Option("--version", metavar="", callback=_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    launched()


CONVERT, RECOVER, MEASURE = "Convert", "Recover accuracy", "Measure and run"
add(app, CONVERT, plan, config=True)
add(app, CONVERT, convert)
add(app, CONVERT, inspect)
add(app, CONVERT, sensitivity, config=True)
add(app, RECOVER, spd, config=True)
add(app, RECOVER, adapt, config=True)
add(app, RECOVER, merge)
add(app, MEASURE, evaluate, "eval", config=True)
add(app, MEASURE, compare)
add(app, MEASURE, bench, config=True)
add(app, MEASURE, calibrate, config=True)
add(app, MEASURE, report)
add(app, MEASURE, generate)
add(app, MEASURE, sweep)
add(app, MEASURE, demo)
