"""Mistral: all layers have the same window, or none has one."""

from collections.abc import Mapping
from typing import Any

from ladderize.errors import UserError
from ladderize.families.base import Decoder, Family, everywhere, layer_windows, window_of


def read_mistral(config: Mapping[str, Any]) -> Decoder:
    window = window_of(config)
    windows = (window,) * config["num_hidden_layers"]
    if config.get("layer_types") is not None and layer_windows(config, window, lambda layer: True) != windows:
        raise UserError(
            "config.json: layer_types names other layers than sliding_window does, and transformers' Mistral heeds"
            " sliding_window alone; remove layer_types, or name the family that has such layers"
        )
    return Decoder(**{**everywhere(config), "windows": windows})


MISTRAL = Family(
    "mistral",
    "Mistral",
    read_mistral,
    {"num_key_value_heads": 8, "sliding_window": 4096, "max_position_embeddings": 131072},
)
