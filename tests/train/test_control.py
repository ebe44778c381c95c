"""A dense model trained as a control: the same recipe on the same data, without a conversion."""

import json

import numpy as np
import pytest
import torch
from torch.nn.functional import cross_entropy
from transformers import AutoModelForCausalLM, LlamaForCausalLM

import ladderize
from tests.helpers import all_tensors, changed_tensors, invoke_well, listing, one_sentence
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
    assert document["layers"] == [0, 1, 2, 3]
    assert document["heldout_perplexity"]["after"] < document["heldout_perplexity"]["before"]  # its rows are trained on
    assert changed_tensors(place / "dense", out) == all_tensors(out).keys()
    ids = torch.from_numpy(np.load(place / "eval.npy"))
    with torch.no_grad():
        logits = plain(out)(ids).logits
        assert torch.equal(logits, ladderize.load(out)(ids).logits)
    perplexity = cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten()).exp()
    assert document["heldout_perplexity"]["after"] == pytest.approx(float(perplexity), rel=1e-4)
    assert "Layers 0:4 were retrained (`full`)" in (out / "README.md").read_text()
    # a dense model that was trained further may be converted like any other
    converted = invoke_well("convert", out, tmp_path / "ladder", "--ladder", "all", "--no-verify")
    assert "were retrained" not in converted.stderr


def test_a_dense_model_has_nothing_converted_to_train(place, tmp_path):
    said = "is dense and has no converted layers to train; convert it first, or, to train the dense model itself"
    assert said in one_sentence(adapt(place, tmp_path / "out", model="dense"))
    assert listing(tmp_path) == []
