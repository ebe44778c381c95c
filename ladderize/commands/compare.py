"""``compare``."""

from dataclasses import dataclass
from pathlib import Path

from ladderize.choices import AS_JSON, argument, option
from ladderize.commands.builder import MEASUREMENT, OUTPUT, GivenOptions, command
from ladderize.console import Console
from ladderize.eval.options import MARGIN, check_margin
from ladderize.files.documents import check_writable, write_json


@dataclass(frozen=True)
class CompareArguments:
    files: tuple[Path, ...] = argument(
        "RESULTS...", "Files that eval wrote (results.json). The first model is the reference."
    )
    margin: float = option("Points that may be lost: 1 is 0.01 of acc.", MARGIN)
    out: Path | None = option("Write the comparison as JSON.", metavar="FILE")
    as_json: bool = option(AS_JSON, False)


@command(
    CompareArguments,
    panels={MEASUREMENT: "margin", OUTPUT: "out json"},
    configurable=False,
)
def compare(given: GivenOptions) -> None:
    """Compare evaluated models question by question: differences with intervals, flips, and what a margin shows.

    Works on stored files alone. Models that were not asked the same are refused.
    """
    arguments = given.fill(CompareArguments)
    check_margin(arguments.margin)
    from ladderize.eval.compare import compare as compare_files
    from ladderize.eval.table import show_comparison

    if arguments.out is not None:
        check_writable(arguments.out, inputs=arguments.files)
    console = Console(arguments.as_json)
    comparisons = compare_files(arguments.files, arguments.margin)
    console.document(comparisons.to_dict())
    for number, document in enumerate(comparisons.comparisons):
        if number:
            console.result("")
        show_comparison(document, console)
    if arguments.out is not None:
        write_json(arguments.out, comparisons.to_dict())
        console.note(f"wrote {arguments.out}")
