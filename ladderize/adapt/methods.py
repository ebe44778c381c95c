"""The methods of ``ladderize adapt``; imports nothing, so that the command line can name them."""

FULL, LORA, BLOCKS = "full", "lora", "blocks"
