"""Costs of single sync points: against the oracle, which files tell them, the command, and what is refused."""

import json
import math
from dataclasses import replace

import numpy as np
import pytest
import torch

from ladderize.blocks import Blocks, open_checkpoint, read_windows, window_nlls
from ladderize.convert.point_sensitivity import (
    PointChange,
    PointCost,
    point_changes,
    point_costs,
)
from ladderize.convert.read_sensitivity import read_point_sensitivity, read_sensitivity
from ladderize.errors import UserError
from ladderize.eval.options import PointOptions
from ladderize.eval.sensitivity_plot import beyond_sum, draw_points
from ladderize.eval.suffixes import LayoutTree, Suffixes
from ladderize.layout import Layout
from ladderize.workflows.sensitivity import measure_points
from tests.helpers import BIASES, SHAPE, edit_json, fresh_rng, invoke, one_sentence, save_llama
from tests.oracle import Oracle

LAYERS = SHAPE["num_hidden_layers"]


def measuring(llama, ids, out, *more):
    arguments = ("sensitivity", llama, "--data", ids, "--mode", "points", "--samples", 12, "--out", out)
    return invoke(*arguments, *more)


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


@pytest.mark.parametrize("extra", [{}, BIASES], ids=["plain", "biases"])
def test_costs_against_the_oracle(tmp_path, ids, extra):
    folder = save_llama(tmp_path / "m", seed=int(torch.randint(1 << 30, ())), **extra)
    options = PointOptions(str(ids), 4, True, samples=12, seed=3, batch_size=5)
    document = measure_points(folder, options)
    blocks = Blocks(open_checkpoint(str(folder)), torch.float32, torch.device("cpu"))
    windows = read_windows(blocks.checkpoint, str(ids), seq_len=None, samples=12, seed=3)
    dense = oracle_nll(blocks, Layout.dense(LAYERS), windows)
    assert document.dense_nll == pytest.approx(dense.mean() / 15, rel=1e-5)
    found = np.array(document.nll)
    np.testing.assert_allclose(found[:, -1], dense, rtol=1e-5)
    for column, cost in enumerate(document.costs):
        expected = oracle_nll(blocks, cost.layout(LAYERS, 4), windows)
        np.testing.assert_allclose(found[:, column], expected, rtol=1e-5)
        assert cost.nats == pytest.approx((expected - dense).mean() / 15, abs=1e-5)
        assert cost.low <= cost.nats <= cost.high
        assert cost.perplexity == pytest.approx(math.exp(expected.mean() / 15), rel=1e-4)
    single = {cost.layers[0]: cost for cost in document.costs if len(cost.layers) == 1 and cost.kind == "both"}
    pair = next(cost for cost in document.costs if cost.layers == (1, 2) and cost.kind == "both")
    assert beyond_sum(document, pair) == pytest.approx(pair.nats - single[1].nats - single[2].nats)
    dropped = {c.layers[0]: c for c in document.costs if len(c.layers) == 1 and c.kind == "attention dropped"}
    unlike = next(c for c in document.costs if c.layers == (1, 2) and c.kind == "attention dropped then both")
    assert unlike.layout(LAYERS, 4) == Layout.from_layers(LAYERS, ladder=[2], spd=[1, 2], sync_tp_size=4)
    assert beyond_sum(document, unlike) == pytest.approx(unlike.nats - dropped[1].nats - single[2].nats)


def test_changes_are_different_models_and_all_of_them():
    assert len(point_changes(7, dropped=True, pairs=False)) == 5 * 7 - 3
    assert len(point_changes(7, dropped=True, pairs=True)) == 5 * 7 - 3 + 25 * 5 + 10
    for dropped in (True, False):
        changes = point_changes(5, dropped=dropped, pairs=True)
        layouts = [change.layout(5, 4) for change in changes]
        assert len(set(layouts)) == len(layouts)
        assert not any(layout.is_dense for layout in layouts)
        assert any("dropped" in layout.attention_sync for layout in layouts) == dropped
        for change, layout in zip(changes, layouts, strict=True):
            changed = [
                i for i in range(5) if layout.attention_sync[i] != "blocking" or layout.entering(i) != "blocking"
            ]
            assert set(changed) <= set(change.layers)
            assert max(changed) == max(change.layers)
    for layer in range(1, 5):  # every mode that a layer can have, alone
        wanted = {Layout.from_layers(5, ladder=[layer]), Layout.from_layers(5, spd=[layer], sync_tp_size=4)}
        wanted.add(Layout.from_layers(5, ladder=[layer], spd=[layer], sync_tp_size=4))
        assert wanted <= {change.layout(5, 4) for change in point_changes(5, dropped=True, pairs=False)}


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
    assert len(calls) == len(beginnings) == LayoutTree(layouts).layer_runs
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


def test_intervals_are_of_differences():
    """However unlike windows are: a change that costs the same in each has no spread."""
    rng = fresh_rng()
    dense = rng.uniform(10, 90, 40)
    noise = rng.normal(0, 3, 40)
    changes = point_changes(2, dropped=False, pairs=False)[:2]
    base, (same, noisy) = point_costs(changes, np.stack([dense + 5, dense + noise, dense], 1), 10)
    assert base == pytest.approx(dense.mean() / 10)
    assert same.low == pytest.approx(0.5)
    assert same.high == pytest.approx(0.5)
    assert noisy.nats == pytest.approx(noise.mean() / 10)
    half = 1.96 * noise.std() / 10 / math.sqrt(40)
    assert (noisy.high - noisy.low) / 2 == pytest.approx(half, rel=0.3)


def test_one_measurement_tells_what_blocks_and_points_cost(llama, ids, tmp_path):
    """A file of points tells all that files of blocks do, which tell a part of it; convert selects layers by it."""
    assert measuring(llama, ids, tmp_path / "p.json", "--sync-tp-size", 4).code == 0
    points = read_point_sensitivity(tmp_path / "p.json")
    assert (points.num_layers, points.sync_tp_size, points.pairs) == (LAYERS, 4, False)
    known = {PointChange(cost.layers, cost.entering, cost.attention): cost for cost in points.costs}
    for mode, more in (("each", ("--sync-tp-size", 4)), ("each-ladder", ())):
        out = tmp_path / f"{mode}.json"
        command = ("sensitivity", llama, "--data", ids, "--mode", mode, "--samples", 12, "--out", out)
        assert invoke(*command, *more).code == 0
        blocks = read_point_sensitivity(out)
        assert blocks.fingerprint == points.fingerprint
        assert blocks.dense_nll == pytest.approx(points.dense_nll, rel=1e-6)
        assert [cost.layers for cost in blocks.costs] == [(layer,) for layer in range(LAYERS)]
        for cost in blocks.costs:
            same = known[PointChange(cost.layers, cost.entering, cost.attention)]
            for name in ("nats", "low", "high"):
                assert getattr(cost, name) == pytest.approx(getattr(same, name), abs=1e-6)
        kind = "spd" if mode == "each" else "ladder"
        measured = read_sensitivity(out).blocks
        for own, block in zip(measured, read_sensitivity(tmp_path / "p.json", kind).blocks, strict=True):
            for name in ("block", "sensitivity", "low", "high"):
                assert getattr(own, name) == pytest.approx(getattr(block, name), rel=1e-4, abs=1e-3)
        count = int(fresh_rng().integers(1, LAYERS))
        words = (f"--{kind}", "auto", f"--{kind}-fraction", count / LAYERS, "--sensitivity", tmp_path / "p.json")
        told = json.loads(invoke("convert", llama, tmp_path / "x", *words, "--dry-run", "--json").stdout)
        least = sorted(range(LAYERS), key=lambda block: measured[block].sensitivity)[:count]
        assert [row["block"] for row in told["selection"]["blocks"] if row["selected"]] == sorted(least)
        edit_json(out, nll=[[1.0, 2.0]])
        with pytest.raises(UserError, match="nll has not 5 log-likelihoods"):
            read_point_sensitivity(out)


def test_files_that_tell_no_costs(llama, ids, tmp_path):
    path = tmp_path / "p.json"
    assert measuring(llama, ids, path, "--sync-tp-size", 2, "--pairs").code == 0
    whole = path.read_text()
    costs = json.loads(whole)["costs"]

    def refused(message, **changes):
        path.write_text(whole)
        edit_json(path, **changes)
        with pytest.raises(UserError, match=message):
            read_point_sensitivity(path)

    refused("does not tell what a single sync point costs", mode="spd")
    refused("is not complete", complete=False)
    refused("fingerprint is ''", fingerprint="")
    refused("sync_tp_size is 0", sync_tp_size=0)
    refused("dense_nll is -1, but", dense_nll=-1.0)
    refused("the cost of layers 0: .* is 9, but", costs=[{**costs[0], "nats": 9.0}, *costs[1:]])
    refused("nll has not", nll=json.loads(whole)["nll"][1:])
    refused("it has no cost of layers 0: attention overlapped", costs=costs[1:])
    refused("which is no change of this model's", costs=[*costs, costs[4]])
    refused("which is no change of this model's", costs=[*costs, {**costs[4], "layers": [9]}])
    refused("costs.* nats is '1'", costs=[{**costs[0], "nats": "1"}, *costs[1:]])
    refused("it has a cost of layers 2:4", num_layers=LAYERS - 1)
    path.write_text(whole)
    assert read_point_sensitivity(path).to_dict()["costs"] == costs
    assert isinstance(read_point_sensitivity(path).costs[0], PointCost)


def test_other_readers_say_what_the_file_is(llama, ids, tmp_path):
    path = tmp_path / "sensitivity.json"
    assert measuring(llama, ids, path).code == 0
    convert = ("convert", llama, tmp_path / "out", "--spd", "auto", "--sync-tp-size", 2, "--sensitivity", path)
    assert "was measured without --sync-tp-size, so nothing was dropped" in one_sentence(invoke(*convert))


def test_the_command(llama, ids, tmp_path):
    out = tmp_path / "p.json"
    shown = measuring(llama, ids, out, "--sync-tp-size", 4, "--pairs", "--plot", tmp_path / "p")
    assert shown.code == 0, shown.stderr
    assert "nothing is dropped" not in shown.stderr
    assert (tmp_path / "p.png").read_bytes()[:4] == b"\x89PNG"
    document = json.loads(out.read_text())
    for cost in (cost for cost in document["costs"] if not cost["before"]):
        assert f"{cost['nats']:+.4f}" in shown.stdout
    assert "beyond the sum" in shown.stdout
    assert f"ladderize plan {llama} --sensitivity {out} " in shown.stdout
    assert f"--spd auto --sensitivity {out} --sync-tp-size 4 --spd-fraction 0.5" in shown.stdout
    printed = measuring(llama, ids, out, "--sync-tp-size", 4, "--pairs", "--json")
    assert json.loads(printed.stdout) == document
    assert "nothing was measured" in printed.stderr
    assert "holds a measurement with another pairs" in one_sentence(measuring(llama, ids, out, "--sync-tp-size", 4))
    page = tmp_path / "r.html"
    assert invoke("report", out, "--out", page).code == 0
    for cost in (cost for cost in document["costs"] if not cost["before"]):
        assert f"{cost['nats']:+.5f}" in page.read_text()
    assert f"{math.exp(document['dense_nll']):.4f}" in page.read_text()
    assert f"ladderize sensitivity {llama} --mode points" in page.read_text()
    less = measuring(llama, ids, tmp_path / "o.json")
    assert "without --sync-tp-size N nothing is dropped" in less.stderr
    assert "dropped" not in less.stdout
    assert "beyond" not in less.stdout
    assert len(json.loads((tmp_path / "o.json").read_text())["costs"]) == 3 * LAYERS - 2


def test_the_picture_of_costs_that_dwarf_others(llama, ids, tmp_path):
    assert measuring(llama, ids, tmp_path / "p.json", "--pairs").code == 0
    document = read_point_sensitivity(tmp_path / "p.json")
    values = [9.0, -1.0] + [0.001] * (len(document.costs) - 2)
    costs = [replace(c, nats=v, low=v - 0.1, high=v) for c, v in zip(document.costs, values, strict=True)]
    assert all(path.stat().st_size for path in draw_points(replace(document, costs=costs), tmp_path / "p"))


def test_the_trained_model_minds_neighbours_more_than_each_alone(stories, tmp_path):
    """Costs are super-additive, which is why a choice by their sums is measured."""
    command = ("sensitivity", stories, "--data", f"{stories}-samples.npz:heldout", "--samples", 4, "--mode", "points")
    out = tmp_path / "p.json"
    assert invoke(*command, "--pairs", "--sync-tp-size", 4, "--out", out).code == 0
    document = read_point_sensitivity(out)
    pairs = [cost for cost in document.costs if len(cost.layers) == 2]
    assert len(pairs) == 3 * 25 + 10
    assert sum(beyond_sum(document, pair) > 0 for pair in pairs) > 0.8 * len(pairs)
