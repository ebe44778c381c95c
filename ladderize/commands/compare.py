"""Compare stored evaluations, and show how they differ."""

from dataclasses import dataclass
from pathlib import Path

from ladderize.choices import MEASUREMENT, argument, check_options, option
from ladderize.console import Console
from ladderize.eval.options import MARGIN, check_margin


@dataclass(frozen=True)
class CompareOptions:
    files: tuple[Path, ...] = argument(
        "RESULTS...", "Files that eval wrote (results.json). The first model is the reference."
    )
    margin: float = option("Points that may be lost: 1 is 0.01 of acc.", MARGIN, panel=MEASUREMENT)

    def __post_init__(self) -> None:
        check_options(self)
        check_margin(self.margin)


def compare(options: CompareOptions, console: Console) -> None:
    """Compare evaluated models question by question: differences with intervals, flips, and what a margin shows.

    Works on stored files alone. Models that were not asked the same are refused.
    """
    from ladderize.eval.compare import compare as compare_files
    from ladderize.eval.table import show_comparison

    comparisons = compare_files(options.files, options.margin)
    console.document(comparisons.to_dict())
    for number, document in enumerate(comparisons.comparisons):
        if number:
            console.result("")
        show_comparison(document, console)
