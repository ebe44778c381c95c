"""Granite, dense: multipliers of the embedding, of the scores, of what a sub-module adds, and of the logits."""

from collections.abc import Mapping
from typing import Any

from ladderize.families.base import Decoder, Family, everywhere, positive


def read_granite(config: Mapping[str, Any]) -> Decoder:
    biased = bool(config["attention_bias"])
    return Decoder(
        **everywhere(config),
        qkv_bias=biased,
        o_bias=biased,
        mlp_bias=bool(config["mlp_bias"]),
        embedding_scale=positive(config, "embedding_multiplier"),
        attention_scale=positive(config, "attention_multiplier"),
        residual_scale=positive(config, "residual_multiplier"),
        logits_scale=1 / positive(config, "logits_scaling"),
    )


MULTIPLIERS = ("embedding_multiplier", "attention_multiplier", "residual_multiplier", "logits_scaling")
GRANITE = Family("granite", "Granite", read_granite, dict.fromkeys(MULTIPLIERS, 1.0))
