"""Which family a config.json is of, and why others are refused. Imports no torch."""

from collections.abc import Mapping
from typing import Any

from ladderize.errors import UserError
from ladderize.families.base import Decoder, Family
from ladderize.families.granite import GRANITE
from ladderize.families.llama import AUTHORS_TYPE, LLAMA
from ladderize.families.mistral import MISTRAL
from ladderize.families.qwen2 import QWEN2
from ladderize.families.qwen3 import QWEN3
from ladderize.families.refused import REFUSED, unlike_a_llama
from ladderize.families.smollm3 import SMOLLM3

SUPPORTED = (LLAMA, MISTRAL, QWEN2, QWEN3, GRANITE, SMOLLM3)
BY_TYPE = {model_type: family for family in SUPPORTED for model_type in family.types}


def find_family(config: Mapping[str, Any]) -> Family | None:
    """The family of a config, dense or converted; None where it is none that ladderize converts."""
    model_type = config.get("model_type")
    return BY_TYPE.get(model_type) if isinstance(model_type, str) else None


def family_of(config: Mapping[str, Any]) -> Family:
    """The family of a config, dense or converted; raises UserError, which says why, where it is none of these."""
    if (family := find_family(config)) is not None:
        return family
    stated = config.get("model_type")
    reason = REFUSED.get(str(stated)) or next(unlike_a_llama(config), None)
    why = f": {reason}" if stated and reason else ""
    raise UserError(
        f"this is a {stated or 'model without model_type'}, which ladderize does not convert{why}; model_type must be"
        f" one of {', '.join(family.model_type for family in SUPPORTED)}"
    )


def known_family(config: Mapping[str, Any]) -> Family:
    """The family of a config; of another, or where it does not say, Llama's, for a model of the same sizes."""
    return find_family(config) or LLAMA


def complete_config(config: Mapping[str, Any]) -> dict[str, Any]:
    """The config with its family's defaults filled in, as transformers takes them."""
    return known_family(config).complete(config)


def decoder_of(config: Mapping[str, Any]) -> Decoder:
    """What computing needs of a model; raises UserError for another family, or for a config that makes no sense in
    its own."""
    return family_of(config).describe(config)


def is_ladderized(config: Mapping[str, Any]) -> bool:
    """Whether config.json holds a layout, as a converted checkpoint's does."""
    family = find_family(config)
    return family is not None and config["model_type"] == family.ladderized_type


def is_plain(config: Mapping[str, Any]) -> bool:
    """Whether this is the config of a family's own dense model, as transformers writes it."""
    family = find_family(config)
    return family is not None and config["model_type"] == family.model_type


def is_authors(config: Mapping[str, Any]) -> bool:
    """Whether config.json is of the published checkpoints of Ladder Residual, which say their layout otherwise."""
    return config.get("model_type") == AUTHORS_TYPE
