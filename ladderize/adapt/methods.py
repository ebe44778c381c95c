"""The words that options of ``ladderize adapt`` take; imports no torch, so that the command line can name them."""

from typing import Final, Literal

Method = Literal["full", "lora", "blocks"]
FULL: Final = "full"
LORA: Final = "lora"
BLOCKS: Final = "blocks"

Attention = Literal["sdpa", "eager", "flash_attention_2", "flex_attention"]  # transformers' implementations
Write = Literal["best", "last"]  # which weights become the output
