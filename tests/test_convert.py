"""ladderize convert on sources of all kinds."""

import contextlib
import hashlib
import json
import os
import shutil
from pathlib import Path

import pytest
import torch

from ladderize import convert_checkpoint, load
from ladderize.checkpoint.opening import read_checkpoint, read_config
from ladderize.checkpoint.reading import INDEX
from ladderize.convert.pipeline import split_front_matter
from ladderize.convert.recipe import Recipe, read_recipe
from ladderize.errors import UserError
from ladderize.layout import Layout, LayoutError
from ladderize.runtime.shards import check_runnable
from tests.helpers import (
    BIASES,
    all_tensors,
    change_json,
    edit_json,
    edit_tensors,
    fresh_rng,
    invoke_json,
    invoke_well,
    listing,
    save_llama,
)

LADDER = Recipe(ladder="2:")


def fingerprint(folder: Path) -> dict[str, str]:
    """Every file below a folder with its hash: to show that a source was not touched."""
    files = [path for path in sorted(folder.rglob("*")) if path.is_file()]
    return {str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest() for path in files}


@pytest.mark.parametrize("shards", [pytest.param(1, marks=pytest.mark.own_process), 3])
def test_weights_are_linked_and_verified(tmp_path, shards):
    source = save_llama(tmp_path / "src", shards=shards)
    if shards > 1:
        change_json(source / INDEX, lambda index: index["metadata"].update(made_by="somebody"))
    before = fingerprint(source)
    report = invoke_json("convert", source, tmp_path / "out", "--ladder", "2:", "--spd", "1", "--sync-tp-size", "2")
    assert shards == 1 or (tmp_path / "out" / INDEX).read_bytes() == (source / INDEX).read_bytes()
    assert report["verified"]["forward"] == "finite"
    assert report["verified"]["model_class"] == "LadderizedLlamaForCausalLM"
    assert len(report["weight_files"]) == shards
    assert report["weights"] == {"linked": shards}
    for name in report["weight_files"]:
        assert (tmp_path / "out" / name).samefile(source / name)
    assert fingerprint(source) == before
    assert listing(tmp_path) == ["out", "src"]
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config["attention_sync"] == ["blocking", "dropped", "overlapped", "overlapped"]
    assert config["mlp_sync"] == ["blocking", "overlapped", "overlapped", "blocking"]
    assert config["sync_tp_size"] == 2


@pytest.mark.parametrize(
    ("recipe", "copy", "how"),
    [(LADDER, True, "copied"), (Recipe(ladder="2:", dtype="float32"), False, "linked")],  # that dtype is there already
)
def test_unchanged_weights(llama, tmp_path, recipe, copy, how):
    assert convert_checkpoint(llama, tmp_path / "out", recipe, copy=copy, verify=False).weights == {how: 1}
    source, out = llama / "model.safetensors", tmp_path / "out" / "model.safetensors"
    assert out.samefile(source) == (how == "linked")
    assert out.read_bytes() == source.read_bytes()


def test_another_file_system_gets_copies(llama):
    shm = Path("/dev/shm")
    if not shm.is_dir() or shm.stat().st_dev == llama.stat().st_dev:
        pytest.skip("no second file system")
    out = shm / f"ladderize-test-{os.getpid()}"
    try:
        assert convert_checkpoint(llama, out, LADDER, verify=False).weights == {"copied": 1}
        assert (out / "model.safetensors").read_bytes() == (llama / "model.safetensors").read_bytes()
    finally:
        shutil.rmtree(out, ignore_errors=True)


@pytest.mark.parametrize(("shards", "dtype"), [(1, "float16"), (3, "bfloat16")])
def test_weights_are_rewritten(tmp_path, shards, dtype):
    source = save_llama(tmp_path / "src", shards=shards)
    report = convert_checkpoint(source, tmp_path / "out", Recipe(ladder="2:", dtype=dtype), verify=False)
    assert report.weights == {"rewritten": len(report.weight_files)}
    expected, found = all_tensors(source), all_tensors(tmp_path / "out")
    assert set(found) == set(expected)
    for name, tensor in expected.items():
        assert torch.equal(found[name], tensor.to(getattr(torch, dtype)))
    if shards > 1:
        index = json.loads((tmp_path / "out" / "model.safetensors.index.json").read_text())
        assert index["metadata"]["total_size"] == sum(t.nbytes for t in found.values())
        assert set(index["weight_map"].values()) == set(report.weight_files)
    assert load(tmp_path / "out").dtype == getattr(torch, dtype)


@pytest.mark.parametrize(("dtype", "value"), [("float16", 1e5), ("bfloat16", -3.4e38)])
def test_values_too_large_for_the_dtype(llama, tmp_path, dtype, value):
    values = torch.tensor([value, float("nan"), float("inf")])
    edit_tensors(llama, lambda tensors: tensors["model.norm.weight"][3:6].copy_(values))
    with pytest.raises(UserError, match=f"model.norm.weight has values too large for {dtype}"):
        convert_checkpoint(llama, tmp_path / "out", Recipe(ladder="2:", dtype=dtype), verify=False)
    assert listing(tmp_path) == ["src"]


def test_mixed_dtypes_stay_aligned(tmp_path):
    """A 2-byte tensor with an odd number of elements must not shift 4-byte ones, here biases that become zero."""
    source, odd = save_llama(tmp_path / "src", intermediate_size=47, **BIASES), "model.layers.0.mlp.gate_proj.bias"

    def change(tensors):
        tensors[odd] = tensors[odd].half()
        for layer in range(4):
            del tensors[f"model.layers.{layer}.mlp.up_proj.bias"]

    tensors = edit_tensors(source, change)
    report = convert_checkpoint(source, tmp_path / "out", Recipe(ladder="2:"), verify=False)
    assert report.weights == {"rewritten": 1}
    infos = read_checkpoint(tmp_path / "out").tensors
    assert infos[odd].dtype == "F16"
    assert all(info.start % 4 == 0 for name, info in infos.items() if name != odd)
    written = all_tensors(tmp_path / "out")
    assert all(torch.equal(written[name], value) for name, value in tensors.items())


def test_the_authors_format(llama, tmp_path):
    edit_json(llama / "config.json", model_type="llamaLadder", ladder_layers=2, auto_map={"AutoConfig": "evil.Config"})
    (llama / "modeling_llama_ladder.py").write_text("raise SystemExit\n")
    report = convert_checkpoint(llama, tmp_path / "out", Recipe())
    assert report.layout == "4 layers: ladder 2:4"
    assert report.not_carried_over == ["modeling_llama_ladder.py"]
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert "ladder_layers" not in config
    assert config["auto_map"]["AutoConfig"] == "configuration_ladderized.LadderizedLlamaConfig"
    code = ["configuration_ladderized.py", "modeling_ladderized.py"]
    assert [p for p in listing(tmp_path / "out") if p.endswith(".py")] == code


def test_another_layout_and_back_to_dense(llama, tmp_path):
    (llama / "README.md").write_text("---\nlicense: mit\n---\n\nThe original card.\n")
    convert_checkpoint(llama, tmp_path / "a", LADDER, verify=False)
    invoke_well("convert", tmp_path / "a", tmp_path / "b", "--spd", "1:3", "--sync-tp-size", 4, "--no-verify")
    convert_checkpoint(llama, tmp_path / "from dense", read_recipe(tmp_path / "b" / "ladderize.yaml"), verify=False)
    assert (tmp_path / "from dense" / "config.json").read_bytes() == (tmp_path / "b" / "config.json").read_bytes()
    again = convert_checkpoint(tmp_path / "b", tmp_path / "again", Layout.from_layers(4, ladder=[0]), verify=False)
    assert again.layout == "4 layers: ladder 0"  # a layout, as a recipe of a file, is all of it
    assert (tmp_path / "b" / "README.source.md").read_text().endswith("The original card.\n")
    report = convert_checkpoint(tmp_path / "b", tmp_path / "c", Recipe(dense="all"))
    assert report.verified["model_class"] == "LlamaForCausalLM"
    assert json.loads((tmp_path / "c" / "config.json").read_text()) == json.loads((llama / "config.json").read_text())
    assert not list((tmp_path / "c").glob("*.py"))


def test_what_is_carried_over(llama, tmp_path):
    carried = {"tokenizer.json": b"{}", "chat_template.jinja": b"{{ messages }}", "LICENSE": b"terms\r\n"}
    carried |= {"notes/data.txt": b"\x00\xff", "USE_POLICY.md": b"policy"}
    left = ["pytorch_model.bin", "x.BIN", "pytorch_model.bin.index.json", "model.gguf", "consolidated.safetensors"]
    left += ["custom.py", "a.PY", "evil.so"]
    closed = ["original/params.json", ".cache/x", "notes/.git/config", "notes/__pycache__/x.pyc"]
    for name in (*carried, *left, *closed):
        (llama / name).parent.mkdir(parents=True, exist_ok=True)
        (llama / name).write_bytes(carried.get(name, b"x"))
    (llama / "linked").symlink_to(llama / "notes")
    report = convert_checkpoint(llama, tmp_path / "out", LADDER, verify=False)
    assert set(report.not_carried_over) == {*left, "linked/", *(f"{name.rpartition('/')[0]}/" for name in closed)}
    for name, content in carried.items():
        assert (tmp_path / "out" / name).read_bytes() == content
        assert not (tmp_path / "out" / name).samefile(llama / name)  # editing the output must not edit the source
    assert set(listing(tmp_path / "out")) == {
        *(name.split("/")[0] for name in carried),
        *("model.safetensors", "config.json", "generation_config.json", "README.md", "ladderize.yaml"),
        *("configuration_ladderized.py", "modeling_ladderized.py"),
    }
    assert listing(tmp_path / "out" / "notes") == ["data.txt"]


@pytest.mark.parametrize("name", ["tokenizer.json", "README.md", "README.source.md"])
def test_a_link_out_of_the_folder_is_not_followed(llama, tmp_path, name):
    (tmp_path / "secret").write_text("key")
    (llama / name).symlink_to(tmp_path / "secret")
    with pytest.raises(UserError, match=rf"{name} is a link that leads out of its folder"):
        convert_checkpoint(llama, tmp_path / "out", LADDER)
    assert "out" not in listing(tmp_path)


def card_of(folder):
    return split_front_matter((folder / "README.md").read_text())


@pytest.mark.parametrize(
    ("recipe", "ranks", "tags"),
    [
        (LADDER, 8, ["ladder-residual"]),
        (Recipe(spd="1", sync_tp_size=4, delayed="2:"), 4, ["delayed-tensor-parallelism", "sync-point-drop"]),
    ],
)
def test_the_card(llama, tmp_path, recipe, ranks, tags):
    card = "---\nlicense: llama3\nbase_model: meta/Base\ntags:\n- chat\n---\n# Original\n\nbody\n"
    (llama / "README.md").write_text(card)
    layout = convert_checkpoint(llama, tmp_path / "out", recipe, verify=False).layout
    front, body = card_of(tmp_path / "out")
    own = {"tags": ["chat", "ladderize", *tags], "library_name": "transformers"}
    assert front == {"license": "llama3", "base_model": "meta/Base", **own}
    assert layout in body
    assert f"\nvllm serve out --tensor-parallel-size {ranks}\n" in body
    assert (tmp_path / "out" / "README.source.md").read_bytes() == (llama / "README.md").read_bytes()


@pytest.mark.parametrize("card", ["---\nlicense: llama3\n---\nbody\n", None])
def test_a_card_of_a_second_conversion_names_the_hub_s_model(llama, tmp_path, card):
    if card is not None:
        (llama / "README.md").write_text(card)
    (llama / "LICENSE").write_text("Do as you like.")
    convert_checkpoint(llama, tmp_path / "once", LADDER, verify=False)
    edit = (tmp_path / "once" / "README.md").read_text().replace("---\n", "---\nbase_model: meta/Base\n", 1)
    (tmp_path / "once" / "README.md").write_text(edit)  # as a conversion of the hub's model leaves it
    recipe = Recipe(spd="1", sync_tp_size=4, dense="all")
    convert_checkpoint(tmp_path / "once", tmp_path / "twice", recipe, verify=False)
    own = {"base_model": "meta/Base", "library_name": "transformers", "tags": ["ladderize", "sync-point-drop"]}
    licensed = {"license": "llama3"} if card else {"license": "other", "license_link": "LICENSE"}
    assert card_of(tmp_path / "twice")[0] == {**own, **licensed}


@pytest.mark.parametrize(
    ("card", "kept"),
    [
        *((card, {}) for card in (b"", b"no front matter", b"---\nunclosed: 1\n", b"---\n- a list\n---\nbody")),
        (b"---\n: : broken\n  - [\n---\nbody", {}),
        (  # of Windows, and no UTF-8
            b"\xef\xbb\xbf---\r\nlanguage:\r\n- no\r\ndate: 2001-13-45\r\n---\r\nbody \xe9\r\n",
            {"language": ["no"], "date": "2001-13-45"},
        ),
    ],
)
def test_any_card_is_kept_and_breaks_nothing(llama, tmp_path, card, kept):
    (llama / "README.md").write_bytes(card)
    convert_checkpoint(llama, tmp_path / "out", LADDER, verify=False)
    front, _ = card_of(tmp_path / "out")
    assert {key: front.get(key) for key in ("library_name", *kept)} == {"library_name": "transformers", **kept}
    assert (tmp_path / "out" / "README.source.md").read_bytes() == card


@pytest.mark.parametrize(
    ("text", "recipe"),
    [
        ("ladder: 16:32", Recipe(ladder="16:32", dense="all")),  # YAML 1.1 reads 992 here
        ("spd: [4, '8:12', 010]\nsync_tp_size: 2", Recipe(spd="4,8:12,10", sync_tp_size=2, dense="all")),
        ("ladder: '-16:'\ndtype: float16\ndense: 8", Recipe(ladder="-16:", dtype="float16", dense="8")),
        ("dtype: float16", Recipe(dtype="float16")),
    ],
)
def test_recipes(tmp_path, text, recipe):
    (tmp_path / "r.yaml").write_text(text)
    assert read_recipe(tmp_path / "r.yaml") == recipe


def test_dry_run_writes_nothing(llama, tmp_path):
    report = invoke_json("convert", llama, tmp_path / "deep" / "out", "--ladder", "2:", "--dry-run")
    assert report["written"] is False
    assert report["weight_bytes"] == sum(tensor.nbytes for tensor in all_tensors(llama).values())
    assert listing(tmp_path) == ["src"]


def test_a_hub_snapshot(llama, tmp_path, monkeypatch):
    """The cache's layout: a snapshot of links into blobs; the output must depend on neither."""
    repo, commit = tmp_path / "hub" / "models--org--tiny", "0123456789abcdef0123456789abcdef01234567"
    for folder in ("blobs", f"snapshots/{commit}", "refs"):
        (repo / folder).mkdir(parents=True)
    (repo / "refs" / "main").write_text(commit)
    for path in llama.iterdir():
        digest = hashlib.sha256(path.read_bytes()).hexdigest()
        shutil.move(path, repo / "blobs" / digest)
        (repo / "snapshots" / commit / path.name).symlink_to(f"../../blobs/{digest}")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    report = convert_checkpoint("org/tiny@main", tmp_path / "out", LADDER)
    assert report.weights == {"linked": 1}
    assert not any(path.is_symlink() for path in (tmp_path / "out").iterdir())
    assert card_of(tmp_path / "out")[0]["base_model"] == "org/tiny"
    shutil.rmtree(tmp_path / "hub")
    load(tmp_path / "out")


@pytest.mark.parametrize(("recipe", "ranks", "sums"), [(LADDER, 8, 8), (Recipe(spd="all", sync_tp_size=4), 4, 4)])
def test_inspect(llama, tmp_path, recipe, ranks, sums):
    convert_checkpoint(llama, tmp_path / "out", recipe, verify=False)
    report, message = invoke_json("inspect", tmp_path / "out"), 32 * 4
    sent = 2 * (ranks - 1) * message // ranks
    assert (report["tp_size"], report["dense"]["reduced_bytes"]) == (ranks, 8 * message)
    told = {"reduced_bytes": sums * message, "sent_bytes": sums * sent, "blocking": 4, "exposed_sent_bytes": 4 * sent}
    assert told.items() <= report["this"].items()
    assert report["parameters"] == sum(t.numel() for t in all_tensors(llama).values())
    assert str(report["layout"]) in invoke_well("inspect", tmp_path / "out", "--layers").stdout


def test_inspect_shows_the_tp_sizes_that_run(tmp_path):
    """Of random heads: those of the rule, and with dropped sync points only the divisors of their virtual ranks."""
    rng = fresh_rng()
    kv_heads = int(rng.integers(1, 5))
    heads, inner = kv_heads * int(rng.integers(2, 5)), 12 * int(rng.integers(1, 6))
    sizes = {"hidden_size": 4 * heads, "head_dim": 4, "intermediate_size": inner}
    dense = save_llama(tmp_path / "dense", num_attention_heads=heads, num_key_value_heads=kv_heads, **sizes)
    fit = [n for n in range(1, heads + 1) if not heads % n and not inner % n and 0 in (kv_heads % n, n % kv_heads)]
    size = int(rng.choice(fit))
    convert_checkpoint(dense, tmp_path / "spd", Recipe(spd="0", sync_tp_size=size), verify=False)
    for name, expected in (("dense", fit), ("spd", [n for n in fit if size % n == 0])):
        report = invoke_json("inspect", tmp_path / name)
        assert (report["num_attention_heads"], report["num_key_value_heads"]) == (heads, kv_heads)
        assert report["tp_sizes"] == expected
        config = read_config(tmp_path / name)
        for ranks in range(1, heads + 1):  # vLLM and training say the same
            with contextlib.nullcontext() if ranks in expected else pytest.raises(LayoutError):
                check_runnable(config, Layout.from_config(config), ranks)


@pytest.mark.parametrize("recipe", [Recipe(), Recipe(dtype="float16")])
def test_an_unsaid_layout_is_recorded(llama, tmp_path, recipe):
    """The record makes the same output of the dense model, also where the layout came with the source."""
    convert_checkpoint(llama, tmp_path / "a", Recipe(ladder="1:3", spd="3", sync_tp_size=2), verify=False)
    convert_checkpoint(tmp_path / "a", tmp_path / "b", recipe, verify=False)
    again = read_recipe(tmp_path / "b" / "ladderize.yaml")
    convert_checkpoint(llama, tmp_path / "c", again, verify=False)
    for name in ("config.json", "model.safetensors"):
        assert (tmp_path / "b" / name).read_bytes() == (tmp_path / "c" / name).read_bytes()


@pytest.mark.parametrize(
    ("recipe", "message"),
    [
        (Recipe(ladder="9"), "out of range"),
        (Recipe(spd="all", sync_tp_size=3), "does not divide"),
        (Recipe(), "nothing to convert"),
    ],
)
def test_no_weights_are_downloaded_for_a_conversion_that_cannot_be(llama, tmp_path, monkeypatch, recipe, message):
    def snapshot(name, **patterns):
        assert patterns == {"allow_patterns": ["*.json"]}, "weights were fetched"
        return llama

    monkeypatch.setattr("ladderize.checkpoint.reading._snapshot", snapshot)
    with pytest.raises(ValueError if recipe.names_layers else UserError, match=message):
        convert_checkpoint("org/tiny", tmp_path / "out", recipe)
