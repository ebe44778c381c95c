"""``sensitivity``."""

from pathlib import Path
from typing import Annotated

import typer

from ladderize.commands.config_file import Config, PrintConfig
from ladderize.commands.next_steps import command, show_next
from ladderize.commands.options import (
    DATA,
    LOADING,
    MAX_SEED,
    MEASUREMENT,
    MEMORY,
    OUTPUT,
    AsJson,
    Data,
    Device,
    DtypeOption,
    Revision,
    SeqLen,
    Tau1,
    Tau2,
    Threads,
    compute_options,
    options_from,
)
from ladderize.console import Console
from ladderize.convert.sensitivity_file import Mode, kind_of
from ladderize.eval.options import SensitivityOptions
from ladderize.files.regular import resolved


def sensitivity(
    ctx: typer.Context,
    model: Annotated[str, typer.Argument(metavar="MODEL", help="A dense checkpoint: folder or hub id.")],
    data: Data,
    out: Annotated[
        Path,
        typer.Option(
            metavar="FILE",
            help="The JSON file to write. A killed run goes on when the same command is run again.",
            rich_help_panel=OUTPUT,
        ),
    ],
    sync_tp_size: Annotated[
        int | None,
        typer.Option(
            metavar="N", min=1, help="TP size to drop sync points for (virtual ranks).", rich_help_panel=MEASUREMENT
        ),
    ] = None,
    mode: Annotated[
        Mode,
        typer.Option(
            help=(
                "spd, ladder: change blocks from the last one backwards, one more at a time (the paper's sweep). each,"
                " each-ladder: change one block alone."
            ),
            rich_help_panel=MEASUREMENT,
        ),
    ] = SensitivityOptions.mode,
    tau1: Tau1 = None,
    tau2: Tau2 = SensitivityOptions.tau2,
    samples: Annotated[
        int,
        typer.Option(
            metavar="N",
            min=1,
            help="Windows to score, drawn from the data; all if there are fewer.",
            rich_help_panel=DATA,
        ),
    ] = SensitivityOptions.samples,
    seq_len: SeqLen = None,
    seed: Annotated[
        int,
        typer.Option(
            metavar="N", min=0, max=MAX_SEED, help="Seed of the windows that are drawn.", rich_help_panel=DATA
        ),
    ] = SensitivityOptions.seed,
    batch_size: Annotated[
        int | None,
        typer.Option(
            metavar="N", min=1, help="Windows per forward pass.", show_default="4096 tokens", rich_help_panel=MEMORY
        ),
    ] = None,
    dtype: DtypeOption = SensitivityOptions.dtype,
    device: Device = None,
    threads: Threads = None,
    plot: Annotated[
        Path | None, typer.Option(metavar="STEM", help="Draw STEM.png and STEM.svg.", rich_help_panel=OUTPUT)
    ] = None,
    overwrite: Annotated[
        bool, typer.Option("--overwrite", help="Measure again, whatever --out holds.", rich_help_panel=OUTPUT)
    ] = False,
    revision: Revision = None,
    as_json: AsJson = False,
    config: Config = None,
    print_config: PrintConfig = False,
) -> None:
    """Measure how much perplexity each block costs when its sync points are dropped or overlapped."""
    console = Console(as_json)
    with console.stage(LOADING):
        device = compute_options(device, threads)
        from ladderize.eval.sensitivity import sensitivity_rows
        from ladderize.eval.sensitivity_run import write_sensitivity
        from ladderize.ranks.threads import set_threads

    options = options_from(SensitivityOptions, ctx.params, device=device)
    set_threads(threads, 1)
    if plot is not None:
        from ladderize.figure import check_plot

        check_plot(plot)
    document = write_sensitivity(model, out, options, overwrite=overwrite, console=console)
    console.document(document.to_dict())
    console.table(list(sensitivity_rows(document)), right=["block", "S", "perplexity"])
    console.result(f"dense perplexity {document.perplexity[-1]:.4f}")
    console.note(f"wrote {out}")
    kind = kind_of(mode)
    more = [] if kind == "ladder" else ["--sync-tp-size", str(sync_tp_size)]
    target = f"{resolved(model).name}-{kind}"  # beside where the user is, also for "." and hub ids
    auto = command("convert", model, target, f"--{kind}", "auto", "--sensitivity", out, *more)
    if plot is not None:
        from ladderize.eval.sensitivity_plot import draw_sensitivity

        console.note(f"wrote {' and '.join(map(str, draw_sensitivity(document, plot)))}")
    show_next(console, ("convert with it", f"{auto} --{kind}-fraction 0.5"))
