"""Decoders that are no Llamas: whether their sizes alone tell times and messages, as a Llama's do."""

from collections.abc import Iterator, Mapping
from typing import Any

from ladderize.checkpoint.llama import SOURCE_TYPES, check_config, check_sizes
from ladderize.errors import UserError

ATTENTION_LAYERS = ("full_attention", "sliding_attention", "chunked_attention")
# parts of keys, and what a model is that has them
OTHER_PARTS = {
    "expert": "a mixture of experts",
    "moe_": "a mixture of experts",
    "kv_lora_rank": "attention over a latent cache",
    "mamba": "layers without attention",
    "ssm_": "layers without attention",
    "linear_attn": "layers without attention",
    "lru_width": "layers without attention",
    "text_config": "a text model inside another",
}
NO_GATE = ("apertus", "arcee", "nemotron")  # families whose MLP has no gate, which their configs do not say


def check_decoder(config: Mapping[str, Any]) -> str | None:
    """Raise UserError unless this is the config of a dense, unquantised decoder of layers like a Llama's: attention
    with heads, then an MLP with a gate, an all-reduce behind each. Of what is no Llama, a remark that says so."""
    model_type = config.get("model_type")
    if model_type is None or model_type in SOURCE_TYPES:
        check_config(config)
        return None
    if (problem := next(_problems(config), None)) is not None:
        raise UserError(
            f"this is a {model_type}, not a Llama, and its times cannot be told from its sizes: {problem}; name a dense"
            " decoder whose layers are like a Llama's"
        )
    check_sizes(config)
    return (
        f"{model_type}: taken for a Llama of the same sizes (attention, then an MLP with a gate; an all-reduce behind"
        " each); `ladderize convert` refuses this family"
    )


def _problems(config: Mapping[str, Any]) -> Iterator[str]:
    for part, what in OTHER_PARTS.items():
        if key := next((key for key, value in config.items() if part in key and value), None):
            yield f"it is {what} ({key})" if what.startswith("a mix") else f"it has {what} ({key})"
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
    if config["model_type"] in NO_GATE:
        yield "its MLP has no gate"
    if config.get("use_parallel_residual"):
        yield "its attention and its MLP read the same input (use_parallel_residual)"
