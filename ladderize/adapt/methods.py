"""The words that options of ``ladderize adapt`` take; imports no torch, so that the command line can name them."""

from typing import Final, Literal

from ladderize.choices import Dtype
from ladderize.errors import UsageError

Method = Literal["full", "lora", "blocks", "align"]
FULL: Final = "full"
LORA: Final = "lora"
BLOCKS: Final = "blocks"
ALIGN: Final = "align"

CONVERTED: Final = "converted"  # of --train

Attention = Literal["sdpa", "eager", "flash_attention_2", "flex_attention"]  # transformers' implementations
FLASH: Final = "flash_attention_2"
FLEX: Final = "flex_attention"
Write = Literal["best", "last"]  # which weights become the output
ScheduleKind = Literal["cosine", "wsd", "constant"]  # of the learning rate

METRICS = "metrics.jsonl"  # of retraining: a line for each step and each validation

MAX_LR = 1e3


def check_training(dtype: Dtype, lr: float | None) -> None:
    """Raise UsageError for a dtype or a learning rate that nothing is trained with."""
    if dtype == "float16":
        raise UsageError("--dtype float16 has too small a range for training; use bfloat16 or float32")
    if lr is not None and not 0 < lr <= MAX_LR:
        raise UsageError(f"--lr must be above 0 and at most {MAX_LR:g}, not {lr:g}")
