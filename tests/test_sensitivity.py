"""The cost of layers against the oracle, the cached prefix, intervals, the command, and what is refused."""

import json
import math

import numpy as np
import pytest
import torch

from ladderize.adapt.layers.options import SensitivityOptions
from ladderize.adapt.layers.sensitivity import write_sensitivity
from ladderize.blocks import read_windows
from ladderize.convert.sensitivity_file import LayerChange, layer_costs, read_sensitivity
from ladderize.layout import Layout
from tests.helpers import BIASES, SHAPE, blocks_of, fresh_rng, invoke, invoke_well, refusal, save_llama
from tests.oracle import Oracle

LAYERS = SHAPE["num_hidden_layers"]


def oracle_nll(blocks, layout, windows):
    """Summed nats of each window under a layout, every rank apart."""
    weights = {name: blocks.read(name) for name in blocks.checkpoint.tensors}
    ids = torch.from_numpy(windows)
    logits, _ = Oracle(weights, blocks.model_config(layout))(ids)
    likely = logits.double().log_softmax(-1)[:, :-1].gather(-1, ids[:, 1:, None])
    return -likely.sum((1, 2)).numpy()


@pytest.mark.parametrize("mode", ["layers", "sweep"])
@pytest.mark.parametrize("extra", [{}, BIASES], ids=["plain", "biases"])
def test_against_the_oracle(tmp_path, ids, mode, extra):
    folder = save_llama(tmp_path / "m", seed=int(torch.randint(1 << 30, ())), **extra)
    more = {"mode": mode, "sync_tp_size": 4, "samples": 12, "seed": 3}
    document = write_sensitivity(SensitivityOptions(str(folder), str(ids), tmp_path / "s.json", **more))
    blocks = blocks_of(folder)
    windows = read_windows(blocks.checkpoint, str(ids), seq_len=None, seed=3)[:12]

    def mean(layout):
        return oracle_nll(blocks, layout, windows).mean() / 15

    dense = mean(Layout.dense(LAYERS))
    assert document.dense_nll == pytest.approx(dense, rel=1e-5)
    assert document.kinds == (["spd"] if mode == "sweep" else ["ladder", "delayed", "spd", "spd+ladder"])
    seen = set()
    for cost in document.costs:
        layers = range(cost.layer, LAYERS if mode == "sweep" else cost.layer + 1)
        named = dict.fromkeys(cost.kind.split("+"), layers)
        ranks = 4 if cost.kind != "ladder" else None
        changed, before = mean(Layout.from_layers(LAYERS, **named, sync_tp_size=ranks)), dense
        if mode == "sweep" and cost.layer + 1 < LAYERS:
            before = mean(Layout.from_layers(LAYERS, spd=range(cost.layer + 1, LAYERS), sync_tp_size=4))
        assert cost.nats == pytest.approx(changed - before, abs=1e-5)
        right = math.exp(changed) - math.exp(before)
        assert cost.sensitivity == pytest.approx(right, rel=1e-4, abs=1e-4 * math.exp(dense))
        assert cost.low <= cost.sensitivity <= cost.high
        if mode == "sweep" or cost.layer or cost.kind in ("ladder", "spd"):
            seen.add(round(changed, 9))
    # every change is another model, but that nothing enters layer 0
    assert len(seen) == len(document.costs) - 2 * (mode == "layers")


def test_intervals_come_from_windows():
    changes = [LayerChange(0, "spd", None), LayerChange(1, "spd", None)]

    def costs_of(table, mode="sweep"):
        return layer_costs(changes, table, 10, mode)

    for mode in ("sweep", "layers"):
        for cost in costs_of(np.tile([30.0, 20.0, 10.0], (8, 1)), mode):
            assert cost.low == pytest.approx(cost.sensitivity) == pytest.approx(cost.high)
    few = np.array([30.0, 20.0, 10.0]) + fresh_rng().normal(size=(16, 3))
    few, many = costs_of(few), costs_of(np.tile(few, (16, 1)))  # sixteen times as many windows of the same spread
    assert all(cost.low < cost.sensitivity < cost.high for cost in (*few, *many))
    assert many[0].high - many[0].low == pytest.approx((few[0].high - few[0].low) / 4, rel=0.25)


def test_the_command(llama, ids, tmp_path):
    out = tmp_path / "s.json"
    command = ["sensitivity", llama, "--sync-tp-size", 4, "--data", ids, "--samples", 13, "--out", out]
    invoke_well(*command)
    document = json.loads(out.read_text())
    assert document["data"]["samples"] == 12
    assert read_sensitivity(out).to_dict() == {key: document[key] for key in read_sensitivity(out).to_dict()}
    assert "is there already; name another file, or pass --overwrite" in refusal(*command)
    assert json.loads(out.read_text()) == document
    printed = invoke(*command, "--seed", 5, "--overwrite", "--json")
    assert json.loads(printed.stdout) == json.loads(out.read_text())
    assert json.loads(out.read_text())["data"]["seed"] == 5
    invoke_well("convert", llama, tmp_path / "ladder", "--ladder", "2:", "--no-verify")
    assert "is not dense" in refusal("sensitivity", tmp_path / "ladder", *command[2:], "--overwrite")
