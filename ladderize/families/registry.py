"""Finds the family of a config.json, and explains why others are refused. Imports no torch."""

from collections.abc import Iterator, Mapping
from typing import Any

from ladderize.errors import UserError
from ladderize.families.base import Decoder, Family
from ladderize.families.supported import AUTHORS_TYPE, LLAMA, SUPPORTED

BY_TYPE = {model_type: family for family in SUPPORTED for model_type in family.types}


def find_family(config: Mapping[str, Any]) -> Family | None:
    """Return the family of a config, dense or converted; None for an unsupported one."""
    model_type = config.get("model_type")
    return BY_TYPE.get(model_type) if isinstance(model_type, str) else None


def family_of(config: Mapping[str, Any]) -> Family:
    """Return the family of a config, dense or converted; raises UserError with the reason for an unsupported one."""
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
    """Return the family of a config; for an unsupported or unnamed one Llama's, for a model of the same sizes."""
    return find_family(config) or LLAMA


def complete_config(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the config with its family's defaults filled in, as transformers takes them."""
    return known_family(config).complete(config)


def decoder_of(config: Mapping[str, Any]) -> Decoder:
    """Return the decoder of a config; raises UserError for an unsupported family, or a config that makes no sense in
    its own."""
    return family_of(config).describe(config)


def is_ladderized(config: Mapping[str, Any]) -> bool:
    """Return whether the config is a converted checkpoint's, which holds a layout."""
    family = find_family(config)
    return family is not None and config["model_type"] == family.ladderized_type


def is_authors(config: Mapping[str, Any]) -> bool:
    """Return whether the config is of the published checkpoints of Ladder Residual, which state their layout in another
    way."""
    return config.get("model_type") == AUTHORS_TYPE


# ---- why others are refused ----

NORM_AFTER = "its norms come after attention and the MLP, so that the sum over the ranks must be complete before them"
PARALLEL_BLOCKS = "its attention and its MLP read the same input, so that a layer has one sync point already"
EXPERTS = "it is a mixture of experts"
OTHER_LAYERS = "some of its layers have no attention"
FUSED = "its projections are fused into one tensor"
QUERY_SCALE = (
    "it scales each query by its position in the text (llama_4_scaling_beta), which the attention of none of these"
    " families does"
)
REFUSED = {
    model_type: reason
    for reason, model_types in {
        NORM_AFTER: "gemma2 gemma3 gemma3_text gemma3n gemma3n_text olmo2 olmo3 exaone4 glm4",
        PARALLEL_BLOCKS: "cohere cohere2 gptj gpt_neox phi falcon",
        EXPERTS: "mixtral qwen2_moe qwen3_moe granitemoe granitemoeshared olmoe phimoe gpt_oss deepseek_v2 deepseek_v3",
        OTHER_LAYERS: "granitemoehybrid qwen3_next jamba bamba zamba zamba2 falcon_h1 lfm2 nemotron_h",
        FUSED: "phi3 glm",
        QUERY_SCALE: "ministral3",
    }.items()
    for model_type in model_types.split()
}
ATTENTION_LAYERS = ("full_attention", "sliding_attention", "chunked_attention")
# Parts of keys, and what they say of a model.
OTHER_PARTS = {
    "expert": EXPERTS,
    "moe_": EXPERTS,
    "kv_lora_rank": "it has attention over a latent cache",
    "mamba": "it has layers without attention",
    "ssm_": "it has layers without attention",
    "linear_attn": "it has layers without attention",
    "lru_width": "it has layers without attention",
    "text_config": "it has a text model inside another",
}
NO_GATE = ("apertus", "arcee", "nemotron")  # families whose MLP has no gate, which their configs do not say


def unlike_a_llama(config: Mapping[str, Any]) -> Iterator[str]:
    """Yield how a config of another family differs from a Llama.

    A Llama has attention with heads, then an MLP with a gate, each with a norm before it and an all-reduce after it.
    """
    for part, what in OTHER_PARTS.items():
        if key := next((key for key, value in config.items() if part in key and value), None):
            yield f"{what} ({key})"
    architectures = config.get("architectures")
    if isinstance(architectures, list) and not any(str(name).endswith("ForCausalLM") for name in architectures):
        yield f"it is no causal language model ({', '.join(map(str, architectures))})"
    if config.get("is_encoder_decoder"):
        yield "it has an encoder"
    kinds = config.get("layer_types")
    if isinstance(kinds, list) and (other := [kind for kind in kinds if kind not in ATTENTION_LAYERS]):
        yield f"it has layers of another kind ({other[0]})"
    if "rms_norm_eps" not in config:
        yield "it has no RMSNorm (rms_norm_eps), so its layers are others"
    if config.get("model_type") in NO_GATE:
        yield "its MLP has no gate"
    if config.get("use_parallel_residual"):
        yield "its attention and its MLP read the same input (use_parallel_residual)"
