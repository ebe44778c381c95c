"""Finds the family of a config.json. Imports no torch."""

from collections.abc import Mapping
from typing import Any

from ladderize.errors import UserError
from ladderize.families.base import Decoder, Family
from ladderize.families.supported import AUTHORS_TYPE, LLAMA, SUPPORTED

WAITS = "its norms of q and k run over all heads, so every rank would wait before attention"
REFUSED = {
    **dict.fromkeys(("olmo2", "olmo3"), WAITS),
    "gemma2": "its scores and logits are capped",
}
EXPERTS = {"num_experts", "num_local_experts", "n_routed_experts"}  # keys of mixtures of them
BY_TYPE = {model_type: family for family in SUPPORTED for model_type in family.types}


def find_family(config: Mapping[str, Any]) -> Family | None:
    """Return the family of a config, dense or converted; None for an unsupported one."""
    model_type = config.get("model_type")
    return BY_TYPE.get(model_type) if isinstance(model_type, str) else None


def family_of(config: Mapping[str, Any]) -> Family:
    """Return the family of a config, dense or converted; raises UserError for an unsupported one."""
    if (family := find_family(config)) is not None:
        return family
    stated = config.get("model_type") or "model without model_type"
    if isinstance(config.get("text_config"), dict):
        raise UserError(f"this is a {stated}, which has a text model inside; save that alone first (docs/models.md)")
    reason = REFUSED.get(str(stated), "")
    if config.keys() & EXPERTS:
        reason = "it is a mixture of experts; arXiv 2511.11505 shows that these can be converted, but not here"
    supported = ", ".join(family.model_type for family in SUPPORTED)
    raise UserError(
        f"this is a {stated}, which ladderize does not convert ({reason or 'docs/models.md says why'}); model_type must"
        f" be one of {supported}"
    )


def known_family(config: Mapping[str, Any]) -> Family:
    """Return the family of a config; for an unsupported or unnamed one Llama's, for a model of the same sizes."""
    return find_family(config) or LLAMA


def complete_config(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the config with its family's defaults filled in, as transformers takes them."""
    return known_family(config).complete(config)


def decoder_of(config: Mapping[str, Any]) -> Decoder:
    """Return the decoder of a config; raises UserError for another family, or a config that makes no sense."""
    return family_of(config).describe(config)


def is_ladderized(config: Mapping[str, Any]) -> bool:
    """Return whether the config is a converted checkpoint's, which holds a layout."""
    family = find_family(config)
    return family is not None and config["model_type"] == family.ladderized_type


def is_authors(config: Mapping[str, Any]) -> bool:
    """Return whether the config is of the authors' checkpoints of Ladder Residual, whose layout has another form."""
    return config.get("model_type") == AUTHORS_TYPE
