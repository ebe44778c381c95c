"""Qwen2 and Qwen2.5: q, k and v have a bias; some layers may have a window."""

from collections.abc import Mapping
from typing import Any

from ladderize.errors import UserError
from ladderize.families.base import Decoder, Family, everywhere, layer_windows, window_of

QWEN_DEFAULTS = {
    "num_key_value_heads": 32,
    "max_position_embeddings": 32768,
    "use_sliding_window": False,
    "sliding_window": 4096,
    "max_window_layers": 28,
}


def qwen_windows(config: Mapping[str, Any]) -> tuple[int | None, ...]:
    """Layers from ``max_window_layers`` on have a window, unless ``layer_types`` says which; none has one without
    ``use_sliding_window``."""
    window, first = window_of(config) if config["use_sliding_window"] else None, config["max_window_layers"]
    if type(first) is not int:
        raise UserError(f"config.json: max_window_layers is {repr(first)[:60]}, but must be a number of layers")
    return layer_windows(config, window, lambda layer: layer >= first)


def read_qwen2(config: Mapping[str, Any]) -> Decoder:
    return Decoder(**{**everywhere(config), "windows": qwen_windows(config)}, qkv_bias=True)


QWEN2 = Family("qwen2", "Qwen2", read_qwen2, QWEN_DEFAULTS)
