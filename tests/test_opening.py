"""Checkpoints as other people write them: all of ladderize computes what plain transformers computes of them."""

import json
import random
import re
import sys

import pytest
import torch
from transformers import AutoModelForCausalLM

from ladderize.blocks import window_streams
from ladderize.checkpoint.opening import read_checkpoint
from ladderize.checkpoint.tensors import fingerprint
from ladderize.convert.pipeline import convert_checkpoint
from ladderize.convert.recipe import Recipe
from ladderize.modeling import load
from ladderize.runtime.spec import checkpoint_spec
from tests.groups import make_generator
from tests.helpers import (
    LLAMA_3_ROPE,
    all_tensors,
    blocks_of,
    edit_json,
    edit_tensors,
    invoke_well,
    random_ids,
    refusal,
    save_llama,
)

CLOSE = {"rtol": 1e-4, "atol": 1e-4}
EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"
O_BIASES = [f"model.layers.{layer}.self_attn.o_proj.bias" for layer in range(4)]


def renamed(name):
    """A change that gives every tensor the name that ``name`` makes of its own."""
    return lambda tensors: [tensors.update({name(old): tensors.pop(old)}) for old in list(tensors)]


def without_prefix(name):
    return name.removeprefix("model.")


def without(*names):
    return lambda tensors: [tensors.pop(name) for name in names]


def another_head(tensors):
    tensors[HEAD] = 0.5 * tensors[EMBEDDING] + torch.randn(tensors[EMBEDDING].shape)


def one_value_apart(tensors):
    tensors[HEAD] = tensors[EMBEDDING].clone()
    tensors[HEAD][-1, -1] += 1


def old_buffers(tensors):
    for module in ("model", "model.layers.2.self_attn"):
        tensors[f"{module}.rotary_emb.inv_freq"] = torch.rand(4)


TIED = {"tie_word_embeddings": True}
BIAS = {"attention_bias": True}
ROPE = {"rope_type": "default", "rope_theta": 77.0}
TWICE = {"rope_theta": 10000.0, "rope_parameters": ROPE}
TWO_KINDS = {"rope_theta": 50.0, "rope_scaling": {"type": "linear", "factor": 2.0}, "rope_parameters": ROPE}
# name -> (of the model, of the tensors, of config.json, what convert says)
TAKEN = {
    "tied, and another head": (TIED, another_head, {}, "ties lm_head.weight to the embedding, but the two"),
    "tied, and a head with one other value": (TIED, one_value_apart, {}, "kept, untied"),
    "tied, and the same head": (TIED, lambda tensors: tensors.update({HEAD: tensors[EMBEDDING].clone()}), {}, ""),
    "tied, and the head alone": (TIED, lambda tensors: tensors.update({HEAD: tensors.pop(EMBEDDING)}), {}, ""),
    "buffers of before": ({}, old_buffers, {}, ""),
    "no prefix": ({}, renamed(without_prefix), {}, ""),
    "no prefix, tied, another head": (TIED, lambda t: (another_head(t), renamed(without_prefix)(t)), {}, "untied"),
    "two rope_thetas": ({}, dict, TWICE, "rope_theta twice, 10000.0 and 77.0"),
    "two kinds of rope": ({}, dict, TWO_KINDS, "rope_parameters twice"),
    "transformers 4": ({}, dict, {"rope_parameters": None, "rope_theta": 5e5, "rope_scaling": LLAMA_3_ROPE}, ""),
    "llamafied": (BIAS, without(*O_BIASES), {}, "asks for self_attn.o_proj.bias, which no layer"),
    "no biases at all": ({}, dict, {**BIAS, "mlp_bias": True}, "asks for self_attn.q_proj.bias, self_attn.k_proj.bias"),
}


# what the converted config.json of some holds: one thing, for readers that decide otherwise than transformers 5
ONE_VALUE = {
    "tied, and another head": {"tie_word_embeddings": False},
    "two rope_thetas": {"rope_theta": 77.0, "rope_parameters": ROPE},
    "two kinds of rope": {"rope_theta": 50.0, "rope_parameters": {"type": "linear", "factor": 2.0}},
    "transformers 4": {"rope_theta": 5e5, "rope_scaling": LLAMA_3_ROPE},
    "tied, and the head alone": TIED,
    "llamafied": BIAS,
}


def make(folder, of_model, change, of_config):
    edit_json(save_llama(folder, seed=random.randrange(1 << 30), **of_model) / "config.json", **of_config)
    edit_tensors(folder, change)
    return folder


def logits(model, ids):
    with torch.no_grad():
        return model(ids).logits


def run(folder, ids):
    generator = make_generator(folder, *ids.shape)
    with torch.inference_mode():
        return generator.model.logits(generator.read(ids)).float()


@pytest.mark.parametrize("name", TAKEN)
def test_what_transformers_loads(tmp_path, name):
    *made, remark = TAKEN[name]
    source, ids = make(tmp_path / "source", *made), random_ids(2, 9)
    plain = AutoModelForCausalLM.from_pretrained(source).eval()
    expected = logits(plain, ids)
    torch.testing.assert_close(logits(load(source), ids), expected, **CLOSE)
    torch.testing.assert_close(run(source, ids), expected, **CLOSE)
    blocks = blocks_of(source)
    (stream,) = window_streams(blocks, lambda index: blocks.layer(index, blocks.layout), ids, batch_size=2)
    torch.testing.assert_close(blocks.logits(stream), expected, **CLOSE)

    mark = fingerprint(read_checkpoint(source))
    said = invoke_well("convert", source, tmp_path / "out", "--ladder", "1:3").stderr
    assert remark in said
    how = {"trust_remote_code": True, "output_loading_info": True}
    converted, info = AutoModelForCausalLM.from_pretrained(tmp_path / "out", **how)
    assert not info["missing_keys"]
    assert fingerprint(read_checkpoint(tmp_path / "out")) == mark  # the same model, however it is written
    config, written = json.loads((tmp_path / "out" / "config.json").read_text()), all_tensors(tmp_path / "out")
    assert ONE_VALUE.get(name, {}).items() <= config.items()
    assert EMBEDDING in written
    assert name not in ONE_VALUE or (HEAD in written) != config["tie_word_embeddings"]
    assert name != "llamafied" or not any(written[bias].any() for bias in O_BIASES)
    weights = converted.state_dict()
    assert weights.keys() == plain.state_dict().keys()
    assert all(torch.equal(weights[key], value) for key, value in plain.state_dict().items())
    ours, theirs = (one.lm_head.weight is one.model.embed_tokens.weight for one in (converted, plain))  # tied
    assert ours == theirs
    torch.testing.assert_close(run(tmp_path / "out", ids), logits(converted.eval(), ids), **CLOSE)
    convert_checkpoint(tmp_path / "out", tmp_path / "dense", Recipe(dense="all"), verify=False)
    dense = AutoModelForCausalLM.from_pretrained(tmp_path / "dense").eval()
    torch.testing.assert_close(logits(dense, ids), expected, **CLOSE)


# name -> (of the model, of the tensors, of config.json, what is said)
REFUSED = {
    "untied, and no head": (TIED, dict, {"tie_word_embeddings": False}, "should set tie_word_embeddings to true"),
    "untied, and the head alone": ({}, without(EMBEDDING), {}, "should set tie_word_embeddings to true"),
    "compiled": ({}, renamed("_orig_mod.{}".format), {}, "begins with _orig_mod."),
    "biases of some layers": (BIAS, without(*O_BIASES[1:]), {}, "o_proj.bias is missing"),
    "biases that nobody asks for": (BIAS, dict, {"attention_bias": False}, "transformers would leave out"),
    "weights elsewhere": ({}, dict, {"transformers_weights": "a.safetensors"}, "rename that file to model.safetensors"),
    "labels": ({}, dict, {"num_labels": 10**9}, "num_labels is 1000000000, but must be"),
    "two of a name": ({}, lambda tensors: tensors.update({"norm.weight": torch.ones(32)}), {}, "model.norm.weight is"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_refused_with_advice(tmp_path, name):
    *made, message = REFUSED[name]
    source = make(tmp_path / "source", *made)
    for command in (["convert", source, tmp_path / "out", "--ladder", "all"], ["generate", source, "--prompt", "x"]):
        assert re.search(message, refusal(*command))
    assert not (tmp_path / "out").exists()


def stray_file(source, index):
    other = save_llama(source.with_name("other"), seed=1)
    (source / "model.safetensors").write_bytes((other / "model.safetensors").read_bytes())
    return "Warning: model.safetensors lies beside model.safetensors.index.json and its shards"


def no_layer(source, index):
    layer = f"model.layers.{random.randrange(4)}."
    listed = {name: file for name, file in index["weight_map"].items() if not name.startswith(layer)}
    edit_json(source / "model.safetensors.index.json", weight_map=listed)
    return f"model.safetensors.index.json leaves out {layer}"


@pytest.mark.parametrize("change", [stray_file, no_layer])
def test_an_index_beside_other_files(tmp_path, change):
    source, ids = save_llama(tmp_path / "source", shards=3), random_ids(1, 8)
    index = json.loads((source / "model.safetensors.index.json").read_text())
    remark = change(source, index)
    expected = logits(AutoModelForCausalLM.from_pretrained(source).eval(), ids)
    torch.testing.assert_close(run(source, ids), expected, **CLOSE)
    assert remark in invoke_well("convert", source, tmp_path / "out", "--ladder", "all").stderr
    if change is no_layer:
        written = json.loads((tmp_path / "out" / "model.safetensors.index.json").read_text())
        assert written["weight_map"] == index["weight_map"]


def test_a_checkpoint_does_not_choose_code(tmp_path, monkeypatch):
    """transformers fetches such a name from the hub, by a package of this name."""

    class Kernels:
        def __getattr__(self, name):
            raise AssertionError(f"kernels.{name} was asked for")

    source, ids = save_llama(tmp_path / "source", seed=random.randrange(1 << 30)), random_ids(1, 8)
    expected = logits(AutoModelForCausalLM.from_pretrained(source).eval(), ids)
    keys = ("_attn_implementation", "attn_implementation", "experts_implementation", "custom_pipelines")
    processor = {"auto_map": {"AutoProcessor": "attacker/code--processor.Evil"}, "name": "ü"}
    (source / "processor_config.json").write_text(json.dumps(processor))
    edit_json(source / "config.json", quantization_config={}, **dict.fromkeys(keys, "attacker/kernel"))
    monkeypatch.setitem(sys.modules, "kernels", Kernels())
    torch.testing.assert_close(logits(load(source), ids), expected)
    torch.testing.assert_close(run(source, ids), expected, **CLOSE)
    said = invoke_well("convert", source, tmp_path / "out", "--ladder", "all").stderr
    assert all(f"{key} of config.json is left out" in said for key in (*keys, "quantization_config"))
    written = (tmp_path / "out" / "config.json").read_text()
    assert "attacker" not in written
    assert "quantization_config" not in written
    assert "auto_map of processor_config.json is left out" in said  # the card of OUT has its reader trust OUT's code
    assert json.loads((tmp_path / "out" / "processor_config.json").read_text()) == {"name": "ü"}


def test_norms_that_are_stored_in_32_bits(tmp_path):
    """Beside weights in bfloat16 they are computed in bfloat16, as the config says and transformers does."""
    folder = save_llama(tmp_path / "model", dtype=torch.bfloat16)
    edit_tensors(folder, lambda own: own.update({name: own[name].float() for name in own if "norm" in name}))
    assert next(AutoModelForCausalLM.from_pretrained(folder, dtype="auto").parameters()).dtype == torch.bfloat16
    convert_checkpoint(folder, tmp_path / "ladder", Recipe(ladder="all"))
    norms = [tensor for name, tensor in all_tensors(tmp_path / "ladder").items() if "norm" in name]
    assert {norm.dtype for norm in norms} == {torch.float32}
    assert load(tmp_path / "ladder").dtype == torch.bfloat16
    assert checkpoint_spec(str(tmp_path / "ladder"), tp_size=1).dtype == "bfloat16"
    assert json.loads(invoke_well("inspect", folder, "--json").stdout)["dtype"] == "bfloat16"
