"""``plan``."""

from pathlib import Path
from typing import Annotated

import typer

import ladderize
from ladderize.choices import Dtype
from ladderize.commands.config_file import Config, PrintConfig
from ladderize.commands.next_steps import command, show_next
from ladderize.commands.options import (
    LAYOUT,
    MEASUREMENT,
    MEMORY,
    MODELS,
    OUTPUT,
    AsJson,
    Revision,
    options_from,
    said,
)
from ladderize.console import Console
from ladderize.errors import UsageError
from ladderize.planning.plans.options import BOUNDS, PlanModel, PlanOptions
from ladderize.runtime.bench.options import LAYOUT_NAMES, parse_counts


def plan(
    ctx: typer.Context,
    model: Annotated[
        str | None,
        typer.Argument(metavar="[MODEL]", help="A checkpoint: folder or hub id. Its own layout is a row too."),
    ] = None,
    shape: Annotated[
        str | None,
        typer.Option(
            metavar="CONFIG",
            help="A shape instead of a checkpoint: 1b, 3b, 8b, 70b, 405b or a config.json.",
            rich_help_panel=MODELS,
        ),
    ] = None,
    num_layers: Annotated[
        int | None,
        typer.Option(
            metavar="N",
            min=1,
            help="With --shape: number of layers.",
            show_default="the config's",
            rich_help_panel=MODELS,
        ),
    ] = None,
    dtype: Annotated[
        Dtype,
        typer.Option(
            metavar="DTYPE",
            help="float32, bfloat16, float16, or auto: as stored, bfloat16 for a shape.",
            rich_help_panel=MODELS,
        ),
    ] = PlanModel.dtype,
    revision: Revision = None,
    hardware: Annotated[
        str | None,
        typer.Option(
            metavar="DEVICE",
            help="The device of one rank: a name that --list shows, or a file of calibrate or of your own.",
            rich_help_panel=MEMORY,
        ),
    ] = None,
    link: Annotated[
        str | None,
        typer.Option(
            metavar="LINK",
            help="What joins the ranks: a name that --list shows, ALPHA_US,BETA_GB_S (see bench), or a file.",
            show_default="that of --hardware's file",
            rich_help_panel=MEMORY,
        ),
    ] = None,
    tp_size: Annotated[
        str | None,
        typer.Option(metavar="A,B", help="Tensor-parallel ranks: one number or several.", rich_help_panel=MEMORY),
    ] = None,
    engine: Annotated[
        str | None,
        typer.Option(
            metavar="NAME",
            help="Whose code is assumed: a name that --list shows.",
            show_default="the one that the device's figures come from",
            rich_help_panel=MEMORY,
        ),
    ] = None,
    layout: Annotated[
        str | None,
        typer.Option(
            metavar="A,B",
            help=(
                f"Rows of the tables: {', '.join(LAYOUT_NAMES)}, such a name with a range of layers, ladder=16:32, or"
                f" {' and '.join(BOUNDS)}, which are for comparison. dense is always there."
            ),
            show_default="all of them, for all layers",
            rich_help_panel=LAYOUT,
        ),
    ] = None,
    sync_tp_size: Annotated[
        int | None,
        typer.Option(
            metavar="N",
            min=1,
            help="Virtual ranks of spd.",
            show_default="as many as ranks",
            rich_help_panel=LAYOUT,
        ),
    ] = None,
    batch_size: Annotated[
        str | None,
        typer.Option(metavar="A,B", help="Batch sizes.", show_default="1", rich_help_panel=MEASUREMENT),
    ] = None,
    prompt_len: Annotated[
        int, typer.Option(metavar="N", min=1, help="Tokens per prompt.", rich_help_panel=MEASUREMENT)
    ] = PlanOptions.prompt_len,
    output_len: Annotated[
        int,
        typer.Option(
            metavar="N", min=2, help="Tokens to generate. The prefill makes the first one.", rich_help_panel=MEASUREMENT
        ),
    ] = PlanOptions.output_len,
    show_list: Annotated[
        bool,
        typer.Option(
            "--list", help="Show the known devices, links, engines and shapes, and stop.", rich_help_panel=OUTPUT
        ),
    ] = False,
    out: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Write everything as JSON.", rich_help_panel=OUTPUT)
    ] = None,
    as_json: AsJson = False,
    config: Config = None,
    print_config: PrintConfig = False,
) -> None:
    """Predict how fast layouts are on hardware that need not be there."""
    console = Console(as_json)
    if show_list:
        if others := [name for name in said(ctx) if name not in ("show_list", "as_json")]:
            raise UsageError(f"--{others[0].replace('_', '-')} has no effect with --list")
        from ladderize.planning.plans.listing import KnownHardware, show_known

        show_known(KnownHardware.read(), console)
        return
    choice = options_from(PlanModel, ctx.params)
    if hardware is None or tp_size is None:
        missing = "--hardware" if hardware is None else "--tp-size"
        raise UsageError(f"{missing} is missing: say on what to run, for example --hardware h100-sxm --tp-size 8")
    batches = PlanOptions.batch_sizes if batch_size is None else parse_counts(batch_size)
    ranks = parse_counts(tp_size, "--tp-size")
    options = options_from(PlanOptions, ctx.params, tp_sizes=ranks, batch_sizes=batches)
    result = ladderize.plan(choice, options, out=out, console=console)
    if out is not None:
        console.note(f"wrote {out}")
    _show_next(console, choice, options, calibrated=result.rows[0].basis == "calibrated")


def _show_next(console: Console, choice: PlanModel, options: PlanOptions, *, calibrated: bool) -> None:
    """What to do where the hardware is."""
    ranks = max(options.tp_sizes)
    words: list[object] = ["--tp-size", ranks, "--prompt-len", options.prompt_len, "--output-len", options.output_len]
    words += ["--batch-size", ",".join(map(str, options.batch_sizes))]
    target = ["--random-weights", choice.shape] if choice.shape is not None else [choice.model]
    steps = [("measure it there", command("bench", *target, *words))]
    if not calibrated:
        sizes = ",".join(map(str, options.tp_sizes))
        steps.insert(0, ("calibrate there", command("calibrate", "--tp-size", sizes, "--out", "machine.json")))
    show_next(console, *steps)
