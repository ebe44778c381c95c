"""``spd``."""

from typing import Annotated

import typer

from ladderize.commands.options import (
    AsJson,
    Device,
    NoVerify,
    Overwrite,
    Revision,
    SeqLen,
    Threads,
    check_taus,
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
from ladderize.console import Console, UsageError


def spd(
    ctx: typer.Context,
    model: Annotated[
        str, typer.Argument(metavar="MODEL", help="A dense checkpoint folder or hub id; it is never touched.")
    ],
    out: Annotated[str, typer.Argument(metavar="OUT", help="The folder to write; it appears whole or not at all.")],
    sync_tp_size: Annotated[int, typer.Option(min=2, help="Virtual ranks to drop sync points for; a property of OUT.")],
    data: TrainingData,
    spd_fraction: Annotated[
        float | None, typer.Option(help="Part of all blocks to drop, least sensitive first.  [default: 0.7]")
    ] = None,
    max_ppl_increase: Annotated[
        float | None, typer.Option(help="Drop while the summed sensitivities stay within this instead.")
    ] = None,
    calibration_samples: Annotated[
        int, typer.Option(min=1, help="Of the windows to train on, for sensitivity and grouping.")
    ] = 128,
    tau1: Annotated[
        float | None,
        typer.Option(help="S up to here: in-sensitive, dropped as it is.  [default: 0.05; 0.02 from 30B parameters]"),
    ] = None,
    tau2: Annotated[float, typer.Option(help="S above: extremely sensitive.")] = 10.0,
    distill_all: Annotated[
        bool, typer.Option("--distill-all", help="Distil every dropped block, in-sensitive ones too.")
    ] = False,
    head_grouping: Annotated[
        str,
        typer.Option(
            help=(
                "error: of every distilled block, by its error; paper: of extremely sensitive ones, by the paper; none."
            )
        ),
    ] = "error",
    samples: Samples = None,
    heldout: Heldout = None,
    seq_len: SeqLen = None,
    epochs: Epochs = 10,
    patience: Patience = 2,
    lr: LearningRate = None,
    batch_size: StepWindows = None,
    max_memory: MaxMemory = None,
    seed: TrainingSeed = 0,
    dtype: ComputeDtype = "auto",
    device: Device = None,
    threads: Threads = None,
    work_dir: WorkDir = None,
    overwrite: Overwrite = False,
    no_verify: NoVerify = False,
    revision: Revision = None,
    as_json: AsJson = False,
) -> None:
    """Sync-Point Drop in one command: sensitivity, head grouping, distillation, conversion, and what each step won."""
    if spd_fraction is not None and max_ppl_increase is not None:
        raise UsageError("--spd-fraction and --max-ppl-increase both say how much to drop; give one of them")
    if head_grouping not in ("error", "paper", "none"):
        raise UsageError(f"--head-grouping {head_grouping} is not one of error, paper, none")
    check_taus(tau1, tau2)
    device = start_training_on(device, dtype, threads, lr)
    from ladderize.adapt.blockwise.documents import perplexity_rows
    from ladderize.adapt.blockwise.options import BlockwiseOptions, DistillOptions
    from ladderize.workflows.spd import SpdOptions, run_spd
    from ladderize.workflows.spd_document import spd_rows

    console = Console(as_json)
    distill = options_from(DistillOptions, ctx.params, max_memory=memory_limit(max_memory))
    training = options_from(BlockwiseOptions, ctx.params, distill=distill, device=device)
    fraction = spd_fraction if spd_fraction is not None or max_ppl_increase is not None else SpdOptions.spd_fraction
    options = options_from(SpdOptions, ctx.params, training=training, spd_fraction=fraction)
    document = run_spd(model, out, options, console=console, overwrite=overwrite, verify=not no_verify)
    if document is None:
        return
    console.document(document.to_dict())
    console.table(spd_rows(document), right=["block", "S"])
    console.result("")
    console.table(perplexity_rows(document.perplexity), right=["perplexity", "stderr", "difference"])
    console.result(f"wrote {out}")
