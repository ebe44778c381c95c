"""FSDP2 shares out each layer by itself, and what surrounds them, so that one is gathered while another computes; and
changes nothing."""

import pytest
import torch

from ladderize.adapt.data.examples import Example
from ladderize.adapt.data.packing import collate, pack
from ladderize.runtime import launch
from tests.helpers import LAYOUTS, SHAPE, fresh_rng, make_model
from tests.retrain.sharding import losses_and_gradients

LAYERS = range(SHAPE["num_hidden_layers"])
ENDS = {"scored.model.model.embed_tokens", "scored.model.lm_head"}


def both_ways(folder, name, engine, compute=torch.float32, **extra):
    """Checked: sharded and not, one step gives the same. Returns what the sharded one says."""
    rng = fresh_rng()
    extra = {**LAYOUTS[name][3], **extra}
    make_model(name, **extra).save_pretrained(folder / "student")
    make_model("dense", **extra).save_pretrained(folder / "dense")
    rows = pack([Example(rng.integers(3, 97, n), rng.random(n) < 0.7, str(n)) for n in (9, 6, 7, 3, 8, 12)], 12)
    tensors = [collate(rows[:2]), collate(rows[2:])]
    launch.run(losses_and_gradients, folder, engine, compute, tensors, tp_size=2, device="cpu", threads=1)
    sharded, whole = torch.load(folder / "found.pt")
    assert not whole["groups"]
    tolerance = 1e-5 if compute == torch.float32 else 0.1
    assert sharded["losses"] == pytest.approx(whole["losses"], rel=tolerance)
    assert sharded["gradients"].keys() == whole["gradients"].keys()
    for key, gradient in whole["gradients"].items():
        assert (sharded["gradients"][key] - gradient).norm() <= tolerance * gradient.norm() + 1e-6, key
    return sharded


@pytest.mark.parametrize(("name", "tied"), [("mixed", False), ("ladder all", True), ("same layer", False)])
def test_the_hugging_face_model(tmp_path, name, tied):
    sharded = both_ways(tmp_path, name, "hf", tie_word_embeddings=tied)
    layers = {f"scored.model.model.layers.{index}" for index in LAYERS}
    assert set(sharded["groups"]) == {"", *layers, *(set() if tied else ENDS)}


@pytest.mark.parametrize(("name", "dtype"), [("mixed", "bfloat16"), ("spd with biases", "float32")])
def test_the_runtimes_model(tmp_path, name, dtype):
    """A sub-module's gradients are summed as soon as they are there, before those of the one in front of it are
    computed."""
    sharded = both_ways(tmp_path, name, "tp", getattr(torch, dtype))
    parts = [f"weights.{part}.{index}" for index in reversed(LAYERS) for part in ("mlps", "attentions")]
    assert set(sharded["groups"]) == {"", *parts}
    summed = [event for event in sharded["events"] if event in parts]
    assert summed[: len(parts)] == parts
    assert "computed" in sharded["events"][sharded["events"].index(parts[-2]) : sharded["events"].index(parts[-1])]
