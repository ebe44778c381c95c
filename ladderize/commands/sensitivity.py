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
    Threads,
    check_taus,
    compute_options,
    options_from,
)
from ladderize.console import Console, UsageError, UserError
from ladderize.convert.sensitivity_file import Mode, changes_to_ladder, kind_of
from ladderize.eval.options import SensitivityOptions


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
    tau1: Annotated[
        float | None,
        typer.Option(
            metavar="X",
            help="Sensitivity up to which a block is insensitive.",
            show_default="0.05; 0.02 from 30B parameters",
            rich_help_panel=MEASUREMENT,
        ),
    ] = None,
    tau2: Annotated[
        float,
        typer.Option(
            metavar="X", help="Sensitivity above which a block is extremely sensitive.", rich_help_panel=MEASUREMENT
        ),
    ] = SensitivityOptions.tau2,
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
    if changes_to_ladder(mode) and sync_tp_size is not None:
        raise UsageError(f"--mode {mode} drops nothing, so --sync-tp-size has no effect")
    if not changes_to_ladder(mode) and sync_tp_size is None:
        raise UsageError(f"--mode {mode} needs --sync-tp-size N")
    check_taus(tau1, tau2)
    device = compute_options(device, threads)
    console = Console(as_json)
    with console.stage(LOADING):
        from ladderize.eval.sensitivity import SensitivityFolder, measure_sensitivity, sensitivity_rows
        from ladderize.files.documents import check_writable, read_json, write_json
        from ladderize.files.work import work_folder
        from ladderize.ranks.group import already_started
        from ladderize.ranks.threads import set_threads

    if already_started():
        raise UserError("sensitivity runs in one process; start it without torchrun or accelerate launch")
    set_threads(threads, 1)
    out = out.expanduser()
    check_writable(out)
    if plot is not None:
        from ladderize.figure import check_plot

        check_plot(plot)
    options = options_from(SensitivityOptions, ctx.params, device=device)
    with SensitivityFolder(work_folder(str(out), None), {}) as work:
        known = [path for path in (work.table, out) if path.is_file() and not overwrite]
        previous = read_json(known[0], advice="name another file, or pass --overwrite") if known else None
        if previous is not None and known[0] == out and previous.get("complete") is True:
            console.note(
                f"{out} is complete, so nothing was measured (--overwrite measures again); classes are those of"
                " --tau1 and --tau2"
            )
        document = measure_sensitivity(
            model, options, console=console, previous=previous, save=lambda content: write_json(work.table, content)
        )
        write_json(out, document.to_dict())
        work.remove()
    console.document(document.to_dict())
    console.table(list(sensitivity_rows(document)), right=["block", "S", "perplexity"])
    console.result(f"dense perplexity {document.perplexity[-1]:.4f}")
    console.note(f"wrote {out}")
    kind = kind_of(mode)
    more = [] if kind == "ladder" else ["--sync-tp-size", str(sync_tp_size)]
    target = f"{Path(model).name}-{kind}"
    auto = command("convert", model, target, f"--{kind}", "auto", "--sensitivity", out, *more)
    if plot is not None:
        from ladderize.eval.sensitivity_plot import draw_sensitivity

        console.note(f"wrote {' and '.join(map(str, draw_sensitivity(document, plot)))}")
    show_next(console, ("convert with it", f"{auto} --{kind}-fraction 0.5"))
