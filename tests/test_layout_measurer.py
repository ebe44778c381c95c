"""Real costs of layouts: against the oracle, on which windows, each measured once, and what is refused."""

import json
import math
from contextlib import contextmanager

import numpy as np
import pytest
import torch

from ladderize.blocks import Blocks, open_checkpoint
from ladderize.checkpoint.opening import read_checkpoint
from ladderize.console import Console
from ladderize.convert.read_sensitivity import read_point_sensitivity
from ladderize.errors import LadderizeError, UserError
from ladderize.eval.suffixes import Suffixes
from ladderize.layout import Layout, LayoutError
from ladderize.planning.plans import measure
from ladderize.planning.plans.measure import LayoutMeasurer
from tests.helpers import SHAPE, edit_json, fresh_rng, invoke, save_llama
from tests.test_points import oracle_nll, random_layout

SAMPLES, OTHERS = 7, 5  # windows that the sensitivity was measured on, and the rest of the file


@pytest.fixture
def points(llama, ids, tmp_path):
    """A sensitivity file."""
    out = tmp_path / "p.json"
    arguments = ("--data", ids, "--mode", "points", "--sync-tp-size", 4, "--samples", SAMPLES, "--seed", 3)
    assert invoke("sensitivity", llama, *arguments, "--out", out).code == 0
    return read_point_sensitivity(out)


@pytest.fixture
def measuring(llama, points, tmp_path):
    """Opens a measurer as a run does that is started anew."""

    @contextmanager
    def start(**how):
        chosen = {"model": llama, "model_fingerprint": points.fingerprint, "data": points.data, **how}
        with LayoutMeasurer(**{"folder": tmp_path / "work", **chosen}) as measurer:
            yield measurer

    return start


def different_layouts(count):
    """None of them dense."""
    rng, found = fresh_rng(), []
    while len(found) < count:
        layout = random_layout(rng)
        if layout not in found and not layout.is_dense:
            found.append(layout)
    return found


def all_of(measurer, layouts, held_out):
    return [measurer.measure(layout, held_out) for layout in layouts]


def values(costs):
    return [list(vars(cost).values()) for cost in costs]


def about(costs):
    """Products of other batches may be rounded otherwise."""
    return [pytest.approx(row, abs=1e-6) for row in values(costs)]


def expected(llama, layout, windows):
    """Nats per token and its standard error, of a layout and of its difference to the dense model."""
    blocks = Blocks(open_checkpoint(str(llama)), torch.float32, torch.device("cpu"))
    nll = oracle_nll(blocks, layout, windows) / 15
    increase = nll - oracle_nll(blocks, Layout.dense(4), windows) / 15
    count = len(windows)
    return [
        value
        for row in (nll, increase)
        for value in (row.mean(), math.sqrt(((row - row.mean()) ** 2).sum() / (count - 1) / count))
    ] + [count]


def test_costs_are_those_of_the_oracle_on_either_windows(llama, ids, points, measuring):
    rng = fresh_rng()
    order = np.random.default_rng(3).permutation(SAMPLES + OTHERS)
    windows = np.load(ids)[order]
    layouts = [random_layout(rng), Layout.dense(4), random_layout(rng), random_layout(rng)]
    with measuring(batch_size=2) as measurer:
        for held_out, part in ((False, windows[:SAMPLES]), (True, windows[SAMPLES:])):
            found = all_of(measurer, layouts, held_out)
            for layout, cost in zip(layouts, found, strict=True):
                (found_values,) = values([cost])
                assert found_values == pytest.approx(expected(llama, layout, part), abs=2e-6, rel=1e-5)
            assert (found[1].increase, found[1].increase_stderr) == (0, 0)
        single = [cost.layout(4, 4) for cost in points.costs]
        costs = [cost.nats for cost in points.costs]  # the sensitivity's own windows
        assert [one.increase for one in all_of(measurer, single, False)] == pytest.approx(costs, abs=1e-6)


def test_each_is_measured_once_and_a_killed_run_goes_on(measuring, tmp_path, monkeypatch):
    scored, layouts = [], different_layouts(3)
    original = Suffixes.__call__

    def counted(self, batch):
        if len(scored) == limit:
            raise KeyboardInterrupt
        scored.append(len(batch))
        return original(self, batch)

    with measuring(batch_size=3, folder=tmp_path / "whole") as measurer:
        whole = [all_of(measurer, layouts, held_out) for held_out in (False, True)]
    monkeypatch.setattr(Suffixes, "__call__", counted)
    monkeypatch.setattr(measure, "SAVE_SECONDS", 0.0)
    limit = 4
    with pytest.raises(KeyboardInterrupt), measuring(batch_size=3) as measurer:
        measurer.measure(layouts[0], False)
    assert scored == [3, 3, 1, 3]  # the dense model first
    scored.clear()
    limit = -1
    with measuring(batch_size=4) as measurer:  # of what is left of the first, then all of the others
        assert values(all_of(measurer, layouts[:2], False)) == about(whole[0][:2])
        assert scored == [4, 4, 3]
        assert values(all_of(measurer, layouts, False)) == about(whole[0])
        assert scored[3:] == [4, 3]
        assert values(all_of(measurer, layouts, True)) == about(whole[1])
        count = len(scored)
    with measuring() as measurer:
        assert values(all_of(measurer, layouts[::-1], True)) == about(whole[1][::-1])
        assert len(scored) == count
        assert measurer.weights is None
    measurer.tidy()
    assert not (tmp_path / "work").exists()


def test_weights_that_are_in_memory_need_no_more_room(llama, measuring, monkeypatch):
    asked = []
    monkeypatch.setattr("ladderize.eval.suffixes.check_room", lambda need, *_, **__: asked.append(need))
    with measuring() as measurer:
        for _ in range(2):
            measurer.tables["choose"].clear()
            measurer.measure(Layout.dense(4), False)
    weights = sum(tensor.nbytes for tensor in read_checkpoint(llama).tensors.values())
    first, second = asked
    assert first - second == pytest.approx(weights, rel=0.01)


def test_a_damaged_record_is_measured_again(measuring, tmp_path):
    layout = random_layout(fresh_rng())
    with measuring() as measurer:
        before = measurer.measure(layout, False)
    for damage in ('{"choose": {"bbbb/bbbb": "x"}}', "{cut", json.dumps({"choose": [1]})):
        (tmp_path / "work" / "layouts.json").write_text(damage)
        with measuring() as measurer:
            assert measurer.measure(layout, False) == before


def test_windows_to_confirm_on(llama, ids, points, measuring, tmp_path, capsys):
    windows = np.load(ids)
    with measuring() as measurer:
        both = np.concatenate([measurer.windows["choose"], measurer.windows["confirm"]])
        assert sorted(map(tuple, both)) == sorted(map(tuple, windows))
    others = fresh_rng().integers(3, SHAPE["vocab_size"], (20, 16))
    chosen = measurer.windows["choose"]
    np.save(tmp_path / "others.npy", np.concatenate([others, chosen]))  # these are left out
    with measuring(held_out_data=str(tmp_path / "others.npy"), folder=tmp_path / "others") as measurer:
        confirm = {tuple(window) for window in measurer.windows["confirm"]}
        assert len(confirm) == SAMPLES
        assert confirm <= {tuple(window) for window in others}
    assert capsys.readouterr().err == ""
    with measuring(data_file=str(tmp_path / "others.npy"), folder=tmp_path / "all", console=Console()):
        assert "is not what the sensitivity was measured on" in capsys.readouterr().err


def test_a_launcher_is_refused(measuring, monkeypatch):
    for name, value in (("RANK", 0), ("WORLD_SIZE", 2), ("MASTER_ADDR", "localhost"), ("MASTER_PORT", 1)):
        monkeypatch.setenv(name, str(value))
    with pytest.raises(UserError, match="plan --verify is one process"), measuring():
        pass


def test_what_is_refused(llama, ids, points, measuring, tmp_path):
    def refused(message, **how):
        with pytest.raises(LadderizeError, match=message), measuring(folder=tmp_path / "refused", **how):
            pass
        assert not (tmp_path / "refused").exists()

    other = save_llama(tmp_path / "other", seed=int(torch.randint(1, 1 << 30, ())))
    refused("on another model than", model=other)
    assert invoke("convert", llama, tmp_path / "ladder", "--ladder", "2:", "--no-verify").code == 0
    refused("is not dense", model=tmp_path / "ladder")
    np.save(tmp_path / "few.npy", np.load(ids)[:1])
    refused("has [01] windows of 16 tokens to confirm", held_out_data=str(tmp_path / "few.npy"))
    refused("few.npy has 0 windows", data_file=str(tmp_path / "few.npy"))
    with measuring() as measurer:
        with pytest.raises(LayoutError, match="the layout is of 5 layers"):
            measurer.measure(Layout.dense(5), False)
        with pytest.raises(LayoutError, match="sync-tp-size 3 does not divide"):
            measurer.measure(Layout.from_layers(4, spd=[1], sync_tp_size=3), False)
        measurer.measure(Layout.dense(4), False)
        with pytest.raises(UserError, match="another run is using"), measuring():
            pass
    with pytest.raises(UserError, match="with another dtype"), measuring(dtype="bfloat16"):
        pass
    np.save(ids, np.load(ids)[::-1])
    refused("is not what it was when the sensitivity was measured")
    ids.unlink()
    refused("is not there; say where these data lie with --data")


def test_the_likelihood_of_a_broken_model_is_refused(llama, ids, points, measuring):
    with measuring() as measurer:
        measurer.blocks._end("model.norm.weight").fill_(math.nan)
        with pytest.raises(UserError, match="is NaN or infinite"):
            measurer.measure(Layout.dense(4), False)


def test_all_windows_taken_by_the_sensitivity_leave_none(llama, ids, tmp_path):
    out = tmp_path / "all.json"
    assert invoke("sensitivity", llama, "--data", ids, "--mode", "points", "--out", out).code == 0
    edit_json(out, extra=1)
    points = read_point_sensitivity(out)
    with pytest.raises(UserError, match="with --held-out-data, or measure the sensitivity with fewer --samples"):
        LayoutMeasurer(llama, points.fingerprint, points.data, folder=tmp_path / "work")
