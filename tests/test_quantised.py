"""Quantised checkpoints: they pass through a conversion, are checked, run, and are refused where they cannot."""

import importlib.util
import itertools
import json
import re
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file

from ladderize import convert_checkpoint, load
from ladderize.checkpoint.quantised import quantisation_of
from ladderize.checkpoint.tensors import locate_tensors
from ladderize.convert.heads import HeadMap
from ladderize.convert.plan import Changes
from ladderize.convert.recipe import Recipe
from ladderize.errors import UserError
from tests.helpers import FAMILIES, edit_json, edit_tensors, invoke, listing, random_ids, save_llama
from tests.oracle import Oracle
from tests.quantised import FORMATS, SIZES, dequantised, save_quantised

BOTH = Recipe(ladder="1:", spd="0:2", sync_tp_size=2)
INSTALLED = importlib.util.find_spec("compressed_tensors") is not None  # the dev extra has it
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
    outcome = invoke(
        *("convert", source, tmp_path / "out", "--ladder", "1:", "--spd", "0:2", "--sync-tp-size", "2", "--json")
    )
    assert outcome.code == 0, outcome.stderr
    report, body = json.loads(outcome.stdout), (tmp_path / "out" / "README.md").read_text()
    assert report["weights"] == {"linked": 1}
    runs = INSTALLED and name in (*RUNNABLE, "FP8 static")
    assert ("loading the output in plain transformers" in outcome.stderr) == runs
    assert ("the weights are not run, since transformers " in outcome.stderr) != runs
    assert (report["verified"]["forward"] == "finite") == runs
    config, before = (json.loads((folder / "config.json").read_text()) for folder in (tmp_path / "out", source))
    assert config["quantization_config"] == before["quantization_config"] == FORMATS[name][1]
    assert config["model_type"] == "ladderized_llama"
    measured = name in ("FP8 static", "FP8 scalars", "modelopt")
    assert [("static scales" in warning) for warning in report["warnings"]] == [True] * measured
    assert ("**Warning.** The static scales of activations" in body) == measured
    assert "**Quantisation.**" in body
    assert "retrain the unquantised model" in body
    assert "adapt it" not in body
    convert_checkpoint(tmp_path / "out", tmp_path / "back", Recipe(dense=True), verify=False)
    assert json.loads((tmp_path / "back" / "config.json").read_text()) == before
    for folder in ("out", "back"):
        assert (tmp_path / folder / "model.safetensors").samefile(source / "model.safetensors")


@pytest.mark.parametrize(
    ("name", "engine"), [("int8", ""), ("AWQ", "--backend vllm "), ("FP8 scalars", "--backend vllm ")]
)
def test_what_is_suggested_next(sources, tmp_path, name, engine):
    """Nothing that is always refused: what does not run in transformers here is measured in vLLM."""
    source, out = sources(name), tmp_path / "out"
    if not engine:
        pytest.importorskip("compressed_tensors")
    outcome = invoke("convert", source, out, "--ladder", "1:", "--no-verify")
    assert outcome.code == 0, outcome.stderr
    assert outcome.stdout.partition("next:\n")[2].splitlines() == [
        f"  measure it        ladderize eval {source} {out} {engine}--perplexity FILE",
        "  recover accuracy  convert and retrain the unquantised model, then quantise the result (docs/quantised.md)",
    ]
    assert f"`ladderize eval{engine and ' --backend vllm'}`" in (out / "README.md").read_text()
    back = invoke("convert", out, tmp_path / "back", "--dense", "--no-verify")
    assert "recover" not in back.stdout


def test_shards_are_written_anew_byte_by_byte(sources, tmp_path):
    source = sources("W4A16 asymmetric")
    convert_checkpoint(source, tmp_path / "out", Recipe(ladder="all", max_shard_size="50KB"), verify=False)
    shards = [load_file(path) for path in (tmp_path / "out").glob("*.safetensors")]
    assert len(shards) > 2
    found = {name: tensor for shard in shards for name, tensor in shard.items()}
    before = load_file(source / "model.safetensors")
    assert found.keys() == before.keys()
    assert all(torch.equal(found[name], before[name]) and found[name].dtype == before[name].dtype for name in before)


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("int8", "compressed-tensors int-quantized: int8 weights, one scale per channel; dynamic activations"),
        ("FP8 static", "one scale per tensor; static activations / scales of the KV cache"),
        ("W4A16", "int4 weights, one scale per 8; activations not quantised"),
        ("FP8 blocks", "fp8 with blocks: FP8 weights, one scale per 16 x 16 block; dynamic activations"),
        ("modelopt", "modelopt: FP8 weights, one scale per tensor; static activations"),
    ],
)
def test_inspect_tells_the_format(sources, name, words):
    outcome = invoke("inspect", sources(name), "--json")
    assert outcome.code == 0, outcome.stderr
    document = json.loads(outcome.stdout)
    assert words in document["quantisation"]
    assert document["parameters"] == 160_448
    assert "quantised" in invoke("inspect", sources(name)).stdout


@pytest.mark.parametrize("case", ["companion missing", "scale of another shape", "config of floats", "a stray tensor"])
def test_inspect_tells_what_a_conversion_would_refuse(sources, tmp_path, case):
    name, change, sentence = WRONG[case]
    shutil.copytree(sources(name), tmp_path / "src")
    assert "refusal" not in json.loads(invoke("inspect", tmp_path / "src", "--json").stdout)
    change(tmp_path / "src")
    outcome = invoke("inspect", tmp_path / "src", "--json")
    assert outcome.code == 0, outcome.stderr
    refusal = json.loads(outcome.stdout)["refusal"]
    assert re.search(sentence, refusal)
    assert f"Warning: convert would refuse it: {refusal}" in outcome.stderr.splitlines()


def test_what_older_modelopt_writes(sources, tmp_path):
    """Its own file, and nothing in config.json."""
    source = tmp_path / "src"
    shutil.copytree(sources("modelopt"), source)
    edit_json(source / "config.json", quantization_config=None)
    stated = {"producer": {"name": "modelopt"}, "quantization": {"quant_algo": "FP8", "exclude_modules": ["lm_head"]}}
    (source / "hf_quant_config.json").write_text(json.dumps(stated))
    convert_checkpoint(source, tmp_path / "out", BOTH, verify=False)
    assert json.loads((tmp_path / "out" / "hf_quant_config.json").read_text()) == stated


def test_of_several_groups_the_closest_target_counts():
    """As compressed-tensors has it, whatever the order of groups: a name, a regular expression, a class."""
    groups = [
        {"targets": targets, "weights": {"num_bits": bits, "strategy": "channel"}}
        for targets, bits in (
            (["Linear"], 4),
            (["re:.*mlp.*", "re:.*layers.1.*"], 8),
            (["model.layers.1.mlp.up_proj"], 2),
        )
    ]
    for order in itertools.permutations(groups):
        config = {**FORMATS["int8"][1], "config_groups": {str(number): one for number, one in enumerate(order)}}
        found = quantisation_of({"quantization_config": config})
        schemes = [
            found.scheme_of(f"model.layers.{name}")
            for name in ("0.self_attn.q_proj", "1.mlp.gate_proj", "1.mlp.up_proj")
        ]
        assert [scheme.bits for scheme in schemes] == [4, 8, 2]


@pytest.mark.skipif(not INSTALLED, reason="compressed-tensors is not installed: pip install -e '.[dev]'")
def test_two_groups_there_and_back(sources, tmp_path):
    """The class is named before the regular expression; transformers, which verifies the output, agrees."""
    source = tmp_path / "src"
    shutil.copytree(sources("int8"), source)
    packed = {
        name: tensor for name, tensor in load_file(sources("W4A16") / "model.safetensors").items() if ".mlp." in name
    }
    edit_tensors(source, lambda t: ([t.pop(name) for name in list(t) if ".mlp." in name], t.update(packed)))
    groups = {
        name: {**FORMATS[name][1]["config_groups"]["group_0"], "format": FORMATS[name][1]["format"], "targets": targets}
        for name, targets in (("int8", ["Linear"]), ("W4A16", ["re:.*mlp.*"]))
    }
    quantised(config_groups=groups, format="mixed-precision")(source)
    report = convert_checkpoint(source, tmp_path / "out", BOTH)
    assert report.verified.forward == "finite"
    quantised(config_groups={**groups, "W4A16": {**groups["W4A16"], "targets": ["re:.*attn.*"]}})(source)
    with pytest.raises(UserError, match="q_proj.weight_scale has shape"):
        convert_checkpoint(source, tmp_path / "other", BOTH)


# ---- what is computed ----


def rounded(kind):
    """What compressed-tensors does with each token that a projection reads."""

    def read(x):
        most = x.abs().amax(-1, keepdim=True)
        if kind == "int8":
            scale = most / 127.5
            return torch.clamp(torch.round(x / scale), -128, 127) * scale
        scale = most / 448
        return (x / scale).to(torch.float8_e4m3fn).to(x.dtype) * scale

    return read


@pytest.mark.parametrize(
    "recipe",
    [Recipe(ladder="all"), Recipe(spd="all", sync_tp_size=4), Recipe(ladder="1:", spd="all", sync_tp_size=2)],
    ids=["ladder", "spd", "both"],
)
@pytest.mark.parametrize("name", RUNNABLE)
@pytest.mark.skipif(not INSTALLED, reason="compressed-tensors is not installed: pip install -e '.[dev]'")
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


@pytest.mark.parametrize("name", ["int8", "FP8 dynamic"])
@pytest.mark.parametrize("model_type", FAMILIES)
@pytest.mark.skipif(not INSTALLED, reason="compressed-tensors is not installed: pip install -e '.[dev]'")
def test_other_families(tmp_path, model_type, name):
    """There, inspected, computed and back: with norms of heads, biases, windows and multipliers."""
    source = save_quantised(tmp_path / "src", name, seed=int(torch.randint(1 << 30, ())), model_type=model_type)
    outcome = invoke(
        *("convert", source, tmp_path / "out", "--ladder", "1:", "--spd", "all", "--sync-tp-size", "2", "--json")
    )
    assert outcome.code == 0, outcome.stderr
    assert json.loads(outcome.stdout)["verified"]["forward"] == "finite"
    shown = json.loads(invoke("inspect", tmp_path / "out", "--json").stdout)
    assert shown["model_type"] == f"ladderized_{model_type}"
    assert "one scale per channel; dynamic activations" in shown["quantisation"]
    compare(tmp_path / "out", source, name)
    assert invoke("convert", tmp_path / "out", tmp_path / "back", "--dense", "--no-verify").code == 0
    assert json.loads((tmp_path / "back" / "config.json").read_text()) == json.loads(
        (source / "config.json").read_text()
    )
    assert (tmp_path / "back" / "model.safetensors").samefile(source / "model.safetensors")


# ---- what is refused ----


def quantised(**changes):
    """Change quantization_config; None removes a key."""

    def change(folder):
        stated = json.loads((folder / "config.json").read_text())["quantization_config"] | changes
        kept = {key: value for key, value in stated.items() if value is not None}
        edit_json(folder / "config.json", quantization_config=kept)

    return change


def group(**changes):
    """Change the one group of compressed-tensors."""

    def change(folder):
        stated = json.loads((folder / "config.json").read_text())["quantization_config"]
        quantised(config_groups={"group_0": stated["config_groups"]["group_0"] | changes})(folder)

    return change


def tensors(change):
    return lambda folder: edit_tensors(folder, change)


Q = "model.layers.0.self_attn.q_proj"
WRONG = {
    "unknown method": ("int8", quantised(quant_method="bitsandbytes"), "names the method 'bitsandbytes', but a conv"),
    "no method": ("int8", quantised(quant_method=None), "names no method; a conversion knows"),
    "method of another type": ("int8", quantised(quant_method=["awq"]), "names the method "),
    "no object": ("int8", lambda folder: edit_json(folder / "config.json", quantization_config=[4]), "must be an obj"),
    "no groups": ("int8", quantised(config_groups={}), "has no config_groups"),
    "group of text": ("int8", quantised(config_groups={"a": "W8A8"}), "the group 'a' without weights"),
    "unknown format": ("int8", quantised(format="marlin-24"), "in the format 'marlin-24', but a conversion knows flo"),
    "sparse": ("int8", quantised(sparsity_config={"format": "sparse-bitmask"}), "has a sparsity_config"),
    "rotated": ("int8", quantised(transform_config={"config_groups": {}}), "has a transform_config"),
    "unknown strategy": ("int8", group(weights={"num_bits": 8, "strategy": "tensor_group"}), "'tensor_group'"),
    "no bits": ("int8", group(weights={"num_bits": 0, "strategy": "channel"}), "has the num_bits '0'"),
    "float of four bits": ("int8", group(weights={"num_bits": 4, "type": "float"}), "4 bits of the type 'float'"),
    "local activations": ("int8", group(input_activations={"dynamic": "local"}), "neither static nor dynamic"),
    "targets of text": ("int8", group(targets="Linear"), "targets that are no list of names"),
    "regular expression": ("int8", group(targets=["re:(a+)+$"]), "repeats too much to be matched safely"),
    "alternatives": ("int8", group(targets=["re:" + "(.|.)" * 30 + "x"]), "repeats too much"),
    "no expression": ("int8", group(targets=["re:["]), "which is none"),
    "nothing targeted": ("int8", group(targets=["re:visual.*"]), "q_proj has the tensor weight_scale, but quantiza"),
    "ignored": ("int8", quantised(ignore=[Q]), "q_proj has the tensor weight_scale, but quantization_config leaves it"),
    "companion missing": ("int8", tensors(lambda t: t.pop(f"{Q}.weight_scale")), f"{Q}.weight_scale is missing"),
    "weight missing": ("W4A16", tensors(lambda t: t.pop(f"{Q}.weight_packed")), f"{Q}.weight_packed is missing"),
    "shape missing": ("W4A16", tensors(lambda t: t.pop(f"{Q}.weight_shape")), f"{Q}.weight_shape is missing"),
    "zeros missing": ("W4A16", group(weights=FORMATS["W4A16 asymmetric"][1]["config_groups"]["group_0"]["weights"]),
                      "weight_zero_point is missing"),
    "input scale missing": ("FP8 static", tensors(lambda t: t.pop(f"{Q}.input_scale")), f"{Q}.input_scale is missing"),
    "order missing": ("GPTQ", lambda folder: (
        quantised(desc_act=True)(folder), edit_tensors(folder, lambda t: t.pop(f"{Q}.g_idx"))), f"{Q}.g_idx is mis"),
    "scale of another shape": (
        "int8", tensors(lambda t: t.update({f"{Q}.weight_scale": torch.ones(63, 1)})),
        r"q_proj.weight_scale has shape \[63, 1\], but a projection of \[64, 64\] .* asks for \[64, 1\]"),
    "blocks of another size": (
        "FP8 blocks", quantised(weight_block_size=[32, 16]), r"weight_scale_inv has shape \[4, 4\].* for \[2, 4\]"),
    "groups that do not divide": (
        "W4A16", group(weights={**FORMATS["W4A16"][1]["config_groups"]["group_0"]["weights"], "group_size": 7}),
        "config.json: group_size 7 does not divide the 64 columns of model.layers.0.self_attn.o_proj; repair"),
    "blocks that do not divide": (
        "FP8 blocks", quantised(weight_block_size=[24, 16]), "config.json: the block size 24 does not divide the 64 r"),
    "groups of another size": ("AWQ", quantised(group_size=16), r"qzeros has shape \[8, 8\].* asks for \[4, 8\]"),
    "words of another size": ("GPTQ", quantised(bits=8), r"qweight has shape \[8, 64\].* asks for \[16, 64\]"),
    "scale of another dtype": (
        "int8", tensors(lambda t: t.update({f"{Q}.weight_scale": torch.ones(64, 1, dtype=torch.int32)})),
        "weight_scale is stored as I32, but compressed-tensors int-quantized asks for F32 or F16 or BF16"),
    "weight of another dtype": (
        "FP8 dynamic", tensors(lambda t: t.update({f"{Q}.weight": torch.ones(64, 64, dtype=torch.int8)})),
        "q_proj.weight is stored as I8, but compressed-tensors float-quantized asks for F8_E4M3"),
    "mixed formats": (
        "int8", tensors(lambda t: t.update({f"{Q}.qweight": torch.ones(8, 64, dtype=torch.int32)})),
        "q_proj has the tensor qweight, which does not belong to compressed-tensors int-quantized"),
    "one layer unquantised": (
        "int8", tensors(lambda t: (t.pop(f"{Q}.weight_scale"), t.update({f"{Q}.weight": torch.ones(64, 64)}))),
        "q_proj.weight is stored as F32, but compressed-tensors int-quantized asks for I8"),
    "static scale of dynamic": (
        "int8", tensors(lambda t: t.update({f"{Q}.input_scale": torch.ones(1)})), "the tensor input_scale, which does"),
    "scale of a cache that is none": (
        "int8", tensors(lambda t: t.update({"model.layers.0.self_attn.k_scale": torch.ones(1)})),
        "self_attn.k_scale is there, but quantization_config names no scales of a cache"),
    "scale of a cache": (
        "FP8 static", tensors(lambda t: t.update({"model.layers.0.self_attn.k_scale": torch.ones(3)})),
        r"self_attn.k_scale is F32 \[3\], but a scale of the KV cache is one number"),
    "a stray tensor": ("int8", tensors(lambda t: t.update({"model.extra": torch.ones(3)})), "holds model.extra"),
    "norm quantised": (
        "int8", tensors(lambda t: t.update({"model.norm.weight": torch.ones(64, dtype=torch.int8)})),
        "model.norm.weight is stored as I8"),
    "AWQ of another kind": ("AWQ", quantised(version="gemv"), "has AWQ's version 'gemv'"),
    "GPTQ of five bits": ("GPTQ", quantised(bits=5), "has 5 bits, not 2, 3, 4 or 8"),
    "GPTQ by module": ("GPTQ", quantised(dynamic={"-:.*down.*": {}}), "has GPTQ's rules for single modules"),
    "group size of text": ("AWQ", quantised(group_size="8"), "has the group_size '8', which is not a number from 1"),
    "blocks of three": ("FP8 blocks", quantised(weight_block_size=[1, 2, 3]), r"which is not \[rows, columns\]"),
    "activation scheme": ("FP8 blocks", quantised(activation_scheme="magic"), "has the activation_scheme 'magic'"),
    "modelopt's NVFP4": ("modelopt", quantised(quant_algo="NVFP4"), "has the quant_algo 'NVFP4', but a conversion"),
    "ignored that are no names": ("modelopt", quantised(ignore=[3]), "has ignore that are no list of names"),
    "config of floats": (
        "int8", lambda folder: edit_json(folder / "config.json", quantization_config=None), "not a tensor of a Llama"),
}  # fmt: skip


@pytest.mark.parametrize("case", WRONG)
def test_what_is_wrong(sources, tmp_path, case):
    name, change, sentence = WRONG[case]
    shutil.copytree(sources(name), tmp_path / "src")
    change(tmp_path / "src")
    outcome = invoke("convert", tmp_path / "src", tmp_path / "out", "--ladder", "all")
    assert outcome.code == 1
    assert re.search(sentence, " ".join(outcome.stderr.split())), outcome.stderr
    assert "Traceback" not in outcome.stderr
    assert listing(tmp_path) == ["src"]


@pytest.mark.parametrize(
    ("name", "ranks", "sentence"),
    [
        ("FP8 blocks", 4, "k_proj is quantised in groups of 16 rows, which do not divide the 8 rows of each of the 4"),
        ("AWQ", 8, "gate_proj is quantised in groups of 8 rows, which do not divide the 12 rows of each of the 8"),
        ("W4A16", 8, "down_proj is quantised in groups of 8 columns, which do not divide the 12 columns"),
        ("int8", 8, None),
        ("W4A16", 4, None),
    ],
)
def test_groups_that_do_not_divide_a_rank(tmp_path, name, ranks, sentence):
    source = save_quantised(tmp_path / "src", name, intermediate_size=96)
    recipe = Recipe(spd="all", sync_tp_size=ranks)
    if sentence is None:
        convert_checkpoint(source, tmp_path / "out", recipe, verify=False)
        return
    with pytest.raises(UserError, match=sentence):
        convert_checkpoint(source, tmp_path / "out", recipe, verify=False)
    assert listing(tmp_path) == ["src"]


def test_weights_stay_as_they_are(sources, tmp_path):
    source = sources("int8")
    outcome = invoke("convert", source, tmp_path / "out", "--ladder", "all", "--dtype", "bfloat16")
    assert "quantised weights pass through a conversion as they are, so --dtype bfloat16" in " ".join(
        outcome.stderr.split()
    )
    others = Changes(head_map=HeadMap(2, {0: (1, 0, 3, 2, 5, 4, 7, 6)}, "of another model"))
    with pytest.raises(UserError, match="so heads cannot be reordered"):
        convert_checkpoint(source, tmp_path / "out", BOTH, others)
    others = Changes(replace=locate_tensors(source / "model.safetensors"))
    with pytest.raises(UserError, match="so tensors cannot be replaced"):
        convert_checkpoint(source, tmp_path / "out", BOTH, others)
    assert listing(tmp_path) == []


@pytest.mark.parametrize(
    "words",
    [
        ("bench", "--tp-size", "1"),
        ("generate", "--prompt", "a"),
        ("sensitivity", "--data", "TEXT", "--sync-tp-size", "2", "--out", "OUT"),
        ("spd", "OUT", "--data", "TEXT", "--sync-tp-size", "2"),
        ("adapt", "OUT", "--data", "TEXT", "--method", "full", "--max-steps", "1"),
        ("adapt", "OUT", "--data", "TEXT", "--method", "lora", "--max-steps", "1"),
    ],
    ids=" ".join,
)
def test_what_does_not_run_quantised_weights(sources, tmp_path, words):
    (tmp_path / "text.jsonl").write_text('{"text": "a b c"}\n')
    places = {"TEXT": tmp_path / "text.jsonl", "OUT": tmp_path / "out"}
    outcome = invoke(words[0], sources("int8"), *(places.get(word, word) for word in words[1:]))
    assert outcome.code == 1, outcome.stderr
    sentence = "do not run quantised weights, and adapters on int8 or FP8 ones get wrong gradients; `ladderize eval"
    assert sentence in " ".join(outcome.stderr.split())
    assert "Traceback" not in outcome.stderr
    assert listing(tmp_path) == ["text.jsonl"]


@pytest.mark.parametrize(
    "words",
    [
        ("adapt", "PLAIN", "OUT", "--distill-from", "QUANTISED", "--data", "IDS", "--method", "align"),
        ("adapt", "PLAIN", "OUT", "--distill-from", "QUANTISED", "--data", "IDS", "--max-steps", "1"),
        ("bench", "PLAIN", "QUANTISED", "--tp-size", "1"),
    ],
    ids=" ".join,
)
def test_of_two_models_the_quantised_one_is_named(sources, tmp_path, words):
    np.save(tmp_path / "ids.npy", np.arange(3, 90))
    plain = save_llama(tmp_path / "plain", **SIZES)
    convert_checkpoint(plain, tmp_path / "ladder", Recipe(ladder="all"), verify=False)
    places = {"PLAIN": tmp_path / "ladder", "QUANTISED": sources("int8"), "IDS": tmp_path / "ids.npy"}
    outcome = invoke(*({**places, "OUT": tmp_path / "out"}.get(word, word) for word in words))
    assert outcome.code == 1
    assert f"Error: {sources('int8')} is quantised with compressed-tensors; the runtime" in outcome.stderr


@pytest.mark.parametrize("name", RUNNABLE)
@pytest.mark.skipif(not INSTALLED, reason="compressed-tensors is not installed: pip install -e '.[dev]'")
def test_which_gradients_adapters_would_get(sources, tmp_path, name):
    """Why adapt refuses them: none passes through a projection of int8 or FP8. Of W4A16 they are the loss's slope."""
    convert_checkpoint(sources(name), tmp_path / "out", BOTH, verify=False)
    model = load(tmp_path / "out")
    ids = random_ids(2, 12)
    with torch.no_grad():
        model(ids)  # the first forward makes floats of the weights
    read = torch.randn(1, 64, requires_grad=True)
    assert model.requires_grad_(False).model.layers[0].mlp.gate_proj(read).requires_grad == (name == "W4A16")
    if name != "W4A16":
        return
    adapted = get_peft_model(model, LoraConfig(r=2, target_modules=["q_proj", "down_proj"], init_lora_weights=False))
    weight = adapted.base_model.model.model.layers[0].mlp.down_proj.lora_B["default"].weight
    (gradient,) = torch.autograd.grad(adapted(ids, labels=ids).loss, weight)
    losses = []
    with torch.no_grad():
        for step in (1e-2, -1e-2):
            weight += step * gradient / gradient.norm()
            losses.append(float(adapted(ids, labels=ids).loss))
            weight -= step * gradient / gradient.norm()
    assert (losses[0] - losses[1]) / 2e-2 == pytest.approx(float(gradient.norm()), rel=0.02)


@pytest.mark.parametrize("name", ["modelopt", "FP8 scalars", "AWQ"])
def test_what_transformers_does_not_run(sources, name):
    """It would read some of these as floats, without their scales."""
    with pytest.raises(UserError, match="transformers (does not run|needs gptqmodel).*vllm serve` run"):
        load(sources(name))
