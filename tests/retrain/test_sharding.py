"""FSDP2 shares out each layer by itself, and what surrounds them, so that one is gathered while another computes; and
changes nothing."""

import pytest
import torch

from ladderize.adapt.data.examples import Example
from ladderize.adapt.data.packing import collate, pack
from ladderize.runtime import launch
from tests.helpers import LAYOUTS, SHAPE, fresh_rng, make_model
from tests.retrain.sharding import losses_and_gradients

LAYERS = [f"scored.model.model.layers.{index}" for index in range(SHAPE["num_hidden_layers"])]
ENDS = ["scored.model.model.embed_tokens", "scored.model.lm_head"]


@pytest.mark.parametrize(("name", "tied"), [("mixed", False), ("ladder all", True), ("same layer", False)])
def test_groups_and_gradients(tmp_path, name, tied):
    rng = fresh_rng()
    make_model(name, tie_word_embeddings=tied).save_pretrained(tmp_path / "student")
    make_model("dense", tie_word_embeddings=tied, **LAYOUTS[name][3]).save_pretrained(tmp_path / "dense")
    rows = pack([Example(rng.integers(3, 97, n), rng.random(n) < 0.7, str(n)) for n in (9, 6, 7, 3, 8, 12)], 12)
    tensors = [collate(rows[:2]), collate(rows[2:])]
    launch.run(losses_and_gradients, tmp_path, tensors, tp_size=2, device="cpu", threads=1)
    sharded, whole = torch.load(tmp_path / "found.pt")
    assert set(sharded[2]) == {"", *LAYERS, *([] if tied else ENDS)}
    assert not whole[2]
    torch.testing.assert_close(torch.tensor(sharded[0]), torch.tensor(whole[0]), rtol=1e-6, atol=1e-6)
    assert sharded[1].keys() == whole[1].keys()
    for key, gradient in whole[1].items():
        torch.testing.assert_close(sharded[1][key], gradient, rtol=1e-5, atol=1e-6, msg=key)
