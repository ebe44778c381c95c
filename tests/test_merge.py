"""Adapters and their merging: an ordinary PEFT folder, the same logits merged and not, and what is refused."""

import json
import os
import shutil

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model_state_dict
from safetensors.torch import load_file, save_file

import ladderize
from ladderize.adapt.lora import LORA_TARGETS, adapter_base, add_adapters, lora_config, write_adapter
from ladderize.adapt.train.merge import merge
from ladderize.blocks import open_checkpoint
from ladderize.console import to_json
from ladderize.errors import UserError
from tests.helpers import edit_json, invoke, invoke_well, listing, make_model, one_sentence, random_ids

TIGHT = {"rtol": 1e-4, "atol": 5e-5}


def save_base(folder, name, *, dtype=torch.float32, shard_size="5GB", **extra):
    make_model(name, **extra).to(dtype).save_pretrained(folder, max_shard_size=shard_size)
    return folder


def adapt(base, out, config=None, *, layers=(1, 3), scale=0.2, **kwargs):
    """Write an adapter for ``base`` with random matrices; returns its tensors by their names in the model."""
    checkpoint = open_checkpoint(str(base))
    config = config or lora_config(layers, 4)
    model = add_adapters(ladderize.load(base, dtype="float32"), config, seed=0)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.add_(scale * torch.randn_like(parameter))
    tensors = get_peft_model_state_dict(model)
    belongs = adapter_base(checkpoint, str(base))
    write_adapter(out, config, tensors, belongs, {"adaptation.json": document(belongs)}, **kwargs)
    return {name.removeprefix("base_model.model."): tensor for name, tensor in tensors.items()}


def document(base):
    return to_json({"method": "lora", "base": base.to_dict()})


def logits(base, ids, adapter=None):
    model = ladderize.load(base, dtype="float32")
    if adapter is not None:
        model = PeftModel.from_pretrained(model, adapter)
    with torch.no_grad():
        return model(ids).logits


def check_same(base, adapter, out):
    ids = random_ids(2, 9)
    without, expected, found = logits(base, ids), logits(base, ids, adapter), logits(out, ids)
    torch.testing.assert_close(found, expected, **TIGHT)
    assert (found - without).abs().max() > 1e-1


@pytest.fixture
def pair(tmp_path):
    """A checkpoint with dropped sync points, and an adapter on two of its layers."""
    base = save_base(tmp_path / "base", "spd all 4", seed=3)
    adapt(base, tmp_path / "adapter")
    return base, tmp_path / "adapter"


def ladderize_merge(adapter, out, *options):
    return invoke("merge", adapter, out, "--no-verify", *options)


# ---- the adapter ----


def test_the_folder_is_what_peft_writes(pair, tmp_path):
    base, adapter = pair
    model = PeftModel.from_pretrained(ladderize.load(base), adapter)
    model.save_pretrained(tmp_path / "theirs")
    ours, theirs = (load_file(folder / "adapter_model.safetensors") for folder in (adapter, tmp_path / "theirs"))
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)
    said, kept = (json.loads((folder / "adapter_config.json").read_text()) for folder in (adapter, tmp_path / "theirs"))
    assert said.pop("target_modules") == sorted(kept.pop("target_modules"))
    assert said == kept
    document = json.loads((adapter / "adaptation.json").read_text())
    assert (document["method"], document["base"]["model"]) == ("lora", str(base))
    assert document["base"]["attention_sync"] == ["dropped"] * 4
    assert "is a PEFT adapter; `ladderize merge" in one_sentence(invoke("inspect", adapter))


# ---- merging ----

KINDS = {
    "patterns": {
        "target_modules": ["q_proj", "o_proj", "up_proj"],
        "rank_pattern": {"q_proj": 2, "layers.1.mlp.up_proj": 6},
        "alpha_pattern": {"o_proj": 9, r"model\.layers\.[23]\.mlp\.up_proj": 5},
    },
    "DoRA": {"use_dora": True, "target_modules": list(LORA_TARGETS)},
    "whole modules": {"target_modules": ["down_proj"], "modules_to_save": ["lm_head"]},
}


@pytest.mark.parametrize(
    ("name", "dtype", "extra"),
    [
        ("dense", torch.float32, {}),
        ("every mode", torch.float32, {}),
        ("same layer", torch.bfloat16, {"tie_word_embeddings": True}),
    ],
)
def test_merged_weights_are_the_exact_sums(name, dtype, extra, tmp_path):
    """Rounded once; everything else is the base's, bit for bit."""
    base, rank = save_base(tmp_path / "base", name, dtype=dtype, **extra), int(torch.randint(1, 9, ()))
    alpha, targets = int(torch.randint(1, 9, ())), ["q_proj", "up_proj"]
    config = lora_config([0, 2], rank, alpha=alpha, targets=targets)
    matrices = adapt(base, tmp_path / "adapter", config)
    outcome = ladderize_merge(tmp_path / "adapter", tmp_path / "out", "--json")
    assert outcome.code == 0, outcome.stderr
    document = json.loads(outcome.stdout)
    before, after = (load_file(folder / "model.safetensors") for folder in (base, tmp_path / "out"))
    assert before.keys() == after.keys()
    assert len(document["replaced_tensors"]) == 2 * len(targets)
    for key, weight in before.items():
        module = key.removesuffix(".weight")
        if key in document["replaced_tensors"]:
            a, b = (matrices[f"{module}.lora_{side}.weight"].double() for side in "AB")
            exact = weight.double() + alpha / rank * b @ a
            error = 2**-8 * 1.001 if dtype == torch.bfloat16 else 1e-5
            assert ((after[key].double() - exact).abs() <= error * exact.abs() + 1e-6).all()
        else:
            assert torch.equal(after[key], weight)
    if dtype == torch.float32:
        check_same(base, tmp_path / "adapter", tmp_path / "out")
    assert document["layout"] == document["layout_before"]


@pytest.mark.parametrize("kind", KINDS)
def test_whatever_peft_merges(kind, tmp_path):
    base = save_base(tmp_path / "base", "spd with biases")
    adapt(base, tmp_path / "adapter", LoraConfig(task_type="CAUSAL_LM", r=3, lora_alpha=4, **KINDS[kind]))
    merge(tmp_path / "adapter", tmp_path / "out", verify=False)
    check_same(base, tmp_path / "adapter", tmp_path / "out")


def test_files_without_adapted_tensors_are_linked_and_out_says_what_it_is(tmp_path):
    base, adapter, out = save_base(tmp_path / "base", "spd all 4", shard_size="40KB"), tmp_path / "a", tmp_path / "out"
    adapt(base, adapter, layers=[3])
    (adapter / "metrics.jsonl").write_text("{}\n")
    outcome = invoke_well("merge", adapter, out)
    assert "merged   7 tensors" in outcome.stdout
    linked = {path.name: os.path.samefile(path, out / path.name) for path in base.glob("*.safetensors")}
    index = json.loads((out / "model.safetensors.index.json").read_text())["weight_map"]
    assert {*linked.values()} == {True, False}
    assert {file for file in linked if not linked[file]} == {v for k, v in index.items() if "3." in k and "_proj" in k}
    check_same(base, adapter, out)
    for name in ("adaptation.json", "metrics.jsonl"):
        assert (out / name).read_bytes() == (adapter / name).read_bytes()
    assert "merged_adapter:" in (out / "ladderize.yaml").read_text()
    assert listing(tmp_path) == ["a", "base", "out"]


def test_whose_base_it_is(pair, tmp_path):
    base, adapter = pair
    layout, weights = save_base(tmp_path / "layout", "spd all 2"), save_base(tmp_path / "weights", "spd all 4")
    shutil.copytree(base, tmp_path / "same weights")
    edit_json(tmp_path / "same weights" / "config.json", sync_tp_size=2)
    other = "has other weights or another layout"
    for model, message in {
        **{weights: other, layout: f"{other} (4 layers: spd 0:4 (sync_tp_size 2))", tmp_path / "same weights": other},
        **{tmp_path / "nothing": "does not exist", adapter: "is a PEFT adapter"},
    }.items():
        assert message in one_sentence(ladderize_merge(adapter, tmp_path / "out", "--base", model))
    base.rename(tmp_path / "moved")
    message = f"{base}, which {adapter} was trained on, does not exist; give its location with --base"
    assert message in one_sentence(ladderize_merge(adapter, tmp_path / "out"))
    (adapter / "adaptation.json").unlink()
    assert "its base is unknown; name the checkpoint with --base" in one_sentence(ladderize_merge(adapter, tmp_path))
    assert ladderize_merge(adapter, tmp_path / "out", "--base", tmp_path / "moved").code == 0
    assert "adaptation.json" not in listing(tmp_path / "out")


# ---- what is refused ----


def edit_tensors(adapter, name, change):
    path = adapter / "adapter_model.safetensors"
    tensors = load_file(path)
    key = next(key for key in tensors if name in key)
    new = change(tensors.pop(key))
    save_file(tensors | ({} if new is None else {key: new}), path, {"format": "pt"})


def set_config(**changes):
    return lambda adapter: edit_json(adapter / "adapter_config.json", **changes)


DAMAGE = {
    "pickle": (lambda a: (a / "adapter_model.safetensors").rename(a / "adapter_model.bin"), "pickle weights .*can run"),
    "truncated": (lambda a: os.truncate(a / "adapter_model.safetensors", 4000), "is truncated"),
    "other method": (set_config(peft_type="IA3"), "peft_type is 'IA3'; only LORA"),
    "a module": (set_config(megatron_config={"a": 1}, megatron_core="antigravity"), "megatron_config is set"),
    "other rank": (set_config(r=5), "PEFT cannot merge .*size mismatch"),
    "half": (lambda a: edit_tensors(a, "o_proj", lambda t: None), "only one of them has .*o_proj.lora_A"),
    "NaN": (lambda a: edit_tensors(a, "o_proj", lambda t: t * torch.nan), "NaNs detected in the merged weights"),
    "a link out": (lambda a: (a / "metrics.jsonl").symlink_to(__file__), "metrics.jsonl is a link that leads out of"),
}


@pytest.mark.parametrize("name", DAMAGE)
def test_a_damaged_adapter(pair, tmp_path, name):
    damage, message = DAMAGE[name]
    damage(pair[1])
    with pytest.raises(UserError, match=message) as caught:
        merge(pair[1], tmp_path / "out", verify=False)
    assert "\n" not in str(caught.value)
    assert {*listing(tmp_path)} <= {"adapter", "base"}


def test_values_that_do_not_fit_the_dtype(tmp_path):
    base = save_base(tmp_path / "base", "ladder all", dtype=torch.float16)
    adapt(base, tmp_path / "adapter", scale=1e3)
    refused = one_sentence(ladderize_merge(tmp_path / "adapter", tmp_path / "o"))
    assert "is too large for torch.float16; convert" in refused
    assert listing(tmp_path) == ["adapter", "base"]
