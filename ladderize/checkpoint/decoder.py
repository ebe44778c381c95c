"""Decoders of families that ladderize does not convert: whether their sizes alone tell times and messages, as a Llama's
do."""

from collections.abc import Mapping
from typing import Any

from ladderize.checkpoint.config import check_config, check_sizes
from ladderize.errors import UserError
from ladderize.families.registry import find_family, unlike_a_llama


def check_decoder(config: Mapping[str, Any]) -> str | None:
    """Raise UserError unless this is the config of a dense, unquantised decoder of layers like a Llama's: attention
    with heads, then an MLP with a gate, an all-reduce behind each. Of another family, a remark that says so."""
    model_type = config.get("model_type")
    if model_type is None or find_family(config) is not None:
        check_config(config)
        return None
    if (problem := next(unlike_a_llama(config), None)) is not None:
        raise UserError(
            f"this is a {model_type}, which ladderize does not convert, and its times cannot be told from its sizes:"
            f" {problem}; name a dense decoder whose layers are like a Llama's"
        )
    check_sizes(config)
    return (
        f"{model_type}: taken for a Llama of the same sizes (attention, then an MLP with a gate; an all-reduce behind"
        " each); `ladderize convert` refuses this family"
    )
