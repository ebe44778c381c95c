"""The supported families, each with the reader of its configs. Imports no torch."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from ladderize.errors import UserError
from ladderize.families.base import (
    FULL_ATTENTION,
    GATE_UP,
    GELU,
    QKV,
    ROPE,
    SLIDING_ATTENTION,
    Decoder,
    Family,
    Norms,
    everywhere,
    layer_windows,
    positive,
    window_of,
)

AUTHORS_TYPE = "llamaLadder"  # in checkpoints published by the authors of Ladder Residual


def attention_biases(config: Mapping[str, Any]) -> dict[str, Any]:
    return {"qkv_bias": bool(config["attention_bias"]), "o_bias": bool(config["attention_bias"])}


def all_biases(config: Mapping[str, Any]) -> dict[str, Any]:
    return {**attention_biases(config), "mlp_bias": bool(config["mlp_bias"])}


# ---- Llama 1 to 3, and what is published as a Llama ----


def read_llama(config: Mapping[str, Any]) -> Decoder:
    return Decoder(**everywhere(config), **all_biases(config))


LLAMA = Family("llama", "Llama", read_llama, other_types=(AUTHORS_TYPE,))


# ---- Mistral: all layers have the same window, or none has one ----


def read_mistral(config: Mapping[str, Any]) -> Decoder:
    window = window_of(config)
    layers = everywhere(config, window)
    if layer_windows(config, window, lambda layer: True) != layers["windows"]:
        raise UserError(
            "config.json: layer_types names other layers than sliding_window does, and transformers' Mistral heeds"
            " sliding_window alone; remove layer_types, or name the family that has such layers"
        )
    return Decoder(**layers)


MISTRAL_DEFAULTS = {"num_key_value_heads": 8, "sliding_window": 4096, "max_position_embeddings": 131072}
MISTRAL = Family("mistral", "Mistral", read_mistral, MISTRAL_DEFAULTS)


# ---- Qwen2, Qwen2.5: q, k and v have a bias. Qwen3: each query head and key head has a norm before it rotates. Some
# layers of both may have a window ----

QWEN_DEFAULTS = {
    "num_key_value_heads": 32,
    "max_position_embeddings": 32768,
    "use_sliding_window": False,
    "sliding_window": 4096,
    "max_window_layers": 28,
}


def qwen_places(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return ``windows`` and ``rope`` of a Qwen.

    Layers from ``max_window_layers`` on have a window, unless ``layer_types`` names them; none has one without
    ``use_sliding_window``. All rotate.
    """
    window, first = window_of(config) if config["use_sliding_window"] else None, config["max_window_layers"]
    if type(first) is not int:
        raise UserError(f"config.json: max_window_layers is {repr(first)[:60]}, but must be a number of layers")
    return {**everywhere(config), "windows": layer_windows(config, window, lambda layer: layer >= first)}


def read_qwen2(config: Mapping[str, Any]) -> Decoder:
    return Decoder(**qwen_places(config), qkv_bias=True)


def read_qwen3(config: Mapping[str, Any]) -> Decoder:
    return Decoder(**qwen_places(config), **attention_biases(config), head_norms=True)


QWEN2 = Family("qwen2", "Qwen2", read_qwen2, QWEN_DEFAULTS)
QWEN3 = Family("qwen3", "Qwen3", read_qwen3, {**QWEN_DEFAULTS, "head_dim": 128})


# ---- Granite, dense: factors of the embedding, of the scores, of what a sub-module adds, and of the logits ----


def read_granite(config: Mapping[str, Any]) -> Decoder:
    return Decoder(
        **everywhere(config),
        **all_biases(config),
        embedding_scale=positive(config, "embedding_multiplier"),
        attention_scale=positive(config, "attention_multiplier"),
        residual_scale=positive(config, "residual_multiplier"),
        logits_scale=1 / positive(config, "logits_scaling"),
    )


MULTIPLIERS = ("embedding_multiplier", "attention_multiplier", "residual_multiplier", "logits_scaling")
GRANITE = Family("granite", "Granite", read_granite, dict.fromkeys(MULTIPLIERS, 1.0))


# ---- SmolLM3: some layers do not rotate queries and keys, and of those some may have a window ----


def rotating_layers(config: Mapping[str, Any]) -> tuple[bool, ...]:
    """Return for each layer whether it rotates queries and keys.

    ``no_rope_layers`` has a 1 for each layer that rotates and a 0 for each that does not; without it every
    ``no_rope_layer_interval``-th layer does not.
    """
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
    rotates, window = rotating_layers(config), window_of(config) if config["use_sliding_window"] else None
    windows = layer_windows(config, window, lambda layer: not rotates[layer])
    rope = tuple(ROPE if is_rotating else None for is_rotating in rotates)
    return Decoder(windows=windows, rope=rope, **all_biases(config))


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


# ---- Seed-OSS: q, k and v have biases, o has none. Ministral and CWM: windows by layer ----


def read_seed_oss(config: Mapping[str, Any]) -> Decoder:
    biases = {**all_biases(config), "o_bias": bool(config["attention_out_bias"])}
    return Decoder(**everywhere(config), **biases)


def read_ministral(config: Mapping[str, Any]) -> Decoder:
    windows = layer_windows(config, window_of(config), lambda layer: True)
    return Decoder(**{**everywhere(config), "windows": windows})


def read_cwm(config: Mapping[str, Any]) -> Decoder:
    windows = layer_windows(config, window_of(config), lambda layer: layer % 4 != 0)
    return Decoder(**{**everywhere(config), "windows": windows}, mlp_bias=bool(config["mlp_bias"]))


SEED_OSS = Family(
    "seed_oss",
    "SeedOss",
    read_seed_oss,
    {
        "num_key_value_heads": 8,
        "head_dim": 128,
        "max_position_embeddings": 524288,
        "attention_bias": True,
        "attention_out_bias": False,
    },
)
MINISTRAL = Family("ministral", "Ministral", read_ministral, MISTRAL_DEFAULTS)
CWM = Family(
    "cwm",
    "Cwm",
    read_cwm,
    {
        "num_key_value_heads": 8,
        "head_dim": 128,
        "max_position_embeddings": 131072,
        "rms_norm_eps": 1e-5,
        "rope_theta": 1000000.0,
        "sliding_window": 8192,
    },
)


# ---- Gemma 3, text: norms behind both sums, too, of weights 1 + w; layers with a window rotate otherwise ----

REFUSED_OF_GEMMA = ("attn_logit_softcapping", "final_logit_softcapping", "use_bidirectional_attention")


def read_gemma3(config: Mapping[str, Any]) -> Decoder:
    for key in filter(config.get, REFUSED_OF_GEMMA):
        raise UserError(f"config.json: {key} is {repr(config[key])[:60]}, which is not supported; Gemma 3 has none")
    windows = layer_windows(config, window_of(config), lambda layer: (layer + 1) % period(config) != 0)
    names = ("input_layernorm", "post_attention_layernorm", "pre_feedforward_layernorm", "post_feedforward_layernorm")
    return Decoder(
        windows=windows,
        rope=tuple(FULL_ATTENTION if window is None else SLIDING_ATTENTION for window in windows),
        **attention_biases(config),
        head_norms=True,
        norms=Norms(*names),
        norm_offset=1.0,
        embedding_scale=config["hidden_size"] ** 0.5,
        rounds_scale=True,
        attention_scale=positive(config, "query_pre_attn_scalar") ** -0.5,
    )


def period(config: Mapping[str, Any]) -> int:
    """Return every how many layers one has no window, where no ``layer_types`` say which."""
    value = config["sliding_window_pattern"]
    if type(value) is not int or value < 1:
        raise UserError(
            f"config.json: sliding_window_pattern is {repr(value)[:60]}, but must be a number of layers where there are"
            " no layer_types"
        )
    return value


GEMMA3 = Family(
    "gemma3_text",
    "Gemma3",
    read_gemma3,
    {
        "num_key_value_heads": 4,
        "head_dim": 256,
        "max_position_embeddings": 131072,
        "hidden_activation": GELU,
        "tie_word_embeddings": True,
        "query_pre_attn_scalar": 256,
        "sliding_window": 4096,
        "sliding_window_pattern": 6,
    },
)


# ---- EXAONE 4: norms behind both sums, none before; where some layers have a window, the others do not rotate ----


def read_exaone4(config: Mapping[str, Any]) -> Decoder:
    window = window_of(config)
    windows = layer_windows(config, window, lambda layer: window is not None and (layer + 1) % period(config) != 0)
    return Decoder(
        windows=windows,
        rope=tuple(ROPE if window is None or of_layer is not None else None for of_layer in windows),
        head_norms=True,
        norms=Norms(None, "post_attention_layernorm", None, "post_feedforward_layernorm"),
    )


EXAONE4 = Family(
    "exaone4",
    "Exaone4",
    read_exaone4,
    {"num_key_value_heads": 32, "rms_norm_eps": 1e-5, "sliding_window": 4096, "sliding_window_pattern": 4},
)


# ---- Phi-3, Phi-4: fused projections; a part of each head rotates ----


def rotary_share(config: Mapping[str, Any]) -> float:
    rope = config.get("rope_scaling") or config.get("rope_parameters") or {}
    return positive({**config, **rope}, "partial_rotary_factor")


def read_phi3(config: Mapping[str, Any]) -> Decoder:
    layers = everywhere(config, window_of(config))
    return Decoder(**layers, fused=(QKV, GATE_UP), rotary_share=rotary_share(config))


PHI3 = Family(
    "phi3",
    "Phi3",
    read_phi3,
    {"max_position_embeddings": 4096, "rms_norm_eps": 1e-5, "sliding_window": None, "partial_rotary_factor": 1.0},
)


# ---- GLM 4: gate and up are fused; a half of each head rotates, of neighbours. Since 0414 norms behind both sums ----


def read_glm(config: Mapping[str, Any]) -> Decoder:
    return Decoder(
        **everywhere(config),
        qkv_bias=bool(config["attention_bias"]),
        fused=(GATE_UP,),
        rotary_share=rotary_share(config),
        interleaved=True,
    )


def read_glm4(config: Mapping[str, Any]) -> Decoder:
    names = ("input_layernorm", "post_self_attn_layernorm", "post_attention_layernorm", "post_mlp_layernorm")
    return replace(read_glm(config), norms=Norms(*names))


GLM_DEFAULTS = {
    "num_key_value_heads": 2,
    "head_dim": 128,
    "max_position_embeddings": 131072,
    "rms_norm_eps": 1.5625e-7,
    "attention_bias": True,
    "partial_rotary_factor": 0.5,
}
GLM = Family("glm", "Glm", read_glm, GLM_DEFAULTS)
GLM4 = Family("glm4", "Glm4", read_glm4, GLM_DEFAULTS)

SUPPORTED = (
    *(LLAMA, MISTRAL, QWEN2, QWEN3, GRANITE, SMOLLM3, SEED_OSS, MINISTRAL, CWM),
    *(GEMMA3, EXAONE4, PHI3, GLM, GLM4),
)
