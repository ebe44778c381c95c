"""Adapters and their merging: an ordinary PEFT folder, the same logits merged and not, and what is refused."""

import json
import os
import re
import shutil
import subprocess
import sys

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model, get_peft_model_state_dict
from safetensors.torch import load_file, save_file

import ladderize
from ladderize.adapt.lora import LORA_TARGETS, AdapterBase, add_adapters, lora_config, write_adapter
from ladderize.adapt.options import MergeOptions
from ladderize.adapt.train.merge import merge
from ladderize.checkpoint.opening import open_checkpoint
from ladderize.console import to_json
from ladderize.errors import UserError
from tests.helpers import (
    ROOT,
    STORIES,
    all_tensors,
    edit_json,
    invoke_json,
    invoke_well,
    listing,
    make_model,
    random_ids,
    refusal,
    save_llama,
)
from tests.warm import PATIENCE

TIGHT = {"rtol": 1e-4, "atol": 5e-5}


def save_base(folder, name, *, dtype=torch.float32, shard_size="5GB", **extra):
    make_model(name, **extra).to(dtype).save_pretrained(folder, max_shard_size=shard_size)
    return folder


def trained(model, scale):
    """With random changes of what is trained."""
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.add_(scale * torch.randn_like(parameter))
    return model


def adapt(base, out, config=None, *, layers=(1, 3), scale=0.2, **kwargs):
    """Write an adapter for ``base`` with random matrices; returns its tensors by their names in the model."""
    checkpoint = open_checkpoint(str(base))
    config = config or lora_config(layers, 4)
    model = trained(add_adapters(ladderize.load(base, dtype="float32"), config, seed=0), scale)
    tensors = get_peft_model_state_dict(model)
    belongs = AdapterBase.of(checkpoint, str(base))
    document = to_json({"method": "lora", "base": belongs.to_dict()})
    write_adapter(out, config, tensors, belongs, {"adaptation.json": document}, **kwargs)
    return {name.removeprefix("base_model.model."): tensor for name, tensor in tensors.items()}


def logits(base, ids, adapter=None, rows=None):
    model = ladderize.load(base, dtype="float32")
    if rows is not None:
        model.resize_token_embeddings(rows)
    if adapter is not None:
        model = PeftModel.from_pretrained(model, adapter)
    with torch.no_grad():
        return model(ids).logits


def check_same(base, adapter, out, rows=None):
    """rows: of the base that the adapter was trained on."""
    ids = random_ids(2, 9)
    without, expected, found = logits(base, ids), logits(base, ids, adapter, rows), logits(out, ids)
    torch.testing.assert_close(found, expected, **TIGHT)
    assert (found[..., : without.shape[-1]] - without).abs().max() > 1e-1


@pytest.fixture
def pair(tmp_path):
    """A checkpoint with dropped sync points, and an adapter on two of its layers."""
    base = save_base(tmp_path / "base", "spd all 4", seed=3)
    adapt(base, tmp_path / "adapter")
    return base, tmp_path / "adapter"


def refused(adapter, out, *options):
    return refusal("merge", adapter, out, "--no-verify", *options)


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
    assert "is a PEFT adapter; `ladderize merge" in refusal("inspect", adapter)


def foreign(base, out, *, rows=None, scale=0.2, **config):
    """Write an adapter as others do: PEFT saves what it has trained on ``base``, or on that with ``rows`` tokens."""
    model = ladderize.load(base, dtype="float32")
    if rows is not None:
        model.resize_token_embeddings(rows)
    model = get_peft_model(model, LoraConfig(**{"task_type": "CAUSAL_LM", "r": 3, "lora_alpha": 4, **config}))
    trained(model, scale).save_pretrained(out)


PROJECTIONS = {"target_modules": ["q_proj", "down_proj"]}
EVERYWHERE = {"target_modules": [*LORA_TARGETS, "embed_tokens", "lm_head"]}
KINDS = {
    "patterns": {
        "target_modules": ["q_proj", "o_proj", "up_proj"],
        "rank_pattern": {"q_proj": 2, "layers.1.mlp.up_proj": 6},
        "alpha_pattern": {"o_proj": 9, r"model\.layers\.[23]\.mlp\.up_proj": 5},
    },
    "a pattern": {"target_modules": r"model\.layers\.\d+\.mlp\.(up|down)_proj"},
    "DoRA": {"use_dora": True, **EVERYWHERE},
    "rsLoRA": {"use_rslora": True, "target_modules": "all-linear"},
    "some layers": {"layers_to_transform": [1, 3], "target_modules": ["up_proj"]},
    "computed from the base": {"init_lora_weights": "pissa", "target_modules": ["v_proj"]},
    "biases": {"bias": "all", "lora_bias": True, **PROJECTIONS},
    "parameters": {"target_parameters": ["mlp.up_proj.weight"], **PROJECTIONS},
    "whole modules": {"modules_to_save": ["mlp", "norm"], "target_modules": ["o_proj"]},
    "embedding": {"target_modules": ["embed_tokens", "v_proj"]},
    "head": {"target_modules": ["lm_head"]},
    "both ends": EVERYWHERE,
    "ends as one": {"ensure_weight_tying": True, **EVERYWHERE},
    "whole embedding": {"modules_to_save": ["embed_tokens"], **PROJECTIONS},
    "whole head": {"modules_to_save": ["lm_head"], **PROJECTIONS},
    "whole ends": {"modules_to_save": ["embed_tokens", "lm_head"], **PROJECTIONS},
    "whole ends as one": {"modules_to_save": ["embed_tokens"], "ensure_weight_tying": True, **PROJECTIONS},
    "LoRA and whole": {"modules_to_save": ["embed_tokens"], "target_modules": ["lm_head"]},
    "tokens": {"trainable_token_indices": [5, 40], **PROJECTIONS},
    "tokens of both ends": {"trainable_token_indices": {"embed_tokens": [5], "lm_head": [7, 8]}, **PROJECTIONS},
}
TIED_STILL = {"ends as one", "whole ends as one", "tokens"} | {
    kind for kind, config in KINDS.items() if not {"embed_tokens", "lm_head"} & {*str(config).replace("'", " ").split()}
}


def test_merged_weights_are_the_exact_sums(tmp_path):
    """Of bfloat16, rounded once; everything else is the base's, bit for bit."""
    base = save_base(tmp_path / "base", "same layer", dtype=torch.bfloat16, tie_word_embeddings=True)
    rank, alpha = (int(torch.randint(1, 9, ())) for _ in range(2))
    targets = ["q_proj", "up_proj"]
    matrices = adapt(base, tmp_path / "adapter", lora_config([0, 2], rank, alpha=alpha, targets=targets))
    document = invoke_json("merge", tmp_path / "adapter", tmp_path / "out", "--no-verify")
    before, after = (load_file(folder / "model.safetensors") for folder in (base, tmp_path / "out"))
    assert before.keys() == after.keys()
    assert len(document["replaced_tensors"]) == 2 * len(targets)
    for key, weight in before.items():
        if key in document["replaced_tensors"]:
            a, b = (matrices[f"{key.removesuffix('.weight')}.lora_{side}.weight"].double() for side in "AB")
            exact = weight.double() + alpha / rank * b @ a
            assert ((after[key].double() - exact).abs() <= 2**-8 * 1.001 * exact.abs() + 1e-6).all()
        else:
            assert torch.equal(after[key], weight)
    assert document["layout"] == document["layout_before"]


@pytest.mark.parametrize("is_tied", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_whatever_peft_merges(kind, is_tied, tmp_path):
    """The oracle is PEFT: the model that is not merged, and, where the ends are two tensors, its own merge."""
    layout = "same layer with biases" if kind == "biases" else ("dense", "every mode")[int(torch.randint(2, ()))]
    base, adapter, out = (tmp_path / name for name in ("base", "adapter", "out"))
    save_base(base, layout, shard_size="40KB", tie_word_embeddings=is_tied)
    foreign(base, adapter, **KINDS[kind])
    report = merge(MergeOptions(str(adapter), str(out), verify=False))
    check_same(base, adapter, out)
    if not is_tied:
        merged = PeftModel.from_pretrained(ladderize.load(base), adapter).merge_and_unload().state_dict()
        assert all(torch.equal(merged[name], tensor) for name, tensor in all_tensors(out).items())
    stays_tied = is_tied and kind in TIED_STILL
    assert json.loads((out / "config.json").read_text())["tie_word_embeddings"] == stays_tied
    assert ("lm_head.weight" in report.replaced_tensors) <= (not stays_tied)
    before, after = (json.loads((f / "model.safetensors.index.json").read_text()) for f in (base, out))
    if is_tied and not stays_tied:
        before["weight_map"]["lm_head.weight"] = before["weight_map"]["model.embed_tokens.weight"]
    assert before["weight_map"] == after["weight_map"]


ADDED = {
    "whole ends": ({"modules_to_save": ["embed_tokens", "lm_head"], **PROJECTIONS}, None),
    "projections": (PROJECTIONS, None),  # PEFT stores the resized ends
    "both ends": (EVERYWHERE, None),
    "tokens": ({"trainable_token_indices": [97, 98], **PROJECTIONS}, None),
    "no rows": (EVERYWHERE, "base_layer"),
    "one end": ({"modules_to_save": ["embed_tokens"], **PROJECTIONS}, "lm_head|original_module"),
    "rows beyond": ({"trainable_token_indices": [97, 98], **PROJECTIONS}, "base_layer"),
}


@pytest.mark.parametrize("is_tied", [False, True])
@pytest.mark.parametrize("kind", ADDED)
def test_added_tokens(kind, is_tied, tmp_path):
    config, left_out = ADDED[kind]
    base, adapter, out = (tmp_path / name for name in ("base", "adapter", "out"))
    save_base(base, "mixed", tie_word_embeddings=is_tied)
    foreign(base, adapter, rows=99, **config)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(STORIES / name, base)
        shutil.copy(STORIES / name, adapter)
    edit_json(adapter / "tokenizer_config.json", eos_token="<added>", auto_map={"AutoTokenizer": "theirs.Tokenizer"})
    if left_out:
        path = adapter / "adapter_model.safetensors"
        save_file({name: tensor for name, tensor in load_file(path).items() if not re.search(left_out, name)}, path)
        assert re.search(r"another vocabulary.*resize_token_embeddings\(99\)", refused(adapter, out))
        assert listing(tmp_path) == ["adapter", "base"]
        resized = ladderize.load(base, dtype="float32")
        resized.resize_token_embeddings(99)
        resized.save_pretrained(tmp_path / "resized")
        base = tmp_path / "resized"
        merge(MergeOptions(str(adapter), str(out), str(base), verify=False))
        check_same(base, adapter, out)
        return
    invoke_well("merge", adapter, out)
    check_same(base, adapter, out, rows=99)
    stated = json.loads((out / "config.json").read_text())
    assert stated["vocab_size"] == 99 == len(all_tensors(out)["model.embed_tokens.weight"])
    kept = json.loads((out / "tokenizer_config.json").read_text())
    assert kept["eos_token"] == "<added>"
    assert "auto_map" not in kept


MEMORY = """
import sys, torch, json
from pathlib import Path
from ladderize.adapt.options import MergeOptions
from ladderize.adapt.train.merge import merge
from ladderize.memory import resident
small, large = map(Path, sys.argv[1:])
torch.set_num_threads(1)
merge(MergeOptions(*(str(small / name) for name in ("adapter", "out", "base")), verify=False))
Path("/proc/self/clear_refs").write_text("5")  # the high-water mark begins anew
before = resident("VmRSS")
merge(MergeOptions(*(str(large / name) for name in ("adapter", "out", "base")), verify=False))
print(resident("VmHWM") - before)
"""


def test_the_model_is_never_in_memory(tmp_path):
    """Of 8 shards, the peak holds less than two and the adapter."""
    large = {"hidden_size": 512, "intermediate_size": 2048, "num_hidden_layers": 16}
    for name, sizes in {"small": {}, "large": large}.items():
        save_llama(tmp_path / name / "base", dtype=torch.bfloat16, shards=100, **sizes)
        foreign(tmp_path / name / "base", tmp_path / name / "adapter", target_modules="all-linear", scale=0.01)
    arguments = [sys.executable, "-c", MEMORY, tmp_path / "small", tmp_path / "large"]
    environment = {**os.environ, "MALLOC_MMAP_THRESHOLD_": "100000"}  # what is freed leaves the process at once
    outcome = subprocess.run(arguments, capture_output=True, text=True, cwd=ROOT, env=environment, timeout=PATIENCE)
    assert outcome.returncode == 0, outcome.stderr
    shards = [path.stat().st_size for path in (tmp_path / "large" / "base").glob("*.safetensors")]
    assert len(shards) >= 8
    adapter = (tmp_path / "large" / "adapter" / "adapter_model.safetensors").stat().st_size
    assert int(outcome.stdout) < 2 * max(shards) + adapter


def test_files_without_adapted_tensors_are_linked_and_out_says_what_it_is(tmp_path):
    base, adapter, out = save_base(tmp_path / "base", "spd all 4", shard_size="40KB"), tmp_path / "a", tmp_path / "out"
    adapt(base, adapter, layers=[3])
    (adapter / "metrics.jsonl").write_text("{}\n")
    invoke_well("merge", adapter, out)
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
        assert message in refused(adapter, tmp_path / "out", "--base", model)
    base.rename(tmp_path / "moved")
    message = f"{base}, which {adapter} was trained on, cannot be opened; give its location with --base"
    assert message in refused(adapter, tmp_path / "out")


def test_the_base_that_another_tool_names(pair, tmp_path):
    base, adapter = pair
    (adapter / "adaptation.json").unlink()
    invoke_well("merge", adapter, tmp_path / "out", "--no-verify")
    check_same(base, adapter, tmp_path / "out")
    assert "adaptation.json" not in listing(tmp_path / "out")
    for name, message in {
        "org/tiny": "org/tiny, which .* was trained on, cannot be opened; give its location with --base .*hub",
        "./gone": r"\./gone, which .* give its location with --base .*does not exist",
        None: "does not say what it was trained on; name that checkpoint with --base",
    }.items():
        edit_json(adapter / "adapter_config.json", base_model_name_or_path=name)
        assert re.search(message, refused(adapter, tmp_path / "other"))
    invoke_well("merge", adapter, tmp_path / "other", "--no-verify", "--base", base)


def edit_tensors(adapter, name, change, new_name=None):
    path = adapter / "adapter_model.safetensors"
    tensors = load_file(path)
    key = next(key for key in tensors if name in key)
    new = change(tensors[key] if new_name else tensors.pop(key))
    save_file(tensors | ({} if new is None else {new_name or key: new}), path, {"format": "pt"})


def set_config(**changes):
    return lambda adapter: edit_json(adapter / "adapter_config.json", **changes)


DAMAGE = {
    "pickle": (lambda a: (a / "adapter_model.safetensors").rename(a / "adapter_model.bin"), "pickle weights .*can run"),
    "truncated": (lambda a: os.truncate(a / "adapter_model.safetensors", 4000), "is truncated"),
    "other method": (set_config(peft_type="IA3"), "peft_type is 'IA3'; only LORA"),
    "a module": (set_config(megatron_config={"a": 1}, megatron_core="antigravity"), "megatron_config is set"),
    "other rank": (set_config(r=5), r"q_proj.lora_A.weight is F32 \[4, 32\], but .* \[5, 32\]"),
    "replicated": (set_config(layer_replication=[[0, 3], [1, 4]]), "layer_replication makes a model of other layers"),
    "left over": (lambda a: edit_tensors(a, "o_proj", torch.clone, "x.lora_A"), "only one of them has .*x.lora_A"),
    "integers": (lambda a: edit_tensors(a, "o_proj", lambda t: t.int()), r"is I32 \[4, 32\], but .* floats"),
    "half": (lambda a: edit_tensors(a, "o_proj", lambda t: None), "only one of them has .*o_proj.lora_A"),
    "NaN": (lambda a: edit_tensors(a, "o_proj", lambda t: t * torch.nan), "with its LoRA is NaN or infinite"),
    "a link out": (lambda a: (a / "metrics.jsonl").symlink_to(__file__), "metrics.jsonl is a link that leads out of"),
}


@pytest.mark.parametrize("name", DAMAGE)
def test_a_damaged_adapter(pair, tmp_path, name):
    damage, message = DAMAGE[name]
    damage(pair[1])
    with pytest.raises(UserError, match=message) as caught:
        merge(MergeOptions(str(pair[1]), str(tmp_path / "out"), verify=False))
    assert "\n" not in str(caught.value)
    assert {*listing(tmp_path)} <= {"adapter", "base"}


def test_values_that_do_not_fit_the_dtype(tmp_path):
    base = save_base(tmp_path / "base", "ladder all", dtype=torch.float16)
    adapt(base, tmp_path / "adapter", scale=1e3)
    assert "is too large for torch.float16; convert" in refused(tmp_path / "adapter", tmp_path / "o")
    assert listing(tmp_path) == ["adapter", "base"]
