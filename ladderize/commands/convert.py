"""``convert``."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from ladderize.commands.next_steps import FILE, align_command, command, retrain_command, show_next
from ladderize.commands.options import (
    LAYOUT,
    OUTPUT,
    RANGES,
    AsJson,
    NoVerify,
    Overwrite,
    Revision,
    given_options,
    names_of,
    options_from,
)
from ladderize.console import Console, human_bytes
from ladderize.convert.retraining import read_retrainings
from ladderize.convert.sensitivity_file import alignment_words
from ladderize.errors import UsageError, UserError
from ladderize.layout import BLOCKING, RangeSyntaxError, format_ranges

if TYPE_CHECKING:
    from ladderize.convert.report import ConversionReport

_AUTO, _WEIGHTS = "Choosing layers by sensitivity (auto)", "Weights"


def convert(
    ctx: typer.Context,
    src: Annotated[str, typer.Argument(metavar="SRC", help="A checkpoint: folder or hub id. It is never changed.")],
    out: Annotated[str, typer.Argument(metavar="OUT", help="The folder to write. It appears whole or not at all.")],
    ladder: Annotated[
        str | None,
        typer.Option(
            metavar="RANGES",
            help=f"Layers whose all-reduces are overlapped (Ladder Residual): {RANGES}; or auto, with --sensitivity.",
            rich_help_panel=LAYOUT,
        ),
    ] = None,
    spd: Annotated[
        str | None,
        typer.Option(
            metavar="RANGES",
            help="Layers whose attention all-reduce is dropped (Sync-Point Drop); or auto, with --sensitivity.",
            rich_help_panel=LAYOUT,
        ),
    ] = None,
    sync_tp_size: Annotated[
        int | None,
        typer.Option(
            metavar="N",
            min=1,
            help="With --spd: TP size that OUT is made for (virtual ranks). It also runs on TP sizes that divide it.",
            rich_help_panel=LAYOUT,
        ),
    ] = None,
    dense: Annotated[
        bool,
        typer.Option(
            "--dense", help="Make every sync point blocking again: an ordinary Llama.", rich_help_panel=LAYOUT
        ),
    ] = False,
    recipe: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="Read these options from YAML: a recipe, or the ladderize.yaml of a checkpoint.",
            rich_help_panel=LAYOUT,
        ),
    ] = None,
    sensitivity: Annotated[
        str | None,
        typer.Option(
            metavar="FILE",
            help="For auto: the file that `ladderize sensitivity` wrote. Alone it selects the insensitive layers.",
            rich_help_panel=_AUTO,
        ),
    ] = None,
    spd_fraction: Annotated[
        float | None,
        typer.Option(
            metavar="F", help="For --spd auto: fraction of all layers to select (0 to 1).", rich_help_panel=_AUTO
        ),
    ] = None,
    ladder_fraction: Annotated[
        float | None,
        typer.Option(
            metavar="F", help="For --ladder auto: fraction of all layers to select (0 to 1).", rich_help_panel=_AUTO
        ),
    ] = None,
    max_ppl_increase: Annotated[
        float | None,
        typer.Option(
            metavar="X",
            help="For auto: select layers while their summed sensitivities stay within X perplexity.",
            rich_help_panel=_AUTO,
        ),
    ] = None,
    head_map: Annotated[
        str | None,
        typer.Option(
            metavar="FILE", help="Reorder attention heads as this head_map.json says.", rich_help_panel=_WEIGHTS
        ),
    ] = None,
    dtype: Annotated[
        Literal["float32", "float16", "bfloat16"] | None,
        typer.Option(
            metavar="DTYPE",
            help="Dtype to store weights in: float32, bfloat16 or float16.",
            show_default="as in SRC",
            rich_help_panel=_WEIGHTS,
        ),
    ] = None,
    max_shard_size: Annotated[
        str | None,
        typer.Option(metavar="SIZE", help="Largest weight file to write, such as 5GB.", rich_help_panel=_WEIGHTS),
    ] = None,
    copy: Annotated[
        bool,
        typer.Option("--copy", help="Copy unchanged weights instead of hard-linking them.", rich_help_panel=_WEIGHTS),
    ] = False,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Show what would be done and write nothing.", rich_help_panel=OUTPUT)
    ] = False,
    overwrite: Overwrite = False,
    no_verify: NoVerify = False,
    revision: Revision = None,
    as_json: AsJson = False,
) -> None:
    """Convert a Llama checkpoint to a layout of overlapped and dropped all-reduces.

    Weights keep their values, except with --dtype. --head-map changes the order of heads.
    """
    from ladderize.convert.pipeline import convert_checkpoint
    from ladderize.convert.recipe import Recipe, read_recipe

    if recipe is not None and (clash := [name for name in given_options(ctx) if name in names_of(Recipe)]):
        raise UsageError(f"--recipe and --{clash[0].replace('_', '-')} cannot be combined; give one of them")
    console = Console(as_json)
    if not out.strip():
        raise UsageError("OUT is empty; name the folder to write")
    asked = read_recipe(recipe) if recipe is not None else options_from(Recipe, ctx.params)
    try:
        report = convert_checkpoint(
            src,
            out,
            asked,
            revision=revision,
            copy=copy,
            overwrite=overwrite,
            dry_run=dry_run,
            verify=not no_verify,
            console=console,
        )
    except RangeSyntaxError as error:
        if recipe is None:
            raise
        raise UserError(f"{recipe}: {error}") from None
    console.document(report.to_dict())
    for warning in report.warnings:
        console.warn(warning)
    for remark in report.remarks:
        console.note(f"Note: {remark}")
    if selection := report.selection:
        shown = [
            {**entry.to_dict(), "sensitivity": f"{entry.sensitivity:.4g}", "selected": "yes" if entry.selected else ""}
            for entry in selection.blocks
        ]
        console.table(shown, right=["block", "sensitivity"])
        console.result(f"\nselected {selection.rule}")
        console.prose(
            f"estimate {selection.estimated_ppl_increase:+.4g} perplexity: the sum over the selected blocks, a"
            " first-order estimate",
            indent=9,
        )
        if selection.sensitivity.aligned is not None:
            console.prose(f"measured {alignment_words(selection.sensitivity.aligned)}", indent=9)
        console.result("")
    if dry_run:
        console.table([layer.to_dict() for layer in report.layers], right=["layer"])
        console.result("")
    console.result(f"layout   {report.layout}")
    console.result(
        f"weights  {human_bytes(report.weight_bytes)} in {len(report.weight_files)} files, {_weights_in_words(report)}"
    )
    if report.permuted_layers:
        console.result(f"heads    reordered in layers {format_ranges(report.permuted_layers)}")
    if dry_run:
        files = [*report.weight_files, *report.carried_over, *report.extra_files]
        files.append("config.json, README.md, ladderize.yaml and the model code")
        console.result(f"files    {', '.join(files)}")
    if report.not_carried_over:
        console.result(f"skipped  {', '.join(report.not_carried_over)} (not carried over)")
    console.result(f"{'would write' if dry_run else 'wrote'} {out}")
    if not dry_run:
        _show_next(console, src, out, report)


def _show_next(console: Console, src: str, out: str, report: "ConversionReport") -> None:
    steps = [("measure it", command("eval", src, out, "--perplexity", FILE))]
    if report.selection is not None and report.selection.sensitivity.aligned is not None:
        steps.append(("align it, as was measured", align_command(out, src)))
    elif {*report.attention_sync, *report.mlp_sync} != {BLOCKING}:
        untrained = not read_retrainings(Path(out))
        steps.append(("recover accuracy", retrain_command(out, f"{out.rstrip('/')}-adapted", src, align=untrained)))
    show_next(console, *steps)


def _weights_in_words(report: "ConversionReport") -> str:
    if report.weights is not None:
        return " and ".join(f"{count} {how}" for how, count in report.weights.items())
    rewritten = len(report.weight_files_rewritten)
    counts = {"to be rewritten": rewritten, "to be taken over as they are": len(report.weight_files) - rewritten}
    return " and ".join(f"{count} {how}" for how, count in counts.items() if count)
