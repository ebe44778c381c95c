"""Families of models: their descriptions against transformers' own classes."""

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from ladderize.checkpoint.config import check_config, expected_tensors, head_dim, kv_head_count
from ladderize.errors import UserError
from ladderize.families.registry import SUPPORTED, decoder_of, family_of
from tests.helpers import SHAPE

SIZES = {**SHAPE, "head_dim": 8}
# model_type -> what its configs may say beside sizes
VARIANTS = {
    "llama": [{}, {"attention_bias": True, "mlp_bias": True}],
    "mistral": [{"sliding_window": 5}, {"sliding_window": None, "tie_word_embeddings": True}],
    "qwen2": [
        {},
        {"use_sliding_window": True, "sliding_window": 5, "max_window_layers": 2},
        {
            "use_sliding_window": True,
            "sliding_window": 5,
            "layer_types": ["sliding_attention", "full_attention", "full_attention", "sliding_attention"],
        },
    ],
    "qwen3": [{}, {"attention_bias": True}, {"use_sliding_window": True, "sliding_window": 5, "max_window_layers": 1}],
    "granite": [
        {"embedding_multiplier": 3.0, "attention_multiplier": 0.3, "residual_multiplier": 0.2, "logits_scaling": 4.0},
        {"attention_bias": True, "mlp_bias": True},
    ],
    "smollm3": [
        {},
        {"no_rope_layers": [1, 0, 0, 1], "use_sliding_window": True, "sliding_window": 5, "tie_word_embeddings": False},
    ],
}
CASES = [(model_type, extra) for model_type, variants in VARIANTS.items() for extra in variants]


def config_json(model_type: str, **extra: object) -> dict[str, object]:
    """As transformers writes it."""
    return AutoConfig.for_model(model_type, **{**SIZES, **extra}).to_dict()


def test_every_family_is_tested():
    assert set(VARIANTS) == {family.model_type for family in SUPPORTED}


@pytest.mark.parametrize(("model_type", "extra"), CASES)
def test_a_description_is_what_transformers_builds(model_type, extra):
    config = config_json(model_type, **extra)
    check_config(config)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(model_type, **{**SIZES, **extra}))
    assert type(model).__name__ == f"{family_of(config).class_prefix}ForCausalLM"
    tensors = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}
    if model.config.tie_word_embeddings:
        del tensors["lm_head.weight"]
    assert expected_tensors(config) == tensors
    decoder = decoder_of(config)
    attentions = [layer.self_attn for layer in model.model.layers]
    own = "config" if model_type == "mistral" else None
    windows = [getattr(layer.config if own else layer, "sliding_window", None) for layer in attentions]
    assert list(decoder.windows) == windows
    assert [bool(getattr(layer, "use_rope", True)) for layer in attentions] == list(decoder.rope)
    scale = decoder.attention_scale or head_dim(config) ** -0.5
    assert {layer.scaling for layer in attentions} == {scale}


@pytest.mark.parametrize("family", SUPPORTED, ids=lambda family: family.model_type)
def test_defaults_are_those_of_transformers(family):
    """Of a config that says nothing but its sizes."""
    sizes = {key: SHAPE[key] for key in ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers")}
    sizes |= {"num_attention_heads": 32}
    known = AutoConfig.for_model(family.model_type, **sizes).to_dict()
    stated = {"model_type": family.model_type, **sizes}
    assert decoder_of(stated) == decoder_of(known)
    complete = family.complete(stated)
    known["rope_theta"] = known["rope_parameters"]["rope_theta"]
    for key, value in complete.items():
        if key in known and known[key] is not None and key not in ("sliding_window", "no_rope_layers"):
            assert value == known[key], key
    assert kv_head_count(stated) == kv_head_count(known)


SLIDES = {"use_sliding_window": True, "layer_types": ["sliding_attention"] * 4}


@pytest.mark.parametrize(
    ("model_type", "changes", "problem"),
    [
        ("mistral", {"sliding_window": 0}, "sliding_window is 0, but must be null or a positive number"),
        ("mistral", {"sliding_window": True}, "sliding_window is True"),
        ("mistral", {"layer_types": ["full_attention"] * 4}, "layer_types names other layers than sliding_window"),
        ("qwen2", {**SLIDES, "sliding_window": 0}, "sliding_window is 0"),
        ("qwen2", {**SLIDES, "layer_types": ["full_attention"] * 3}, "layer_types has 3 entries"),
        ("qwen3", {**SLIDES, "layer_types": "all"}, "layer_types is 'all'"),
        ("qwen3", {**SLIDES, "layer_types": ["linear_attention"] * 4}, r"layer_types\[0\] is 'linear_attention'"),
        ("qwen3", {**SLIDES, "use_sliding_window": False}, "but no window is in force"),
        ("qwen3", {"max_window_layers": None, "use_sliding_window": True}, "max_window_layers is None"),
        ("granite", {"residual_multiplier": 0}, "residual_multiplier is 0, but must be a positive number"),
        ("granite", {"logits_scaling": float("nan")}, "logits_scaling is nan"),
        ("granite", {"attention_multiplier": "1"}, "attention_multiplier is '1'"),
        ("smollm3", {"no_rope_layers": [1]}, "no_rope_layers must be a list of 4 numbers"),
        ("smollm3", {"no_rope_layers": None, "no_rope_layer_interval": 0}, "no_rope_layer_interval is 0"),
        ("gemma2", {}, "its norms come after attention"),
        ("olmo3", {}, "its norms come after attention"),
        ("cohere", {}, "a layer has one sync point already"),
        ("mixtral", {}, "it is a mixture of experts"),
        ("something", {"num_local_experts": 4}, r"it is a mixture of experts \(num_local_experts\)"),
        ("granitemoehybrid", {}, "some of its layers have no attention"),
        ("phi3", {}, "its projections are fused into one tensor"),
        ("nobody_knows", {}, "which ladderize does not convert; model_type must be one of llama, mistral"),
        (["llama"], {}, "which ladderize does not convert"),
    ],
)  # fmt: skip
def test_bad_configs(model_type, changes, problem):
    config = config_json("llama") | {"model_type": model_type}
    if str(model_type) in VARIANTS:
        config = config_json(model_type, sliding_window=5) if model_type == "mistral" else config_json(model_type)
    with pytest.raises(UserError, match=problem):
        check_config(config | changes)
