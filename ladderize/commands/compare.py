"""``compare``."""

from dataclasses import dataclass
from pathlib import Path

from ladderize.choices import AS_JSON, argument, option
from ladderize.commands.builder import MEASUREMENT, OUTPUT, GivenOptions, command
from ladderize.console import Console
from ladderize.eval.comparison import CompareOptions
from ladderize.files.documents import check_writable, write_json


@dataclass(frozen=True)
class CompareArguments:
    files: tuple[Path, ...] = argument(
        "RESULTS...", "results.json of eval, or what lm_eval --log_samples wrote. The first model is the reference."
    )
    model: tuple[str, ...] = option("Of files with several models take this one. Repeatable.", (), metavar="NAME")
    out: Path | None = option("Write the comparison as JSON.", metavar="FILE")
    as_json: bool = option(AS_JSON, False)


@command(
    CompareArguments,
    CompareOptions,
    panels={MEASUREMENT: "model margin", OUTPUT: "out json"},
    configurable=False,
)
def compare(given: GivenOptions) -> None:
    """Compare evaluated models question by question: differences with intervals, flips, and what a margin shows.

    Works on stored files alone. Models that were not asked the same are refused.
    """
    own, options = given.fill(CompareArguments), given.fill(CompareOptions)
    from ladderize.eval.answers import OWN_NAME

    if own.out is not None:
        check_writable(own.out, inputs=[*own.files, *(folder / OWN_NAME for folder in own.files)])
    from ladderize.eval.compare import compare as compare_files
    from ladderize.eval.words import comparison_sentences, difference_rows, heading

    console = Console(own.as_json)
    comparisons = compare_files(own.files, options, models=own.model)
    console.document(comparisons.to_dict())
    for number, document in enumerate(comparisons.comparisons):
        console.result(("\n" if number else "") + heading(document))
        if rows := difference_rows(document):
            console.result("")
            console.table(rows, right=[key for key in rows[0] if key not in ("task", "metric")])
        console.result("")
        for sentence in comparison_sentences(document):
            console.prose(sentence)
    if own.out is not None:
        write_json(own.out, comparisons.to_dict())
        console.note(f"wrote {own.out}")
