"""Options and checks that ``adapt`` and ``spd`` share."""

from pathlib import Path
from typing import Annotated

import typer

from ladderize.adapt.methods import check_training
from ladderize.choices import DeviceName, Dtype
from ladderize.commands.options import DATA, MAX_SEED, MEMORY, OPTIMISATION, OUTPUT, compute_options

Samples = Annotated[
    int | None,
    typer.Option(
        metavar="N",
        min=1,
        help="Windows to train on.",
        show_default="what the data give, up to 1024",
        rich_help_panel=DATA,
    ),
]
Heldout = Annotated[
    int | None,
    typer.Option(
        metavar="N",
        min=1,
        help="Windows to hold out for early stopping and for the table.",
        show_default="a tenth, up to 64",
        rich_help_panel=DATA,
    ),
]
Epochs = Annotated[
    int,
    typer.Option(metavar="N", min=1, help="Most epochs per block; see --patience.", rich_help_panel=OPTIMISATION),
]
Patience = Annotated[
    int,
    typer.Option(
        metavar="N",
        min=1,
        help="A block stops after this many epochs without a better held-out loss.",
        rich_help_panel=OPTIMISATION,
    ),
]
LearningRate = Annotated[
    float | None,
    typer.Option(
        "--lr",
        metavar="X",
        help="Peak learning rate.",
        show_default="5e-5 * 4096 / hidden size",
        rich_help_panel=OPTIMISATION,
    ),
]
StepWindows = Annotated[
    int | None,
    typer.Option(
        "--batch-size",
        metavar="N",
        min=1,
        help="Windows per step.",
        show_default="2048 tokens",
        rich_help_panel=OPTIMISATION,
    ),
]
ComputeDtype = Annotated[
    Dtype,
    typer.Option(
        "--dtype",
        metavar="DTYPE",
        help="float32, bfloat16, float16, or auto: float32 if the model is stored in it, else bfloat16.",
        rich_help_panel=MEMORY,
    ),
]
TrainingSeed = Annotated[
    int,
    typer.Option(
        "--seed",
        metavar="N",
        min=0,
        max=MAX_SEED,
        help="Seed of which data are used, and their order.",
        rich_help_panel=DATA,
    ),
]
TrainingData = Annotated[
    str,
    typer.Option(
        "--data",
        metavar="FILE",
        help="jsonl, parquet, txt, npy, npz:array, or a glob of one kind.",
        rich_help_panel=DATA,
    ),
]
MaxMemory = Annotated[
    str | None,
    typer.Option(
        metavar="SIZE",
        help="Memory for the dense model's states, per process. What is beyond it goes to disk.",
        show_default="8GB",
        rich_help_panel=MEMORY,
    ),
]
WorkDir = Annotated[
    Path | None,
    typer.Option(
        metavar="DIR",
        help="Folder of unfinished work, which the same command goes on with.",
        show_default="OUT.ladderize-work",
        rich_help_panel=OUTPUT,
    ),
]


def start_training_on(device: DeviceName | None, dtype: Dtype, threads: int | None, lr: float | None) -> DeviceName:
    """Check where and how to train, and share the cores out; returns the device."""
    check_training(dtype, lr)
    device = compute_options(device, threads)
    from ladderize.ranks.group import launched
    from ladderize.ranks.threads import set_threads

    set_threads(threads, launched().local_size)
    return device


def memory_limit(size: str | None) -> int:
    """--max-memory in bytes."""
    from ladderize.adapt.blockwise.options import DistillOptions
    from ladderize.convert.weights import parse_size

    return parse_size(size, option="--max-memory") if size is not None else DistillOptions.max_memory
