"""Llama 1 to 3, and what is published as a Llama."""

from collections.abc import Mapping
from typing import Any

from ladderize.families.base import Decoder, Family, everywhere

AUTHORS_TYPE = "llamaLadder"  # of the checkpoints that the authors of Ladder Residual have published


def read_llama(config: Mapping[str, Any]) -> Decoder:
    biased = bool(config["attention_bias"])
    return Decoder(**everywhere(config), qkv_bias=biased, o_bias=biased, mlp_bias=bool(config["mlp_bias"]))


LLAMA = Family("llama", "Llama", read_llama, other_types=(AUTHORS_TYPE,))
