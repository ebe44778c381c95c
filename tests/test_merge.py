"""Adapters and their merging: an ordinary PEFT folder, the same logits merged and not, and what is refused."""

import json
import os
import shutil
import sys

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model, get_peft_model_state_dict, inject_adapter_in_model
from safetensors.torch import load_file, save_file

import ladderize
from ladderize.adapt.lora import merge_check
from ladderize.adapt.lora.config import LORA_TARGETS, LoraOptions, lora_config
from ladderize.adapt.lora.read import Adapter, read_adapter
from ladderize.adapt.lora.write import check_adapter_target, write_adapter
from ladderize.blocks import open_checkpoint
from ladderize.errors import UsageError, UserError
from ladderize.workflows import merge as merge_run
from ladderize.workflows.merge import merge
from tests import warm
from tests.helpers import LAYOUTS, SHAPE, edit_json, invoke, listing, make_model, one_sentence, random_ids

TIGHT = {"rtol": 1e-4, "atol": 5e-5}


def save_base(folder, name, *, dtype=torch.float32, shard_size="5GB", **extra):
    make_model(name, **extra).to(dtype).save_pretrained(folder, max_shard_size=shard_size)
    return folder


def adapt(base, out, config=None, *, layers=(1, 3), steps=0, **kwargs):
    """Write an adapter for ``base``: trained for some steps, or with random matrices. Returns the losses."""
    checkpoint = open_checkpoint(str(base))
    config = config or lora_config(checkpoint.config, layers, LoraOptions(rank=4))
    torch.manual_seed(0)
    model = get_peft_model(ladderize.load(base, dtype="float32"), config).train()
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer, ids, losses = torch.optim.AdamW(trained, lr=2e-2), random_ids(4, 12), []
    for _ in range(steps):
        optimizer.zero_grad()
        loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    if not steps:
        with torch.no_grad():
            for parameter in trained:
                parameter.normal_(0, 0.2)
    tensors = get_peft_model_state_dict(model)
    write_adapter(out, config, tensors, base=checkpoint, base_name=str(base), document={"method": "lora"}, **kwargs)
    return losses


def logits(base, ids, adapter=None):
    model = ladderize.load(base, dtype="float32")
    if adapter is not None:
        model = PeftModel.from_pretrained(model, adapter).eval()
    with torch.no_grad():
        return model(ids).logits


@pytest.fixture(scope="module")
def original(tmp_path_factory):
    folder = tmp_path_factory.mktemp("pair")
    adapt(save_base(folder / "base", "spd all 4", seed=3), folder / "adapter")
    return folder


@pytest.fixture
def pair(original, tmp_path):
    """A checkpoint with dropped sync points, and an adapter on two of its layers."""
    base, adapter = (shutil.copytree(original / name, tmp_path / name) for name in ("base", "adapter"))
    document = json.loads((adapter / "adaptation.json").read_text())
    edit_json(adapter / "adaptation.json", base=document["base"] | {"model": str(base)})
    return base, adapter


def ladderize_merge(adapter, out, *options):
    return invoke("merge", adapter, out, "--no-verify", *options)


# ---- the adapter ----


@pytest.mark.parametrize("name", ["ladder all", "spd all 4", "mixed"])
def test_lora_is_on_exactly_what_was_asked_for(name):
    model = make_model(name)
    config = lora_config(model.config.to_dict(), [3, 1], LoraOptions(rank=2, targets=("o_proj", "up_proj")))
    inject_adapter_in_model(config, model)
    found = {key for key, module in model.named_modules() if hasattr(module, "lora_A")}
    assert found == {f"model.layers.{layer}.{part}" for layer in (1, 3) for part in ("self_attn.o_proj", "mlp.up_proj")}
    everywhere = make_model(name)
    inject_adapter_in_model(lora_config(everywhere.config.to_dict(), range(4), LoraOptions(rank=2)), everywhere)
    assert sum(hasattr(module, "lora_A") for module in everywhere.modules()) == 4 * 7


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"rank": 0}, "--lora-rank must be an integer of at least 1, not 0"),
        ({"alpha": 0.0}, "--lora-alpha must be above 0"),
        ({"alpha": float("inf")}, "--lora-alpha must be a finite number of at least 0, not inf"),
        ({"dropout": 1.0}, "--lora-dropout must be at most 0.99, not 1.0"),
        ({"dropout": -0.1}, "--lora-dropout must be a finite number of at least 0, not -0.1"),
        ({"targets": ("q_proj", "lm_head")}, "--lora-targets: lm_head is not a projection; a layer has q_proj, k_proj"),
        ({"targets": ()}, "names no projection"),
    ],
)
def test_options_that_fit_no_model(values, message):
    with pytest.raises(UsageError, match=message):
        LoraOptions(**values)


def test_options_that_do_not_fit_this_model():
    with pytest.raises(
        UserError, match="--lora-rank 17 is larger than the smaller side of k_proj.*at most 16, or leave k_proj out"
    ):
        lora_config(SHAPE, [0], LoraOptions(rank=17))
    assert lora_config(SHAPE, [0], LoraOptions(rank=17, targets=("q_proj",))).lora_alpha == 34
    for layers in ([], [4], [-1]):
        with pytest.raises(UserError, match="the model has 0 to 3"):
            lora_config(SHAPE, layers, LoraOptions())


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
    assert document["method"] == "lora"
    assert document["base"]["model"] == str(base)
    assert document["base"]["attention_sync"] == ["dropped"] * 4
    assert "layers 1,3" in (adapter / "README.md").read_text()
    assert listing(tmp_path) == ["adapter", "base", "theirs"]


def test_names_from_a_wrapped_models_own_state_are_taken_too(pair, tmp_path):
    base, adapter = pair
    model = PeftModel.from_pretrained(ladderize.load(base), adapter)
    state = {name: tensor for name, tensor in model.state_dict().items() if "lora_" in name}
    assert all(".default." in name for name in state)
    write_adapter(
        tmp_path / "new",
        model.peft_config["default"],
        state,
        base=open_checkpoint(str(base)),
        base_name="some/model",
        document={},
        extra_files={"chat_template.jinja": "x"},
    )
    ours, theirs = (load_file(folder / "adapter_model.safetensors") for folder in (tmp_path / "new", adapter))
    assert ours.keys() == theirs.keys()
    assert "base_model: some/model" in (tmp_path / "new" / "README.md").read_text()
    assert (tmp_path / "new" / "chat_template.jinja").read_text() == "x"


def test_only_adapters_are_replaced(pair, tmp_path):
    base, adapter = pair
    with pytest.raises(UserError, match="is not empty"):
        adapt(base, adapter)
    adapt(base, adapter, layers=[0], overwrite=True)
    assert read_adapter(adapter).layers == [0]
    shutil.copytree(base, tmp_path / "other")
    with pytest.raises(UserError, match="is not an adapter.*so --overwrite does not replace it"):
        check_adapter_target(tmp_path / "other", open_checkpoint(str(base)), overwrite=True)
    with pytest.raises(UserError, match="is the source or lies inside it"):
        check_adapter_target(base / "inner", open_checkpoint(str(base)), overwrite=True)
    shutil.copytree(adapter, tmp_path / "adapter2")
    assert "is not a checkpoint" in one_sentence(ladderize_merge(adapter, tmp_path / "adapter2", "--overwrite"))


@pytest.mark.parametrize("command", [["inspect"], ["generate", "--prompt", "a"], ["convert", "OUT", "--dense"]])
def test_an_adapter_is_no_checkpoint(pair, tmp_path, command):
    name, *options = [str(tmp_path / "out") if word == "OUT" else word for word in command]
    assert "is a PEFT adapter; `ladderize merge" in one_sentence(invoke(name, pair[1], *options))


def test_targets_are_all_projections_of_a_layer():
    assert {*LORA_TARGETS} == {
        name.split(".")[-1] for name, module in make_model("dense").named_modules() if "_proj" in name
    }
    assert {"spd all 4", "same layer", "spd with biases"} <= {*LAYOUTS}


# ---- merging ----


@pytest.mark.parametrize("name", ["ladder all", "spd all 4", "same layer", "spd with biases"])
def test_lora_trains_and_merges(name, tmp_path):
    base, adapter = save_base(tmp_path / "base", name), tmp_path / "adapter"
    losses = adapt(base, adapter, layers=range(4), steps=8)
    assert losses[-1] < 0.9 * losses[0]  # 0.43 of it, and a standard deviation of 0.07
    outcome = ladderize_merge(adapter, tmp_path / "out", "--json")
    assert outcome.code == 0, outcome.stderr
    ids = random_ids(2, 9)
    without, unmerged, merged = logits(base, ids), logits(base, ids, adapter), logits(tmp_path / "out", ids)
    torch.testing.assert_close(merged, unmerged, **TIGHT)
    assert (merged - without).abs().max() > 1e-1
    document = json.loads(outcome.stdout)
    assert len(document["merged_tensors"]) == 4 * 7
    assert document["max_abs_logit_difference"] < 1e-4 * document["max_abs_logit"]
    assert (
        open_checkpoint(str(tmp_path / "out")).config["attention_sync"]
        == open_checkpoint(str(base)).config["attention_sync"]
    )
    assert listing(tmp_path) == ["adapter", "base", "out"]


def test_the_output_is_verified_and_says_what_it_is(pair, tmp_path):
    _, adapter = pair
    outcome = invoke("merge", adapter, tmp_path / "out")
    assert outcome.code == 0, outcome.stderr
    assert "merged   14 tensors in layers 1,3" in outcome.stdout
    assert (tmp_path / "out" / "adaptation.json").read_bytes() == (adapter / "adaptation.json").read_bytes()
    said = (tmp_path / "out" / "ladderize.yaml").read_text()
    assert "merged_adapter:" in said
    assert "layers: 1,3" in said
    assert invoke("inspect", tmp_path / "out").code == 0
    assert listing(tmp_path) == ["adapter", "base", "out"]


def test_tied_embeddings_and_half_precision(tmp_path):
    """What is stored is the exact sum, rounded once; everything else is the base's, bit for bit."""
    base = save_base(tmp_path / "base", "spd all 2", dtype=torch.bfloat16, tie_word_embeddings=True)
    adapt(base, tmp_path / "adapter")
    document = merge(tmp_path / "adapter", tmp_path / "out", verify=False).to_dict()
    assert 0 < document["max_abs_logit_difference"] < 2 * document["max_abs_logit_difference_of_rounding"]
    before, after = (load_file(folder / "model.safetensors") for folder in (base, tmp_path / "out"))
    matrices = load_file(tmp_path / "adapter" / "adapter_model.safetensors")
    assert before.keys() == after.keys()
    assert "lm_head.weight" not in after
    for name, stored in after.items():
        expected = before[name]
        if name in document["merged_tensors"]:
            a, b = (matrices[f"base_model.model.{name.removesuffix('.weight')}.lora_{side}.weight"] for side in "AB")
            expected = (expected.float() + 2 * b @ a).bfloat16()
            assert not torch.equal(stored, before[name])
        assert stored.dtype == torch.bfloat16
        torch.testing.assert_close(stored, expected, rtol=2**-8, atol=1e-5)
    ids = random_ids(2, 9)
    apart = (logits(base, ids, tmp_path / "adapter") - logits(tmp_path / "out", ids)).abs().max()
    assert apart < 0.1 * logits(base, ids).abs().max()


def test_files_without_adapted_tensors_are_linked(tmp_path):
    base = save_base(tmp_path / "base", "spd all 4", shard_size="40KB")
    files = sorted(path.name for path in base.glob("*.safetensors"))
    assert len(files) > 2
    adapt(base, tmp_path / "adapter", layers=[3])
    document = merge(tmp_path / "adapter", tmp_path / "out", verify=False).to_dict()
    touched = set(document["weight_files_rewritten"])
    assert 0 < len(touched) < len(files)
    for file in files:
        assert os.path.samefile(base / file, tmp_path / "out" / file) == (file not in touched)
    ids = random_ids(2, 9)
    torch.testing.assert_close(logits(tmp_path / "out", ids), logits(base, ids, tmp_path / "adapter"), **TIGHT)


@pytest.mark.parametrize("use_rslora", [False, True])
def test_patterns_of_rank_and_alpha(pair, tmp_path, use_rslora):
    config = LoraConfig(
        task_type="CAUSAL_LM",
        r=4,
        lora_alpha=3,
        target_modules=["q_proj", "o_proj", "up_proj"],
        use_rslora=use_rslora,
        rank_pattern={"q_proj": 2, "layers.1.mlp.up_proj": 6},
        alpha_pattern={"o_proj": 9, r"model\.layers\.[23]\.mlp\.up_proj": 5},
    )
    adapt(pair[0], tmp_path / "patterns", config)
    merge(tmp_path / "patterns", tmp_path / "out", verify=False)
    ids = random_ids(2, 9)
    torch.testing.assert_close(logits(tmp_path / "out", ids), logits(pair[0], ids, tmp_path / "patterns"), **TIGHT)


def test_somebody_elses_adapter_needs_its_base(pair, tmp_path):
    base, adapter = pair
    (adapter / "adaptation.json").unlink()
    assert "has no adaptation.json" in one_sentence(ladderize_merge(adapter, tmp_path / "out"))
    outcome = ladderize_merge(adapter, tmp_path / "out", "--base", base)
    assert outcome.code == 0
    assert "its shapes fit" in outcome.stderr
    assert "adaptation.json" not in listing(tmp_path / "out")


def test_a_base_that_moved(pair, tmp_path):
    base, adapter = pair
    base.rename(tmp_path / "moved")
    assert f"{base}, which {adapter} was trained on, does not exist; give its location with --base" in one_sentence(
        ladderize_merge(adapter, tmp_path / "out")
    )
    assert ladderize_merge(adapter, tmp_path / "out", "--base", tmp_path / "moved").code == 0


# ---- what is refused ----


def edit_tensors(adapter, **changes):
    path = adapter / "adapter_model.safetensors"
    tensors = load_file(path)
    for name, change in changes.items():
        key = next(key for key in tensors if name in key)
        new = change(tensors.pop(key))
        if new is not None:
            tensors[key] = new
    save_file(tensors, path, {"format": "pt"})


def set_config(**changes):
    return lambda adapter: edit_json(adapter / "adapter_config.json", **changes)


DAMAGE = {
    "no config": (
        lambda a: (a / "adapter_config.json").unlink(),
        "holds no adapter_config.json; it is not a PEFT adapter",
    ),
    "no tensors": (lambda a: (a / "adapter_model.safetensors").unlink(), "the adapter is incomplete"),
    "pickle": (
        lambda a: (a / "adapter_model.safetensors").rename(a / "adapter_model.bin"),
        "pickle weights only .*not read here",
    ),
    "truncated": (lambda a: os.truncate(a / "adapter_model.safetensors", 4000), "is truncated"),
    "no file": (shutil.rmtree, "is not a folder"),
    "other method": (set_config(peft_type="IA3"), "peft_type is 'IA3'; only LORA"),
    "DoRA": (set_config(use_dora=True), "use_dora is True, so this is not plain LoRA"),
    "bias": (set_config(lora_bias=True), "lora_bias is True"),
    "trained bias": (set_config(bias="all"), "bias is 'all'"),
    "transposed": (set_config(fan_in_fan_out=True), "fan_in_fan_out is True"),
    "whole modules": (set_config(modules_to_save=["lm_head"]), "modules_to_save is"),
    "trained tokens": (set_config(trainable_token_indices=[3]), "trainable_token_indices is"),
    "of the future": (set_config(use_magic=True), "use_magic is True, so this is not plain LoRA"),
    "changes its base": (set_config(init_lora_weights="pissa_niter_4"), "changes the base's weights too"),
    "rank": (set_config(r=0), "r and rank_pattern must give positive integers"),
    "no rank": (set_config(r=None), "r is None, but must be of type int"),
    "alpha": (set_config(lora_alpha="8"), "lora_alpha is '8', but must be of type float"),
    "alpha beyond float32": (set_config(lora_alpha=1e308), r"numbers that float32 can hold, not 1e\+308; correct it"),
    "alphas beyond float32": (set_config(alpha_pattern={"q_proj": -1e39}), r"that float32 can hold, not -1e\+39"),
    "slow pattern": (set_config(alpha_pattern={r"([\w.]+)+!": 3}), "repeats too much to be matched safely"),
    "slow targets": (set_config(target_modules=r"([\w.]+)+!"), "repeats too much to be matched safely"),
    "slow layers": (set_config(layers_pattern=[r"([\w.]+)+!"]), "repeats too much to be matched safely"),
    "pattern": (set_config(rank_pattern={"(": 3}), "is no pattern of module names"),
    "no pattern": (set_config(alpha_pattern=[3]), "alpha_pattern is .*, but must be an object"),
    "other rank": (set_config(r=5), "lora_A of .* has shape"),
    "fewer targets": (
        set_config(target_modules=["q_proj"]),
        "does not ask for .*, which adapter_model.safetensors holds",
    ),
    "shape": (
        lambda a: edit_tensors(a, o_proj=lambda t: t[:, 1:].clone()),
        r"of model.layers.1.self_attn.o_proj has shape \[4, 31\]",
    ),
    "integers": (lambda a: edit_tensors(a, o_proj=lambda t: t.int()), "should be a matrix of floats"),
    "NaN": (lambda a: edit_tensors(a, o_proj=lambda t: t * torch.nan), "holds NaN or infinity; train it again"),
    "half": (lambda a: edit_tensors(a, o_proj=lambda t: None), "of model.layers.1.self_attn.o_proj is missing"),
    "document": (lambda a: edit_json(a / "adaptation.json", base={"model": 3}), "does not say in `base`"),
    "old document": (lambda a: edit_json(a / "adaptation.json", schema_version=0), "has schema_version 0"),
    "a link out": (lambda a: (a / "metrics.jsonl").symlink_to(__file__), "metrics.jsonl is a link that leads out of"),
}


@pytest.mark.parametrize("name", DAMAGE)
def test_a_damaged_adapter(pair, tmp_path, name):
    damage, message = DAMAGE[name]
    damage(pair[1])
    with pytest.raises(UserError, match=message):
        merge(pair[1], tmp_path / "out", verify=False)
    assert {*listing(tmp_path)} <= {"adapter", "base"}


def test_lora_elsewhere_is_refused(pair, tmp_path):
    path = pair[1] / "adapter_model.safetensors"
    save_file(load_file(path) | {"base_model.model.lm_head.lora_A.weight": torch.zeros(2, 32)}, path)
    assert "holds base_model.model.lm_head.lora_A.weight, which is not LoRA on" in one_sentence(
        ladderize_merge(pair[1], tmp_path / "out")
    )


def test_other_bases_are_refused(pair, tmp_path):
    _, adapter = pair
    other = save_base(tmp_path / "weights", "spd all 4", seed=4)
    layout = save_base(tmp_path / "layout", "ladder all", seed=3)
    dense = save_base(tmp_path / "dense", "dense", seed=3)
    wide = save_base(tmp_path / "wide", "spd all 4", intermediate_size=64)
    before = listing(tmp_path)
    for model, message in {
        other: "has other weights than the checkpoint",
        layout: "was trained on the layout 4 layers: spd 0:4",
        dense: "was trained on the layout 4 layers: spd 0:4 (sync_tp_size 4), but",
        wide: "has other weights",
        tmp_path / "nothing": "does not exist",
        adapter: "is a PEFT adapter",
    }.items():
        assert message in one_sentence(ladderize_merge(adapter, tmp_path / "out", "--base", model))
    (adapter / "adaptation.json").unlink()
    assert "is dense; merge an adapter for it with PEFT's" in one_sentence(
        ladderize_merge(adapter, tmp_path / "out", "--base", dense)
    )
    outcome = ladderize_merge(adapter, tmp_path / "out", "--base", wide)
    assert "lora_B of model.layers.1.mlp.gate_proj has shape [48, 4], but [64, 4] fits" in one_sentence(outcome)
    assert listing(tmp_path) == before


def test_where_out_may_be(pair, tmp_path):
    base, adapter = pair
    before = {path: path.read_bytes() for path in sorted(tmp_path.rglob("*.*"))}
    for out in (base, base / "inner", adapter, adapter / "inner"):
        assert "is the source or lies inside it" in one_sentence(ladderize_merge(adapter, out, "--overwrite"))
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "x").touch()
    assert "is not empty" in one_sentence(ladderize_merge(adapter, tmp_path / "full"))
    assert "is not a checkpoint" in one_sentence(ladderize_merge(adapter, tmp_path / "full", "--overwrite"))
    assert ladderize_merge(adapter, " ").code == 2
    assert {path: path.read_bytes() for path in before} == before
    assert listing(tmp_path) == ["adapter", "base", "full"]


def test_values_that_do_not_fit_the_dtype(tmp_path):
    base = save_base(tmp_path / "base", "ladder all", dtype=torch.float16)
    adapt(base, tmp_path / "adapter")
    edit_tensors(tmp_path / "adapter", v_proj=lambda t: t * 1e6)
    outcome = ladderize_merge(tmp_path / "adapter", tmp_path / "out")
    assert "is too large for torch.float16; convert" in one_sentence(outcome)
    assert listing(tmp_path) == ["adapter", "base"]


# ---- when something goes wrong ----


def test_a_merge_that_adds_wrongly_writes_nothing(pair, tmp_path, monkeypatch):
    add = merge_check.add_product
    monkeypatch.setattr(merge_run, "add_product", lambda w, a, b, scaling: add(w, a, b, 1.01 * scaling))
    assert "_proj.weight is not what it should be" in one_sentence(ladderize_merge(pair[1], tmp_path / "out"))
    assert listing(tmp_path) == ["adapter", "base"]


def test_a_scaling_that_is_not_pefts_writes_nothing(pair, tmp_path, monkeypatch):
    scaling = Adapter.scaling
    monkeypatch.setattr(Adapter, "scaling", lambda self, module: 1.1 * scaling(self, module))
    assert "PEFT's logits differ by up to" in one_sentence(ladderize_merge(pair[1], tmp_path / "out"))
    assert listing(tmp_path) == ["adapter", "base"]


def test_any_other_change_writes_nothing(pair, tmp_path, monkeypatch):
    check = merge_run.check_merged

    def after_damage(adapter, base, folder, console):
        tensors = load_file(folder / "model.safetensors")
        tensors["model.layers.2.input_layernorm.weight"][0] += 1e-3
        save_file(tensors, folder / "model.safetensors")
        return check(adapter, base, folder, console)

    monkeypatch.setattr(merge_run, "check_merged", after_damage)
    assert "model.layers.2.input_layernorm.weight is not what it should be" in one_sentence(
        ladderize_merge(pair[1], tmp_path / "out")
    )
    assert listing(tmp_path) == ["adapter", "base"]


@pytest.mark.parametrize("moment", ["write_merged", "convert_checkpoint", "check_merged"])
def test_an_interrupt_leaves_nothing(pair, tmp_path, monkeypatch, moment):
    def stop(*args, **kwargs):
        raise KeyboardInterrupt

    monkeypatch.setattr(merge_run, moment, stop)
    assert ladderize_merge(pair[1], tmp_path / "deep" / "out").code == 130
    assert listing(tmp_path) == ["adapter", "base"]


def test_what_a_killed_merge_left_is_cleaned_by_the_next(pair, tmp_path):
    script = "import os, sys; from ladderize.workflows import merge; merge.check_merged = lambda *a: os._exit(9)\n"
    script += "merge.merge(sys.argv[1], sys.argv[2], verify=False)"
    assert warm.run([sys.executable, "-c", script, pair[1], tmp_path / "out"]).returncode == 9
    assert len(listing(tmp_path)) == 4  # the output, unfinished, and what was merged
    assert ladderize_merge(pair[1], tmp_path / "out").code == 0
    assert listing(tmp_path) == ["adapter", "base", "out"]


def test_too_small_a_disk_is_found_beforehand(pair, tmp_path, monkeypatch):
    monkeypatch.setattr(shutil, "disk_usage", lambda path: shutil._ntuple_diskusage(10**6, 10**6, 1000))
    assert "but only 1 kB are free there" in one_sentence(ladderize_merge(pair[1], tmp_path / "out"))
    assert listing(tmp_path) == ["adapter", "base"]
