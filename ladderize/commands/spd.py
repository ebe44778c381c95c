"""``spd``, and the options of block-to-block distillation, which ``adapt`` has too."""

from pathlib import Path
from typing import Annotated, Any

import typer

from ladderize.commands.options import (
    MAX_SEED,
    AsJson,
    Device,
    NoVerify,
    Overwrite,
    Revision,
    SeqLen,
    Threads,
    check_taus,
    compute_options,
)
from ladderize.console import Console, UsageError, table

Samples = Annotated[
    int | None, typer.Option(min=1, help="Windows to train on.  [default: what the data give, up to 1024]")
]
Heldout = Annotated[
    int | None,
    typer.Option(min=1, help="Other windows, for early stopping and the table.  [default: a tenth, up to 64]"),
]
Epochs = Annotated[int, typer.Option(min=1, help="At most; a block that gets no better for --patience epochs is done.")]
Patience = Annotated[int, typer.Option(min=1, help="Epochs without a better held-out loss.")]
LearningRate = Annotated[
    float | None, typer.Option("--lr", help="Peak learning rate.  [default: 5e-5 at width 4096, times 4096/width]")
]
StepWindows = Annotated[
    int | None, typer.Option("--batch-size", min=1, help="Windows per step.  [default: 2048 tokens]")
]
ComputeDtype = Annotated[
    str, typer.Option("--dtype", help="To compute in: auto (float32 if stored so, else bfloat16), float32 or bfloat16.")
]
TrainingSeed = Annotated[int, typer.Option("--seed", min=0, max=MAX_SEED, help="Of the windows and their order.")]
TrainingData = Annotated[
    str, typer.Option("--data", metavar="FILE", help="jsonl, parquet, txt, npy, npz:array, or a glob of one kind.")
]
MAX_LR = 1e3
MaxMemory = Annotated[
    str, typer.Option(metavar="SIZE", help="Teacher states beyond this, of each process, lie on disk.")
]
WorkDir = Annotated[
    Path | None, typer.Option(metavar="DIR", help="Unfinished work.  [default: OUT.ladderize-work, gone when done]")
]


def blockwise_options(
    data: str,
    samples: int | None,
    heldout: int | None,
    seq_len: int | None,
    layers: str | None,
    epochs: int,
    patience: int,
    lr: float | None,
    batch_size: int | None,
    max_memory: str,
    seed: int,
    dtype: str,
    device: str | None,
    threads: int | None,
    work_dir: Path | None,
) -> Any:
    """The options of block-to-block distillation, checked."""
    if dtype == "float16":
        raise UsageError("--dtype float16 is too narrow to train in; take bfloat16 or float32")
    if lr is not None and not 0 < lr <= MAX_LR:
        raise UsageError(f"--lr must be above 0 and at most {MAX_LR:g}, not {lr:g}")
    from ladderize.convert.weights import parse_size

    size = parse_size(max_memory, option="--max-memory")
    device = compute_options(device, dtype, threads)
    from ladderize.adapt.blockwise.options import BlockwiseOptions, DistillOptions
    from ladderize.ranks.group import launched
    from ladderize.ranks.threads import set_threads

    set_threads(threads, launched().local_size)
    return BlockwiseOptions(
        data=data,
        samples=samples,
        heldout=heldout,
        seq_len=seq_len,
        layers=layers,
        dtype=dtype,
        device=device,
        work_dir=work_dir,
        distill=DistillOptions(
            epochs=epochs, patience=patience, lr=lr, batch_size=batch_size, max_memory=size, seed=seed
        ),
    )


def spd(
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
    max_memory: MaxMemory = "8GB",
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
    options = blockwise_options(
        data,
        samples,
        heldout,
        seq_len,
        None,
        epochs,
        patience,
        lr,
        batch_size,
        max_memory,
        seed,
        dtype,
        device,
        threads,
        work_dir,
    )
    from ladderize.adapt.blockwise.documents import perplexity_rows
    from ladderize.workflows.spd import SpdOptions, run_spd
    from ladderize.workflows.spd_document import spd_rows

    console = Console(as_json)
    fraction = 0.7 if spd_fraction is None and max_ppl_increase is None else spd_fraction
    what = SpdOptions(
        sync_tp_size=sync_tp_size,
        training=options,
        spd_fraction=fraction,
        max_ppl_increase=max_ppl_increase,
        calibration_samples=calibration_samples,
        tau1=tau1,
        tau2=tau2,
        distill_all=distill_all,
        head_grouping=head_grouping,
        revision=revision,
    )
    document = run_spd(model, out, what, console=console, overwrite=overwrite, verify=not no_verify)
    if document is None:
        return
    console.document(document.to_dict())
    console.result(table(spd_rows(document), right=["block", "S"]) + "\n")
    console.result(table(perplexity_rows(document.perplexity), right=["perplexity", "stderr", "difference"]))
    console.result(f"wrote {out}")
