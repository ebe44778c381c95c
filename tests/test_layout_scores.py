"""The likelihood of windows under many layouts: against whole models, layer by layer, and how much is shared."""

import numpy as np
import pytest
import torch

from ladderize.adapt.layers.layout_scores import LayoutTree, Suffixes
from ladderize.blocks import Blocks, open_checkpoint, window_nlls
from ladderize.layout import Layout
from tests.helpers import SHAPE, fresh_rng
from tests.oracle import Oracle

LAYERS = SHAPE["num_hidden_layers"]


def random_layout(rng, layers=LAYERS):
    attention = rng.choice(["blocking", "overlapped", "dropped"], layers).tolist()
    mlp = [*rng.choice(["blocking", "overlapped"], layers - 1).tolist(), "blocking"]
    return Layout(tuple(attention), tuple(mlp), 4 if "dropped" in attention else None)


def oracle_nll(blocks, layout, windows):
    """Summed nats of each window under a layout, every rank apart."""
    weights = dict(zip(names := list(blocks.checkpoint.tensors), blocks.read(names), strict=True))
    ids = torch.from_numpy(windows)
    logits, _ = Oracle(weights, blocks.model_config(layout))(ids)
    likely = logits.double().log_softmax(-1)[:, :-1].gather(-1, ids[:, 1:, None])
    return -likely.sum((1, 2)).numpy()


def test_layouts_that_begin_alike_share_the_work(llama, ids, monkeypatch):
    rng = fresh_rng()
    layouts = [random_layout(rng) for _ in range(30)]
    layouts += [layouts[3], Layout.dense(LAYERS)]
    blocks = Blocks(open_checkpoint(str(llama)), torch.float32, torch.device("cpu"))
    windows = torch.from_numpy(np.load(ids))
    alone = [
        window_nlls(blocks, lambda i, layout=layout: blocks.layer(i, layout), windows, batch_size=12)
        for layout in layouts
    ]
    suffixes, calls = Suffixes(blocks, layouts), []
    run = blocks.run
    monkeypatch.setattr(blocks, "run", lambda layer, state: calls.append(layer) or run(layer, state))
    np.testing.assert_allclose(suffixes(windows), torch.stack(alone, 1).numpy(), rtol=1e-6)
    beginnings = {(one.attention_sync[: i + 1], one.mlp_sync[:i]) for one in layouts for i in range(LAYERS)}
    assert len(calls) == len(beginnings)
    with pytest.raises(ValueError, match="several sync_tp_size"):
        LayoutTree([Layout.from_layers(4, spd=[1], sync_tp_size=n) for n in (2, 4)])


def test_the_states_that_wait_are_few():
    """What waits is bounded by the logarithm of the number of layouts, however they part."""

    def deepest(tree, layer, members):
        groups = tree.parting(layer, members)
        if layer + 1 == tree.num_layers:
            return 1
        *others, (_, last) = groups
        return max([deepest(tree, layer + 1, last), *(1 + deepest(tree, layer + 1, group) for _, group in others)])

    rng = fresh_rng()
    for count in (1, 2, 9, 200):
        tree = LayoutTree([random_layout(rng, 6) for _ in range(count)])
        assert deepest(tree, 0, list(range(count))) + 1 <= tree.states
