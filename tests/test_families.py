"""Families of models: their descriptions against transformers' own classes."""

import json
import math

import numpy as np
import pytest
import torch
from peft import LoraConfig, get_peft_model
from peft.utils import constants
from transformers import AutoConfig, AutoModelForCausalLM

from ladderize.checkpoint.config import check_config, expected_tensors, head_dim, kv_head_count
from ladderize.convert.pipeline import convert_checkpoint
from ladderize.convert.recipe import Recipe
from ladderize.errors import UserError
from ladderize.families.registry import decoder_of, family_of
from ladderize.families.supported import SUPPORTED
from ladderize.modeling import load
from tests.helpers import (
    FAMILIES,
    NORMED_SUMS,
    SHAPE,
    invoke_json,
    invoke_well,
    make_model,
    random_ids,
    save_llama,
    training_command,
)
from tests.oracle import Oracle

SIZES = {**SHAPE, "head_dim": 8}
TOLERANCE = {"rtol": 1e-4, "atol": 1e-4}
WINDOW, KINDS = {"use_sliding_window": True, "sliding_window": 5}, ("sliding_attention", "full_attention")
# model_type -> what its configs may say beside sizes
VARIANTS = {
    "llama": [{}, {"attention_bias": True, "mlp_bias": True}],
    "mistral": [{"sliding_window": 5}, {"sliding_window": None, "tie_word_embeddings": True}],
    "qwen2": [{}, {**WINDOW, "max_window_layers": 2}, {**WINDOW, "layer_types": [*KINDS, *reversed(KINDS)]}],
    "qwen3": [{}, {"attention_bias": True}, {**WINDOW, "max_window_layers": 1}],
    "granite": [
        {"embedding_multiplier": 3.0, "attention_multiplier": 0.3, "residual_multiplier": 0.2, "logits_scaling": 4.0},
        {"attention_bias": True, "mlp_bias": True},
    ],
    "smollm3": [{}, {**WINDOW, "no_rope_layers": [1, 0, 0, 1], "tie_word_embeddings": False}],
    "seed_oss": [{}, {"attention_bias": False, "attention_out_bias": True, "mlp_bias": True}],
    "ministral": [
        {"sliding_window": 5},
        {"sliding_window": 5, "layer_types": [*KINDS, *KINDS]},
        {"sliding_window": None},
    ],
    "cwm": [{"sliding_window": 5}, {"sliding_window": 5, "layer_types": [*KINDS, *reversed(KINDS)]}],
    "gemma3_text": [
        {"sliding_window": 5},
        {"sliding_window": 5, "layer_types": [*KINDS, *KINDS], "attention_bias": True, "tie_word_embeddings": False},
    ],
    "phi3": [{"sliding_window": 5}, {"tie_word_embeddings": True}],
    "exaone4": [
        {"sliding_window": 5},
        {"sliding_window": 5, "layer_types": [*KINDS, *KINDS], "sliding_window_pattern": "LGLG"},
        {"sliding_window": None, "layer_types": [KINDS[1]] * 4},
    ],
    "glm": [{}, {"attention_bias": False, "tie_word_embeddings": True}],
    "glm4": [{}, {"attention_bias": False}],
}
CASES = [(model_type, extra) for model_type, variants in VARIANTS.items() for extra in variants]


def config_json(model_type: str, **extra: object) -> dict[str, object]:
    return AutoConfig.for_model(model_type, **{**SIZES, **extra}).to_dict()


def test_every_family_is_tested():
    assert set(VARIANTS) == {"llama", *FAMILIES} == {family.model_type for family in SUPPORTED}


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
    own = "config" if model_type in ("mistral", "phi3") else None
    near = [getattr(layer, "is_sliding", True) for layer in attentions]
    windows = [getattr(layer.config if own else layer, "sliding_window", None) for layer in attentions]
    assert list(decoder.windows) == [window if is_near else None for window, is_near in zip(windows, near, strict=True)]
    rotates = [getattr(layer, "use_rope", True) for layer in attentions]
    if model_type == "exaone4":
        rotates = [window is None or is_near for window, is_near in zip(windows, near, strict=True)]
    assert list(map(bool, rotates)) == list(map(bool, decoder.rope))
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
    known["rope_theta"] = known["rope_parameters"].get("rope_theta", complete["rope_theta"])
    for key, value in complete.items():
        if key in known and known[key] is not None and key not in ("sliding_window", "no_rope_layers"):
            assert value == known[key], key
    assert kv_head_count(stated) == kv_head_count(known)


@pytest.mark.parametrize("model_type", ["llama", *FAMILIES])
def test_to_a_layout_and_back(model_type, tmp_path):
    """Verified by a stranger without ladderize; dense again it is the source, byte for byte."""
    save_llama(tmp_path / "src", model_type=model_type)
    recipe = Recipe(ladder="1:") if model_type in NORMED_SUMS else Recipe(ladder="1:", spd="0:2", sync_tp_size=2)
    report = convert_checkpoint(tmp_path / "src", tmp_path / "out", recipe)
    prefix = family_of({"model_type": model_type}).class_prefix
    assert report.verified["model_class"] == f"Ladderized{prefix}ForCausalLM"
    model, ids = load(tmp_path / "out"), random_ids(1, 9)
    expected, _ = Oracle(model.state_dict(), model.config)(ids)
    torch.testing.assert_close(model(ids).logits, expected, **TOLERANCE)
    model.save_pretrained(tmp_path / "again")
    code = [{path.name for path in (tmp_path / name).glob("*.py")} for name in ("out", "again")]
    assert code[0] == code[1]
    assert invoke_json("inspect", tmp_path / "out")["model_type"] == f"ladderized_{model_type}"
    back = convert_checkpoint(tmp_path / "out", tmp_path / "back", Recipe(dense="all"), verify=False)
    assert (back.layout, back.weights) == ("4 layers: dense", {"linked": 1})
    for name in ("config.json", "model.safetensors"):
        before, after = ((tmp_path / folder / name).read_bytes() for folder in ("src", "back"))
        assert before == after or json.loads(before) == json.loads(after)


@pytest.mark.parametrize("model_type", ["mistral", "qwen2", "qwen3"])  # PEFT has no default for the others
def test_peft_adapts_what_it_adapts_in_the_dense_model(model_type):
    targets = constants.TRANSFORMERS_MODELS_TO_LORA_TARGET_MODULES_MAPPING[model_type]
    model = get_peft_model(make_model("mixed", model_type=model_type), LoraConfig(r=2))
    adapted = {name.rpartition(".")[2] for name, module in model.named_modules() if hasattr(module, "lora_A")}
    assert adapted == set(targets)


@pytest.fixture(scope="module", params=FAMILIES)
def place(request, tmp_path_factory):
    """Of a family: a dense model, one of a layout, and ids to train and measure on."""
    folder = tmp_path_factory.mktemp(request.param)
    save_llama(folder / "dense", model_type=request.param)
    recipe = Recipe(ladder="0,2") if request.param in NORMED_SUMS else Recipe(spd="0,2", sync_tp_size=2)
    convert_checkpoint(folder / "dense", folder / "spd", recipe, verify=False)
    np.save(folder / "ids.npy", np.random.default_rng(0).integers(3, SHAPE["vocab_size"], (24, 16)))
    return folder


def is_normed(place):
    return json.loads((place / "dense" / "config.json").read_text())["model_type"] in NORMED_SUMS


def test_commands_that_train(place, tmp_path):
    """The output is of the family, and another model. ``spd`` groups heads, aligns, and distils blocks, too."""
    methods = ("full", "lora") if is_normed(place) else ("full", "lora", "spd")
    for method in methods:
        invoke_well(*training_command(method, place, tmp_path / method))
    invoke_well("merge", tmp_path / "lora", tmp_path / "merged", "--no-verify")
    before, ids = load(place / "spd"), random_ids(1, 12)
    for name in ("full", "merged", *methods[2:]):
        model = load(tmp_path / name)
        assert model.config.model_type == before.config.model_type
        with torch.no_grad():
            found, (expected, _) = model(ids).logits, Oracle(model.state_dict(), model.config)(ids)
        torch.testing.assert_close(found, expected, **TOLERANCE)
        assert not torch.equal(found, before(ids).logits)


def test_commands_that_measure(place, tmp_path):
    """The perplexity of a model as a whole, and layer by layer, is one number."""
    data = ("--seq-len", 16)
    table = tmp_path / "sensitivity.json"
    ranks = () if is_normed(place) else ("--sync-tp-size", 2)
    invoke_well("sensitivity", place / "dense", "--data", place / "ids.npy", *data, *ranks, "--out", table)
    more = ("--perplexity", place / "ids.npy", *data, "--dtype", "float32")
    (model,) = invoke_json("eval", place / "dense", *more)["models"]
    perplexity = model["ladderize"]["perplexity"]["perplexity"]
    assert math.log(perplexity) == pytest.approx(json.loads(table.read_text())["dense_nll"], rel=1e-5)


SLIDES = {"use_sliding_window": True, "layer_types": ["sliding_attention"] * 4}


@pytest.mark.parametrize(
    ("model_type", "changes", "problem"),
    [
        ("mistral", {"sliding_window": 0}, "sliding_window is 0, but must be null or a positive number"),
        ("mistral", {"layer_types": ["full_attention"] * 4}, "layer_types names other layers than sliding_window"),
        ("qwen3", {**SLIDES, "layer_types": ["linear_attention"] * 4}, "layer_types has 'linear_attention'"),
        ("qwen3", {**SLIDES, "use_sliding_window": False}, "but no window is in force"),
        ("granite", {"residual_multiplier": 0}, "residual_multiplier is 0, but must be a positive number"),
        ("smollm3", {"no_rope_layers": [1]}, "no_rope_layers must be a list of 4 numbers"),
        ("opt", {}, "which ladderize does not convert .docs/models.md says why.*must be one of llama, mistral"),
        ("mixtral", {"num_local_experts": 8}, "a mixture of experts; arXiv 2511.11505 shows"),
        ("olmo2", {}, "every rank would wait before attention"),
        ("gemma3", {"text_config": {}}, "has a text model inside; save that alone first"),
        ("gemma3_text", {"final_logit_softcapping": 30.0}, "final_logit_softcapping is 30.0, which is not supported"),
        ("exaone4", {"layer_types": None, "sliding_window_pattern": "LLLG"}, "sliding_window_pattern is 'LLLG'"),
    ],
)  # fmt: skip
def test_bad_configs(model_type, changes, problem):
    config = config_json("llama") | {"model_type": model_type}
    if model_type in VARIANTS:
        config = config_json(model_type, sliding_window=5) if model_type == "mistral" else config_json(model_type)
    with pytest.raises(UserError, match=problem):
        check_config(config | changes)
