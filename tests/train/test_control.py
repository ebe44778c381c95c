"""A dense model trained as a control: the same recipe on the same data, without a conversion."""

import json
import shutil

import numpy as np
import pytest
import torch
from torch.nn.functional import cross_entropy
from transformers import AutoModelForCausalLM, LlamaForCausalLM

import ladderize
from ladderize.checkpoint.opening import read_config
from ladderize.layout import Layout
from tests.helpers import all_tensors, changed_tensors, invoke, invoke_well, listing, one_sentence, save_llama
from tests.train.commands import adapt, losses_of, succeed


def plain(folder):
    """The model in transformers, which knows nothing of ladderize."""
    config = json.loads((folder / "config.json").read_text())
    assert config["model_type"] == "llama"
    assert not {"auto_map", "attention_sync", "mlp_sync", "sync_tp_size"} & config.keys()
    assert list(folder.glob("*.py")) == []
    model = AutoModelForCausalLM.from_pretrained(folder)
    assert type(model) is LlamaForCausalLM
    return model.eval()


def test_a_control_learns_the_text_and_is_a_plain_llama(place, tmp_path):
    out = tmp_path / "out"
    document = succeed(place, out, "--train", "all", model="dense", steps=12)
    losses = losses_of(out)
    assert losses[-1] < 0.95 * losses[0]
    assert document["layout"] == "4 layers: dense"
    assert document["attention_sync"] == document["mlp_sync"] == ["blocking"] * 4
    assert document["sync_tp_size"] is None
    assert document["layers"] == [0, 1, 2, 3]
    assert document["heldout_perplexity"]["after"] < document["heldout_perplexity"]["before"]  # its rows are trained on
    assert document["heldout_perplexity"]["won_back"] is None
    assert changed_tensors(place / "dense", out) == all_tensors(out).keys()
    ids = torch.from_numpy(np.load(place / "eval.npy"))
    with torch.no_grad():
        logits = plain(out)(ids).logits
        assert torch.equal(logits, ladderize.load(out)(ids).logits)
    perplexity = cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten()).exp()
    assert document["heldout_perplexity"]["after"] == pytest.approx(float(perplexity), rel=1e-4)
    card = (out / "README.md").read_text()
    assert "A dense Llama, made of" in card
    assert "Layers 0:4 were retrained (`full`)" in card
    shown = invoke("inspect", out)
    assert "retrained   full: layers 0:4 of" in shown.stdout
    outcome = invoke(
        "eval", place / "dense", out, "--perplexity", place / "eval.npy", "--out", tmp_path / "results.json"
    )
    assert outcome.code == 0, outcome.stderr
    dense, own = (
        model["ladderize"]["perplexity"]["perplexity"]
        for model in json.loads((tmp_path / "results.json").read_text())["models"]
    )
    assert own < dense
    # a dense model that was trained further may be converted like any other
    converted = invoke_well("convert", out, tmp_path / "ladder", "--ladder", "all", "--no-verify")
    assert "Warning" not in converted.stderr


def test_the_layers_of_a_control(place, tmp_path):
    succeed(place, tmp_path / "out", "--train", "1:3", model="dense", steps=1)
    assert {name.split(".")[2] for name in changed_tensors(place / "dense", tmp_path / "out")} == {"1", "2"}
    plain(tmp_path / "out")


def test_a_control_by_an_adapter(place, tmp_path):
    document = succeed(place, tmp_path / "adapter", "--method", "lora", "--train", "all", model="dense", steps=3)
    assert document["base"]["layout"] == "4 layers: dense"
    assert "On another layout, it does not work." in (tmp_path / "adapter" / "README.md").read_text()
    invoke_well("merge", tmp_path / "adapter", tmp_path / "out")
    from peft import PeftModel

    dense, ids = AutoModelForCausalLM.from_pretrained(place / "dense"), torch.randint(3, 97, (2, 9))
    with torch.no_grad():
        merged = plain(tmp_path / "out")(ids).logits
        expected = PeftModel.from_pretrained(dense, tmp_path / "adapter").eval()(ids).logits
    torch.testing.assert_close(merged, expected, rtol=1e-3, atol=1e-4)


def test_a_control_with_a_teacher(place, tmp_path):
    """Its own predictions beside the text, or another dense model's alone."""
    mixed = succeed(
        *(place, tmp_path / "mixed", "--train", "all"),
        *("--distill-from", place / "dense", "--distill-weight", 0.5),
        model="dense",
        steps=2,
    )
    assert mixed["heldout_perplexity"]["dense"] == pytest.approx(mixed["heldout_perplexity"]["before"])
    assert mixed["heldout_perplexity"]["won_back"] is None
    other = save_llama(tmp_path / "other", seed=9)
    succeed(place, tmp_path / "taught", "--train", "all", "--distill-from", other, model="dense", steps=12)
    losses = losses_of(tmp_path / "taught")
    assert losses[-1] < losses[0]
    plain(tmp_path / "taught")


def test_a_converted_model_with_all_sums_waited_for_is_dense(place, tmp_path):
    """A layout that says so in config.json."""
    source = tmp_path / "source"
    source.mkdir()
    config = {**read_config(place / "dense"), "model_type": "ladderized_llama", **Layout.dense(4).to_config()}
    (source / "config.json").write_text(json.dumps(config))
    shutil.copy(place / "dense" / "model.safetensors", source)
    document = succeed(place, tmp_path / "out", "--train", "all", model=source, steps=1)
    assert document["layout"] == "4 layers: dense"
    plain(tmp_path / "out")


@pytest.mark.parametrize(
    ("more", "expected"),
    [
        ((), "is dense and has no converted layers to train; convert it first, or, to train the dense model itself"),
        (("--train", "all", "--distill-from", "CONVERTED"), "is not dense"),
        (("--train", "all", "--distill-from", "WIDE"), "has other shapes"),
    ],
)
def test_what_is_refused(place, tmp_path, more, expected):
    save_llama(tmp_path / "wide", intermediate_size=96)
    folders = {"DENSE": place / "dense", "CONVERTED": place / "both", "WIDE": tmp_path / "wide"}
    before = listing(tmp_path)
    outcome = adapt(place, tmp_path / "out", *(folders.get(word, word) for word in more), model="dense")
    assert outcome.code == 1
    assert expected in one_sentence(outcome)
    assert listing(tmp_path) == before
