"""The likelihood of windows under many layouts: against whole models, layer by layer, and how much is shared."""

import numpy as np
import torch

from ladderize.adapt.layers.layout_scores import ConvertedLayouts, first_changed
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


def test_layouts_branch_off_one_dense_pass(llama, ids, monkeypatch):
    rng = fresh_rng()
    layouts = [random_layout(rng) for _ in range(20)]
    layouts += [Layout.from_layers(LAYERS, ladder=[3]), Layout.from_layers(LAYERS, spd=[3], sync_tp_size=2)]
    layouts += [layouts[3], Layout.dense(LAYERS)]
    blocks = Blocks(open_checkpoint(str(llama)), torch.float32, torch.device("cpu"))
    windows = torch.from_numpy(np.load(ids))
    alone = [
        window_nlls(blocks, lambda i, layout=layout: blocks.layer(i, layout), windows, batch_size=12)
        for layout in layouts
    ]
    scores, calls = ConvertedLayouts(blocks, layouts), []
    run = blocks.run
    monkeypatch.setattr(blocks, "run", lambda layer, state: calls.append(layer) or run(layer, state))
    np.testing.assert_allclose(scores(windows), torch.stack(alone, 1).numpy(), rtol=1e-6)
    assert len(calls) == LAYERS + sum(LAYERS - first_changed(layout) for layout in layouts)
