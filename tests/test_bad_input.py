"""Bad input: one sentence, the right exit code, nothing left behind."""

import json
import os
import re
import struct
from pathlib import Path
from unittest import mock

import numpy as np
import pytest
import torch

from tests.helpers import (
    change_json,
    edit_json,
    edit_tensors,
    invoke,
    invoke_well,
    listing,
    one_sentence,
    refusal,
    save_llama,
)


def refused(source, out, *options, code=1):
    return refusal("convert", source, out, *(options or ("--ladder", "2:")), code=code)


def config(**changes):
    return lambda source: edit_json(source / "config.json", **changes)


def text(name, content):
    return lambda source: (source / name).write_text(content)


def weights(content):
    """content: a function of the bytes that are there."""

    def change(source):
        path = source / "model.safetensors"
        path.write_bytes(content(path.read_bytes()))

    return change


def norm_entry(**changes):

    def change(raw):
        (length,) = struct.unpack("<Q", raw[:8])
        header = json.loads(raw[8 : 8 + length])
        header["model.norm.weight"] |= changes
        encoded = json.dumps(header).encode()
        return struct.pack("<Q", len(encoded)) + encoded + raw[8 + length :]

    return weights(change)


def tensors(change):
    return lambda source: edit_tensors(source, change)


def fifo(name):
    def change(source):
        (source / name).unlink(missing_ok=True)
        os.mkfifo(source / name)

    return change


def gone(*names):
    return lambda source: [(source / name).unlink() for name in names or listing(source)]


def reward_model(source):
    config(architectures=["LlamaForSequenceClassification"])(source)
    tensors(lambda stored: stored.update({"score.weight": stored.pop("lm_head.weight")[:1].clone()}))(source)


Q = "model.layers.1.self_attn.q_proj.weight"
DEEP = '{"a": ' + "[" * 5000 + "]" * 5000 + "}"
DAMAGE = {
    "empty folder": (gone(), "is empty"),
    "no config": (gone("config.json"), "no config.json"),
    "config is not JSON": (text("config.json", "{"), "not valid JSON"),
    "no hidden size": (config(hidden_size=None), "config.json: hidden_size is None, but must be a positive integer"),
    "heads": (config(num_key_value_heads=3), "cannot share 3 key-value heads"),
    "escape sequences": (config(model_type="\x1b[31mred\x07"), r"this is a \\x1b\[31mred\\x07, which"),
    "no model type": (config(model_type=None), "model without model_type"),
    "deeply nested": (text("config.json", DEEP), "nested too deeply"),
    "config is a FIFO": (fifo("config.json"), "config.json is not a regular file"),
    "weights are a FIFO": (fifo("model.safetensors"), "is not a regular file"),
    "rope": (config(rope_parameters={"rope_type": "magic"}), "'magic', which is not one of default, linear"),
    "pickle only": (lambda s: (s / "model.safetensors").rename(s / "pytorch_model.bin"), "only pickle weights.*save_"),
    "variant only": (
        lambda s: (s / "model.safetensors").rename(s / "model.fp16.safetensors"),
        "holds model.fp16.safetensors, but neither .* rename a single file to model.safetensors",
    ),
    "reward model": (reward_model, "config.json says LlamaForSequenceClassification, .* such as a reward model"),
    "no weights": (gone("model.safetensors"), "holds neither"),
    "truncated": (weights(lambda raw: raw[:-9]), "is truncated"),
    "eight bytes": (weights(lambda raw: b"\xff" * 8), "truncated or not a safetensors"),
    "header lies": (norm_entry(shape=[320]), "is truncated or not a safetensors file"),
    "header overlaps": (norm_entry(data_offsets=[0, 128]), "is truncated or not a safetensors file"),
    "tensor missing": (tensors(lambda t: t.pop(Q)), f"{Q} is missing"),
    "tensor misshapen": (tensors(lambda t: t.update({Q: torch.zeros(31, 32)})), r"\[31, 32\], but config.json asks"),
    "tensor too many": (tensors(lambda t: t.update(extra=torch.zeros(3))), "not a tensor of a Llama"),
    "adapter beside them": (text("adapter_config.json", "{}"), "holds a PEFT adapter"),
    "integer tensor": (tensors(lambda t: t.update({Q: torch.zeros(32, 32, dtype=torch.int8)})), "stored as I8"),
}


COMMANDS = {
    "eval": ("--perplexity", "{data}"),
    "generate": ("-p", "a"),
    "sensitivity": ("--sync-tp-size", "2", "--data", "{data}", "--out", "{out}.json"),
    "bench": ("--prompt-len", "2", "--output-len", "2"),
    "adapt": ("{out}", "--data", "{data}", "--max-steps", "1"),
    "spd": ("{out}", "--sync-tp-size", "2", "--data", "{data}"),
}


@pytest.mark.parametrize("command", COMMANDS)
@pytest.mark.parametrize(
    "name", ["truncated", "pickle only", "tensor missing", "deeply nested", "weights are a FIFO", "rope"]
)
def test_every_command_refuses_a_damaged_model(llama, tmp_path, command, name):
    damage, message = DAMAGE[name]
    damage(llama)
    np.save(tmp_path / "ids.npy", np.arange(3, 60))
    given = (argument.format(data=tmp_path / "ids.npy", out=tmp_path / "out") for argument in COMMANDS[command])
    assert re.search(message, refusal(command, llama, *given))
    assert listing(tmp_path) == ["ids.npy", "src"]


@pytest.mark.parametrize(("damage", "message"), DAMAGE.values(), ids=DAMAGE)
def test_damaged_source(llama, tmp_path, damage, message):
    damage(llama)
    assert re.search(message, refused(llama, tmp_path / "out"))
    assert listing(tmp_path) == ["src"]


@pytest.mark.parametrize(
    ("entry", "message"),
    [
        *((name, "only plain .safetensors") for name in ("../secret.safetensors", "/etc/passwd", "a/b.safetensors")),
        ("nowhere.safetensors", "which is not there"),
        ("model-00001-of-00003.safetensors", "but it is not"),
    ],
)
def test_index_that_leads_astray(tmp_path, entry, message):
    source = save_llama(tmp_path / "src", shards=3)
    (tmp_path / "secret.safetensors").write_bytes(b"x")
    where = {"model.norm.weight": entry}
    change_json(source / "model.safetensors.index.json", lambda index: index["weight_map"].update(where))
    assert message in refused(source, tmp_path / "out")
    assert "out" not in listing(tmp_path)


@pytest.mark.parametrize(
    ("options", "code", "message"),
    [
        (["--spd", "all", "--sync-tp-size", "3"], 1, "3 does not divide the 8 attention heads; this model takes 1, 2"),
        (["--spd", "all"], 1, "need sync_tp_size, the number of virtual ranks (--sync-tp-size N)"),
        (["--delayed", "1:", "--ladder", "2", "--sync-tp-size", "4"], 1, "exclude each other, and both name 2"),
        (["--sync-tp-size", "4"], 2, "no effect without --delayed or --spd"),
        (["--recipe", "no.yaml", "--sync-tp-size", "4"], 2, "--recipe and --sync-tp-size"),
        (["--recipe", "no.yaml"], 1, "no such file"),
        (["--dense", "4:"], 1, "--dense: 4: is empty or out of range for a model of 4 layers"),
    ],
)
def test_wrong_options(llama, tmp_path, options, code, message):
    assert message in refusal("convert", llama, tmp_path / "out", *options, code=code)
    assert listing(tmp_path) == ["src"]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("lader: 2:4", "unknown key 'lader'; known are ladder,"),
        ("ladder: 2.5", "write ranges"),
        ("spd: all\nsync_tp_size: '4'", "is '4', but must be of type int"),
        ("dense: true", "dense is True; write ranges such as 16:32"),
        ("!!python/object/apply:os.system ['true']", "not valid YAML"),
    ],
)
def test_wrong_recipes(llama, tmp_path, text, message):
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(text)
    assert message in refused(llama, tmp_path / "out", "--recipe", recipe)
    assert listing(tmp_path) == ["recipe.yaml", "src"]


def test_missing_source(tmp_path):
    assert "does not exist" in refused("/no/such/folder", tmp_path / "out")
    assert "hub" in refused("nobody/nothing", tmp_path / "out")
    (tmp_path / "file").touch()
    assert "is not a folder" in refused(tmp_path / "file", tmp_path / "out")
    (tmp_path / "model.gguf").touch()
    for source in (tmp_path, tmp_path / "model.gguf"):
        assert "model.gguf is a GGUF file" in refused(source, tmp_path.parent / "out")
    assert listing(tmp_path) == ["file", "model.gguf"]


def test_wrong_targets(llama, tmp_path):
    before = listing(llama)
    (tmp_path / "file").touch()
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "thesis.tex").write_text("years of work")
    cases = [
        (llama, [], f"is the source {llama}, or one"),
        (llama / "out", [], "or one lies inside the other"),
        (tmp_path, ["--overwrite"], "or one lies inside the other"),
        (tmp_path / "full", [], "is not empty"),
        (tmp_path / "file", [], "is a file"),
        (tmp_path / "file" / "out", [], "takes no files"),
        (Path("/proc/out"), [], "takes no files"),  # root may write anywhere, but here
        (tmp_path / "full", ["--overwrite"], "is not a checkpoint"),
        ("", ["--overwrite"], "OUT is empty"),
    ]
    for out, options, message in cases:
        assert message in refused(llama, out, "--ladder", "2:", *options)
    (tmp_path / "alias").symlink_to(llama)
    assert "is the source" in refused(llama, tmp_path / "alias", "--ladder", "2:", "--overwrite")
    assert listing(llama) == before
    assert (tmp_path / "full" / "thesis.tex").read_text() == "years of work"


def test_weights_that_are_links_into_out(llama, tmp_path):
    invoke_well("convert", llama, tmp_path / "out", "--ladder", "2:", "--no-verify")
    (llama / "model.safetensors").unlink()
    (llama / "model.safetensors").symlink_to(tmp_path / "out" / "model.safetensors")
    before = (llama / "model.safetensors").read_bytes()
    options = ("--ladder", "all", "--dtype", "bfloat16", "--overwrite")
    assert "is a link into OUT" in refused(llama, tmp_path / "out", *options)
    assert (llama / "model.safetensors").read_bytes() == before


@pytest.mark.parametrize(
    "error",
    [MemoryError(), torch.OutOfMemoryError("of the GPU"), RuntimeError("DefaultCPUAllocator: can't allocate memory")],
)
def test_memory_that_runs_out(llama, monkeypatch, error):
    monkeypatch.setattr("ladderize.convert.inspection.inspect_checkpoint", mock.Mock(side_effect=error))
    assert "the memory is exhausted" in refusal("inspect", llama)


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("blocks", " needs "),
        ("sensitivity", "measuring sensitivity with all weights in memory needs"),
        ("generate", "a KV cache for 64 texts of 9 tokens needs"),
    ],
)
def test_what_this_machine_does_not_hold(place, tmp_path, monkeypatch, name, expected):
    out, data = tmp_path / "out", ["--data", place / "ids.npy", "--device", "cpu"]
    sampled = ["--from-bos", "--num-samples", 64, "--max-new-tokens", 8]
    words = {
        "blocks": ["adapt", place / "spd", out, "--method", "blocks", "--distill-from", place / "dense", *data],
        "sensitivity": ["sensitivity", place / "dense", *data, "--sync-tp-size", 2, "--out", f"{out}.json"],
        "generate": ["generate", place / "dense", *sampled, "--out", f"{out}.jsonl"],
    }
    monkeypatch.setattr("ladderize.memory.available_bytes", lambda device: 10_000)
    message = one_sentence(invoke(*words[name]))
    assert expected in message
    assert "10 kB are free" in message
    assert listing(tmp_path) == []
