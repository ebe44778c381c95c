"""Qwen3, dense: each query head and key head has a norm before it rotates; some layers may have a window."""

from collections.abc import Mapping
from typing import Any

from ladderize.families.base import Decoder, Family, everywhere
from ladderize.families.qwen2 import QWEN_DEFAULTS, qwen_windows


def read_qwen3(config: Mapping[str, Any]) -> Decoder:
    biased = bool(config["attention_bias"])
    places = {**everywhere(config), "windows": qwen_windows(config)}
    return Decoder(**places, qkv_bias=biased, o_bias=biased, head_norms=True)


QWEN3 = Family("qwen3", "Qwen3", read_qwen3, {**QWEN_DEFAULTS, "head_dim": 128})
