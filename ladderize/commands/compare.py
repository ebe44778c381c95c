"""``compare``."""

from pathlib import Path
from typing import Annotated

import typer

from ladderize.commands.options import DATA, MEASUREMENT, OUTPUT, AsJson, options_from
from ladderize.console import Console
from ladderize.eval.paired.document import CompareOptions
from ladderize.files.documents import check_writable, write_json


def compare(
    ctx: typer.Context,
    files: Annotated[
        list[Path],
        typer.Argument(
            metavar="RESULTS...",
            help="results.json of eval, or what lm_eval --log_samples wrote. The first model is the reference.",
        ),
    ],
    model: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME", help="Of files with several models take this one. Repeatable.", rich_help_panel=DATA
        ),
    ] = None,
    metric: Annotated[
        str, typer.Option(metavar="A,B", help="Metrics to compare.", show_default="all", rich_help_panel=DATA)
    ] = "",
    common: Annotated[
        bool,
        typer.Option("--common", help="Compare the tasks that both have, where one has more.", rich_help_panel=DATA),
    ] = False,
    margin: Annotated[
        float,
        typer.Option(metavar="X", help="Points that may be lost: 1 is 0.01 of acc.", rich_help_panel=MEASUREMENT),
    ] = CompareOptions.margin,
    cluster_by: Annotated[
        str | None,
        typer.Option(
            metavar="FIELD",
            help="Resample samples together that share this field of their document; none: each alone.",
            show_default="passage, context, article, story or paragraph",
            rich_help_panel=MEASUREMENT,
        ),
    ] = None,
    resamples: Annotated[
        int, typer.Option(metavar="N", help="Bootstrap resamples.", rich_help_panel=MEASUREMENT)
    ] = CompareOptions.resamples,
    seed: Annotated[
        int, typer.Option(metavar="N", help="Seed of the bootstrap.", rich_help_panel=MEASUREMENT)
    ] = CompareOptions.seed,
    out: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Write the comparison as JSON.", rich_help_panel=OUTPUT)
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Compare evaluated models question by question: differences with intervals, flips, and what a margin shows.

    Works on stored files alone. Models that were not asked the same are refused.
    """
    metrics = tuple(dict.fromkeys(name.strip() for name in metric.split(",") if name.strip())) or None
    options = options_from(CompareOptions, ctx.params, metrics=metrics)
    if out is not None:
        check_writable(out)
    from ladderize.eval.paired.run import compare as compare_files
    from ladderize.eval.paired.words import comparison_sentences, difference_rows, flip_rows, heading, other_rows

    console = Console(as_json)
    comparisons = compare_files(files, options, models=model or ())
    console.document(comparisons.to_dict())
    for number, document in enumerate(comparisons.comparisons):
        console.result(("\n" if number else "") + heading(document))
        for rows in (difference_rows(document), other_rows(document), flip_rows(document)):
            if rows:
                console.result("")
                console.table(rows, right=[key for key in rows[0] if key not in ("task", "metric")])
        console.result("")
        for sentence in comparison_sentences(document):
            console.prose(sentence)
    if out is not None:
        write_json(out, comparisons.to_dict())
        console.note(f"wrote {out}")
