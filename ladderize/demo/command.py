"""The command ``demo``."""

from dataclasses import dataclass
from pathlib import Path

from ladderize.choices import AS_JSON, option
from ladderize.commands.builder import OUTPUT, GivenOptions, command
from ladderize.commands.shared import LOADING
from ladderize.console import Console


@dataclass(frozen=True)
class DemoArguments:
    out: Path = option(
        "Keep everything here. The same command goes on with an earlier demo.", Path("ladderize-demo"), metavar="DIR"
    )
    quick: bool = option("Two layouts and few samples: a minute.", False)
    open_page: bool = option("Show the report in a browser.", False, flags="--open")
    as_json: bool = option(AS_JSON, False)


@command(DemoArguments, panels={OUTPUT: "out quick open json"}, configurable=False)
def demo(given: GivenOptions) -> None:
    """Sweep layouts of the bundled tiny Llama, from conversion to speed, and write a report."""
    own = given.fill(DemoArguments)
    console = Console(own.as_json)
    with console.stage(LOADING):
        from ladderize.demo.run import run_demo

    console.document(run_demo(own.out, quick=own.quick, open_page=own.open_page, console=console))
