"""Quantised checkpoints: they pass through a conversion, are checked, run, and are refused where they cannot."""

import contextlib
import importlib.util
import json
import re
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from ladderize import convert_checkpoint, load
from ladderize.convert.recipe import Recipe
from ladderize.errors import UserError
from tests.helpers import (
    FAMILIES,
    NORMED_SUMS,
    all_tensors,
    edit_json,
    edit_tensors,
    invoke_json,
    invoke_well,
    listing,
    random_ids,
    refusal,
    save_llama,
)
from tests.oracle import Oracle
from tests.quantised import FORMATS, SIZES, dequantised, save_quantised

BOTH = Recipe(ladder="1:", spd="0:2", sync_tp_size=2)
INSTALLED = importlib.util.find_spec("compressed_tensors") is not None  # the dev extra has it
needs_library = pytest.mark.skipif(not INSTALLED, reason="compressed-tensors is not installed: pip install -e '.[dev]'")
RUNNABLE = ("int8", "FP8 dynamic", "W4A16")


@pytest.fixture(scope="module")
def sources(tmp_path_factory):
    """``sources(name)``: a folder of one of FORMATS, which is only read."""
    made: dict[str, Path] = {}

    def source(name):
        if name not in made:
            made[name] = save_quantised(tmp_path_factory.mktemp("source"), name, seed=int(torch.randint(1 << 30, ())))
        return made[name]

    return source


@pytest.mark.parametrize("name", FORMATS)
def test_there_and_back(sources, tmp_path, name):
    """Weights are linked, the config is kept word for word, and --dense gives the original."""
    source = sources(name)
    words = ("--ladder", "1:", "--spd", "0:2", "--sync-tp-size", "2")
    report = invoke_json("convert", source, tmp_path / "out", *words)
    assert report["weights"] == {"linked": 1}
    runs = INSTALLED and name in (*RUNNABLE, "FP8 static")
    assert (report["verified"]["forward"] == "finite") == runs  # of others class and tensors alone are verified
    config, before = (json.loads((folder / "config.json").read_text()) for folder in (tmp_path / "out", source))
    assert config["quantization_config"] == before["quantization_config"] == FORMATS[name][1]
    assert config["model_type"] == "ladderized_llama"
    measured = name in ("FP8 static", "FP8 scalars", "modelopt")
    *warnings, last = report["warnings"]
    assert [("static scales" in warning) for warning in warnings] == [True] * measured
    assert "no tokenizer" in last
    convert_checkpoint(tmp_path / "out", tmp_path / "back", Recipe(dense="all"), verify=False)
    assert json.loads((tmp_path / "back" / "config.json").read_text()) == before
    for folder in ("out", "back"):
        assert (tmp_path / folder / "model.safetensors").samefile(source / "model.safetensors")


@pytest.mark.parametrize("name", ["W4A16 asymmetric", "FP8 blocks"])
def test_files_are_written_anew_byte_by_byte(sources, tmp_path, name):
    """Where tensors lack the beginning of their names, and get it."""
    source, before = tmp_path / "src", all_tensors(sources(name))
    shutil.copytree(sources(name), source)
    named = {key.removeprefix("model."): tensor for key, tensor in before.items()}
    save_file(named, source / "model.safetensors", {"format": "pt"})
    report = convert_checkpoint(source, tmp_path / "out", Recipe(ladder="all"), verify=False)
    assert report.weights == {"rewritten": 1}
    written = all_tensors(tmp_path / "out")
    assert {key: tensor.dtype for key, tensor in written.items()} == {key: t.dtype for key, t in before.items()}
    assert all(torch.equal(tensor, before[key]) for key, tensor in written.items())


def test_what_older_modelopt_writes(sources, tmp_path):
    """Its own file, and nothing in config.json."""
    source = tmp_path / "src"
    shutil.copytree(sources("modelopt"), source)
    edit_json(source / "config.json", quantization_config=None)
    stated = {"producer": {"name": "modelopt"}, "quantization": {"quant_algo": "FP8", "exclude_modules": ["lm_head"]}}
    (source / "hf_quant_config.json").write_text(json.dumps(stated))
    convert_checkpoint(source, tmp_path / "out", BOTH, verify=False)
    assert json.loads((tmp_path / "out" / "hf_quant_config.json").read_text()) == stated


@needs_library
def test_two_groups_there_and_back(sources, tmp_path):
    """transformers verifies the output, and tells where the groups are other layers' than the tensors say."""
    source = tmp_path / "src"
    shutil.copytree(sources("int8"), source)
    packed = {name: tensor for name, tensor in all_tensors(sources("W4A16")).items() if ".mlp." in name}
    edit_tensors(source, lambda t: ([t.pop(name) for name in list(t) if ".mlp." in name], t.update(packed)))
    groups = {
        name: {**FORMATS[name][1]["config_groups"]["group_0"], "format": FORMATS[name][1]["format"], "targets": targets}
        for name, targets in (("int8", ["Linear"]), ("W4A16", ["re:.*mlp.*"]))
    }
    quantised(config_groups=groups, format="mixed-precision")(source)
    report = convert_checkpoint(source, tmp_path / "out", BOTH)
    assert report.verified["forward"] == "finite"
    quantised(config_groups={**groups, "W4A16": {**groups["W4A16"], "targets": ["re:.*attn.*"]}})(source)
    with pytest.raises(UserError, match="does not load in plain transformers"):
        convert_checkpoint(source, tmp_path / "other", BOTH)


def rounded(kind):
    """What compressed-tensors does with each token that a projection reads."""

    def read(x):
        scale = x.abs().amax(-1, keepdim=True) / (127.5 if kind == "int8" else 448)
        if kind == "int8":
            return torch.clamp(torch.round(x / scale), -128, 127) * scale
        return (x / scale).to(torch.float8_e4m3fn).to(x.dtype) * scale

    return read


@pytest.mark.parametrize("recipe", [Recipe(ladder="all"), Recipe(ladder="1:", spd="all", sync_tp_size=2)], ids=str)
@pytest.mark.parametrize("name", RUNNABLE)
@needs_library
def test_transformers_computes_the_layout(sources, tmp_path, name, recipe):
    convert_checkpoint(sources(name), tmp_path / "out", recipe, verify=False)
    compare(tmp_path / "out", sources(name), name)


def compare(folder, source, name):
    """In a dropped layer each rank's part of what a projection reads is quantised by itself, as that rank would."""
    model = load(folder)
    ids = random_ids(96, 3)
    plain = dequantised(source, name)
    exact = Oracle(plain, model.config)(ids)[0]
    expected = exact if name == "W4A16" else Oracle(plain, model.config, read=rounded(name))(ids)[0]
    with torch.no_grad():
        logits = model(ids).logits
    error = (logits - expected).abs().amax((1, 2))
    if name == "W4A16":
        assert error.max() < 1e-4
        return
    # a number that lies between two steps may be rounded to the other one, and changes all tokens after it: a quarter
    # of the rows, of some models half; and a single row without a bound that holds for every model
    unrounded = (logits - exact).abs().amax((1, 2))
    assert error.quantile(0.05) < 1e-4
    assert error.mean() < 0.5 * unrounded.mean()  # of 140 models 0.12 at most
    assert unrounded.quantile(0.2) > 1e-3


@pytest.mark.parametrize("model_type", FAMILIES)
@needs_library
def test_other_families(tmp_path, model_type):
    """There, inspected, computed and back: with norms of heads, biases, windows and multipliers."""
    source = save_quantised(tmp_path / "src", "int8", seed=int(torch.randint(1 << 30, ())), model_type=model_type)
    words = ("--ladder", "1:", *(() if model_type in NORMED_SUMS else ("--spd", "all", "--sync-tp-size", "2")))
    assert invoke_json("convert", source, tmp_path / "out", *words)["verified"]["forward"] == "finite"
    shown = invoke_json("inspect", tmp_path / "out")
    assert shown["model_type"] == f"ladderized_{model_type}"
    assert shown["quantisation"].startswith("compressed-tensors ")
    compare(tmp_path / "out", source, "int8")
    invoke_well("convert", tmp_path / "out", tmp_path / "back", "--dense", "all", "--no-verify")
    config, back = (json.loads((folder / "config.json").read_text()) for folder in (source, tmp_path / "back"))
    assert back == config
    assert (tmp_path / "back" / "model.safetensors").samefile(source / "model.safetensors")


def quantised(**changes):
    """Change quantization_config; None removes a key."""

    def change(folder):
        stated = json.loads((folder / "config.json").read_text())["quantization_config"] | changes
        kept = {key: value for key, value in stated.items() if value is not None}
        edit_json(folder / "config.json", quantization_config=kept)

    return change


def tensors(change):
    return lambda folder: edit_tensors(folder, change)


def as_floats(stored):
    for name in [name for name in stored if "_proj." in name]:
        shape = stored.pop(name).shape
        stored.update({name: torch.ones(shape)} if name.endswith("_proj.weight") else {})


Q = "model.layers.0.self_attn.q_proj"
WRONG = {
    "bitsandbytes": ("int8", quantised(quant_method=None, load_in_4bit=True), "names the method 'bitsandbytes', but a"),
    "no method": ("int8", quantised(quant_method=None), "names no quant_method, but a conversion knows"),
    "companion missing": ("int8", tensors(lambda t: t.pop(f"{Q}.weight_scale")), f"{Q}.weight_scale is missing"),
    "nothing quantised": ("modelopt", tensors(as_floats), "no projection is quantised"),
    "config of floats": (
        "int8", lambda folder: edit_json(folder / "config.json", quantization_config=None), "not a tensor of a Llama"),
}  # fmt: skip


@pytest.mark.parametrize("case", WRONG)
def test_what_is_wrong(sources, tmp_path, case):
    """Inspect says beforehand what a conversion would refuse."""
    name, change, sentence = WRONG[case]
    shutil.copytree(sources(name), tmp_path / "src")
    if case in ("companion missing", "config of floats"):
        assert "refusal" not in invoke_json("inspect", tmp_path / "src")
        change(tmp_path / "src")
        assert re.search(sentence, invoke_json("inspect", tmp_path / "src")["refusal"])
    else:
        change(tmp_path / "src")
    assert re.search(sentence, refusal("convert", tmp_path / "src", tmp_path / "out", "--ladder", "all"))
    assert listing(tmp_path) == ["src"]


@pytest.mark.parametrize(
    ("name", "ranks", "sentence"),
    [
        ("FP8 blocks", 4, "weight_scale_inv has 6 groups or words of columns, which do not divide among 4 of the 4"),
        ("W4A16", 8, "down_proj.weight_.* has 12 groups or words of columns, which do not divide among 8"),
        ("int8", 8, None),
        ("W4A16", 4, None),
    ],
)
def test_groups_that_do_not_divide_a_rank(tmp_path, name, ranks, sentence):
    source = save_quantised(tmp_path / "src", name, intermediate_size=96)
    recipe = Recipe(spd="all", sync_tp_size=ranks)
    with pytest.raises(UserError, match=sentence) if sentence else contextlib.nullcontext():
        convert_checkpoint(source, tmp_path / "out", recipe, verify=False)


def test_weights_stay_as_they_are(sources, tmp_path):
    source = sources("int8")
    said = refusal("convert", source, tmp_path / "out", "--ladder", "all", "--dtype", "bfloat16")
    assert "quantised weights pass through a conversion as they are, so --dtype bfloat16" in said
    np.save(tmp_path / "ids.npy", random_ids(4, 16).numpy())
    assigning = ("--spd", "all", "--sync-tp-size", "2", "--assign", "heads", "--data", tmp_path / "ids.npy")
    assert "is quantised with" in refusal("convert", source, tmp_path / "out", *assigning)
    assert listing(tmp_path) == ["ids.npy"]


@pytest.mark.parametrize(
    "words",
    [
        ("bench", "QUANTISED", "--tp-size", "1"),
        ("sensitivity", "QUANTISED", "--data", "IDS", "--sync-tp-size", "2", "--out", "OUT"),
        ("adapt", "QUANTISED", "OUT", "--data", "IDS", "--method", "lora", "--max-steps", "1"),
        ("adapt", "LADDER", "OUT", "--distill-from", "QUANTISED", "--data", "IDS", "--method", "align"),
        ("bench", "LADDER", "QUANTISED", "--tp-size", "1"),
    ],
    ids=" ".join,
)
def test_what_does_not_run_quantised_weights(sources, tmp_path, words):
    """Of two models the quantised one is named."""
    np.save(tmp_path / "ids.npy", np.arange(3, 90))
    convert_checkpoint(save_llama(tmp_path / "plain", **SIZES), tmp_path / "ladder", Recipe(ladder="all"), verify=False)
    places = {"LADDER": tmp_path / "ladder", "QUANTISED": sources("int8"), "IDS": tmp_path / "ids.npy"}
    message = refusal(*({**places, "OUT": tmp_path / "out"}.get(word, word) for word in words))
    assert f"Error: {sources('int8')} is quantised with compressed-tensors; the runtime" in message
    assert "do not run quantised weights; `ladderize eval" in message
    assert listing(tmp_path) == ["ids.npy", "ladder", "plain"]


@pytest.mark.parametrize("name", ["modelopt", "FP8 scalars", "AWQ"])
def test_what_transformers_does_not_run(sources, name):
    """It would read some of these as floats, without their scales."""
    with pytest.raises(UserError, match="transformers (does not run|needs gptqmodel).*vllm serve` run"):
        load(sources(name))
