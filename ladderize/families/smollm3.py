"""SmolLM3: some layers do not rotate queries and keys, and of those some may have a window."""

from collections.abc import Mapping
from typing import Any

from ladderize.errors import UserError
from ladderize.families.base import Decoder, Family, layer_windows, window_of


def rotating_layers(config: Mapping[str, Any]) -> tuple[bool, ...]:
    """``no_rope_layers`` has a 1 for each layer that rotates and a 0 for each that does not; where there is none, every
    ``no_rope_layer_interval``-th does not."""
    layers, stated, interval = (
        config[key] for key in ("num_hidden_layers", "no_rope_layers", "no_rope_layer_interval")
    )
    if stated is None:
        if type(interval) is not int or interval < 1:
            raise UserError(
                f"config.json: no_rope_layer_interval is {repr(interval)[:60]}, but must be a positive integer"
            )
        return tuple((layer + 1) % interval != 0 for layer in range(layers))
    if not isinstance(stated, list) or len(stated) != layers or any(flag not in (0, 1) for flag in stated):
        raise UserError(
            f"config.json: no_rope_layers must be a list of {layers} numbers, one for each layer: 1 rotates queries and"
            " keys, 0 does not"
        )
    return tuple(map(bool, stated))


def read_smollm3(config: Mapping[str, Any]) -> Decoder:
    rope, biased = rotating_layers(config), bool(config["attention_bias"])
    window = window_of(config) if config["use_sliding_window"] else None
    return Decoder(
        windows=layer_windows(config, window, lambda layer: not rope[layer]),
        rope=rope,
        qkv_bias=biased,
        o_bias=biased,
        mlp_bias=bool(config["mlp_bias"]),
    )


SMOLLM3 = Family(
    "smollm3",
    "SmolLM3",
    read_smollm3,
    {
        "num_key_value_heads": 4,
        "max_position_embeddings": 32768,
        "rope_theta": 2000000.0,
        "tie_word_embeddings": True,
        "use_sliding_window": False,
        "sliding_window": None,
        "no_rope_layers": None,
        "no_rope_layer_interval": 4,
    },
)
