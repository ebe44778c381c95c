"""The words and descriptions that options of ``ladderize adapt`` and ``ladderize spd`` share.

Imports neither torch nor numpy, so that the command line starts at once.
"""

from typing import Final, Literal

from ladderize.choices import MAX_SEED, Option
from ladderize.errors import UsageError

Method = Literal["full", "lora", "blocks", "align"]
FULL: Final = "full"
LORA: Final = "lora"
BLOCKS: Final = "blocks"
ALIGN: Final = "align"

CONVERTED: Final = "converted"  # of --train

Write = Literal["best", "last"]  # the weights that become the output

METRICS = "metrics.jsonl"  # of retraining: a line for each step and each validation

MAX_LR = 1e3

TRAINING_SEED = Option("Seed of which data are used, and their order.", min=0, max=MAX_SEED)
TrainingDtype = Literal["auto", "float32", "bfloat16"]  # float16 has too small a range
COMPUTE_DTYPE = Option("float32, bfloat16, or auto: float32 if the model is stored in it, else bfloat16.", "DTYPE")


def check_lr(lr: float | None) -> None:
    """Raise UsageError for a learning rate that cannot be trained with."""
    if lr is not None and not 0 < lr <= MAX_LR:
        raise UsageError(f"--lr must be above 0 and at most {MAX_LR:g}, not {lr:g}")
