"""``spd``."""

from typing import Annotated, Literal

import typer

import ladderize
from ladderize.commands.config_file import Config, PrintConfig
from ladderize.commands.next_steps import command, retrain_command, scoring_file, show_next
from ladderize.commands.options import (
    DATA,
    LAYOUT,
    LOADING,
    METHOD,
    AsJson,
    Device,
    NoVerify,
    Overwrite,
    Revision,
    SeqLen,
    Tau1,
    Tau2,
    Threads,
    given_options,
    options_from,
)
from ladderize.commands.training import (
    ComputeDtype,
    Epochs,
    Heldout,
    LearningRate,
    MaxMemory,
    Patience,
    Samples,
    StepWindows,
    TrainingData,
    TrainingSeed,
    WorkDir,
    memory_limit,
    start_training_on,
)
from ladderize.console import Console
from ladderize.errors import UsageError


def spd(
    ctx: typer.Context,
    model: Annotated[
        str, typer.Argument(metavar="MODEL", help="A dense checkpoint: folder or hub id. It is never changed.")
    ],
    out: Annotated[str, typer.Argument(metavar="OUT", help="The folder to write. It appears whole or not at all.")],
    sync_tp_size: Annotated[
        int,
        typer.Option(
            metavar="N",
            min=2,
            help="TP size that OUT is made for (virtual ranks). It also runs on TP sizes that divide it.",
            rich_help_panel=LAYOUT,
        ),
    ],
    data: TrainingData,
    spd_fraction: Annotated[
        float | None,
        typer.Option(
            metavar="X",
            help="Fraction of all blocks to drop, least sensitive first.",
            show_default="0.7",
            rich_help_panel=LAYOUT,
        ),
    ] = None,
    max_ppl_increase: Annotated[
        float | None,
        typer.Option(
            metavar="X",
            help="Instead: drop blocks while their summed sensitivities stay within this perplexity.",
            rich_help_panel=LAYOUT,
        ),
    ] = None,
    tau1: Tau1 = None,
    tau2: Tau2 = 10.0,
    repair: Annotated[
        Literal["align", "blocks", "align+blocks"],
        typer.Option(
            help=(
                "align: solve the projections from the first dropped block on by least squares. blocks: distil each"
                " dropped block, as in the paper. align+blocks: the one, then the other."
            ),
            rich_help_panel=METHOD,
        ),
    ] = "align",
    distill: Annotated[
        Literal["all", "sensitive"],
        typer.Option(
            help="Dropped blocks to repair. sensitive: not the insensitive ones, as in the paper.",
            rich_help_panel=METHOD,
        ),
    ] = "all",
    head_grouping: Annotated[
        Literal["error", "paper", "none"],
        typer.Option(
            help=(
                "Regroup attention heads over ranks. error: of every distilled block, to minimise its output error."
                " paper: of extremely sensitive blocks, by the paper's criterion."
            ),
            rich_help_panel=METHOD,
        ),
    ] = "error",
    calibration_samples: Annotated[
        int,
        typer.Option(
            metavar="N",
            min=1,
            help="Windows for sensitivity and head grouping, out of --samples.",
            rich_help_panel=DATA,
        ),
    ] = 128,
    samples: Samples = None,
    heldout: Heldout = None,
    seq_len: SeqLen = None,
    seed: TrainingSeed = 0,
    epochs: Epochs = 10,
    patience: Patience = 2,
    lr: LearningRate = None,
    batch_size: StepWindows = None,
    max_memory: MaxMemory = None,
    dtype: ComputeDtype = "auto",
    device: Device = None,
    threads: Threads = None,
    work_dir: WorkDir = None,
    overwrite: Overwrite = False,
    no_verify: NoVerify = False,
    revision: Revision = None,
    as_json: AsJson = False,
    config: Config = None,
    print_config: PrintConfig = False,
) -> None:
    """Sync-Point Drop in one command: measure sensitivity, drop, regroup heads, repair, and show what each step won."""
    console = Console(as_json)
    for name in ("epochs", "patience", "lr", "batch_size"):
        if repair == "align" and name in given_options(ctx):
            raise UsageError(f"--{name.replace('_', '-')} has no effect with --repair align, which trains nothing")
    with console.stage(LOADING):
        device = start_training_on(device, dtype, threads, lr)
        from ladderize.adapt.blockwise.documents import BLOCK_ERROR, perplexity_rows
        from ladderize.adapt.blockwise.options import BlockwiseOptions, DistillOptions
        from ladderize.workflows.spd import SpdOptions
        from ladderize.workflows.spd_document import spd_rows

    distillation = options_from(DistillOptions, ctx.params, max_memory=memory_limit(max_memory))
    training = options_from(BlockwiseOptions, ctx.params, distill=distillation, device=device)
    options = options_from(SpdOptions, ctx.params, training=training)
    document = ladderize.spd(model, out, options, console=console, overwrite=overwrite, verify=not no_verify)
    if document is None:
        return
    console.document(document.to_dict())
    console.table(spd_rows(document), right=["block", "S"])
    if any(block.distillation for block in document.blocks):
        console.prose(BLOCK_ERROR)
    console.result("")
    console.table(
        perplexity_rows(document.perplexity, document.divergence),
        right=["perplexity", "stderr", "difference", "KL to dense"],
    )
    console.result(f"wrote {out}")
    show_next(
        console,
        ("measure it", command("eval", model, out, "--perplexity", scoring_file([]))),
        ("retrain it", retrain_command(out, f"{out.rstrip('/')}-adapted", model, data, align=False)),
    )
