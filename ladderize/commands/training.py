"""Options and checks that ``adapt`` and ``spd`` share."""

from pathlib import Path
from typing import Annotated

import typer

from ladderize.commands.options import MAX_SEED, compute_options
from ladderize.console import UsageError

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
    str | None,
    typer.Option(metavar="SIZE", help="Teacher states beyond this, of each process, lie on disk.  [default: 8GB]"),
]
WorkDir = Annotated[
    Path | None, typer.Option(metavar="DIR", help="Unfinished work.  [default: OUT.ladderize-work, gone when done]")
]


def start_training_on(device: str | None, dtype: str, threads: int | None, lr: float | None) -> str:
    """Check where and how to train, and share the cores out; returns the device."""
    if dtype == "float16":
        raise UsageError("--dtype float16 is too narrow to train in; take bfloat16 or float32")
    if lr is not None and not 0 < lr <= MAX_LR:
        raise UsageError(f"--lr must be above 0 and at most {MAX_LR:g}, not {lr:g}")
    device = compute_options(device, dtype, threads)
    from ladderize.ranks.group import launched
    from ladderize.ranks.threads import set_threads

    set_threads(threads, launched().local_size)
    return device


def memory_limit(size: str | None) -> int:
    """--max-memory in bytes."""
    from ladderize.adapt.blockwise.options import DistillOptions
    from ladderize.convert.weights import parse_size

    return parse_size(size, option="--max-memory") if size is not None else DistillOptions.max_memory
