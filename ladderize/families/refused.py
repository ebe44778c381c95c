"""Why other families are refused. Imports no torch."""

from collections.abc import Iterator, Mapping
from typing import Any

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
# parts of keys, and what a model is that has them
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
    """Of a config of another family: what is other than in a decoder of attention with heads, then an MLP with a
    gate, each with a norm before it and an all-reduce behind it."""
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
