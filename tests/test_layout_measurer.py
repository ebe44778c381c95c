"""Real costs of layouts: against the oracle, on which windows, each measured once, and what is refused."""

import dataclasses
import math

import numpy as np
import pytest

from ladderize.convert.sensitivity_file import layer_changes, read_sensitivity
from ladderize.data import file_sha256
from ladderize.errors import UserError
from ladderize.layout import Layout
from ladderize.plan.measure import LayoutMeasurer
from ladderize.plan.options import PlanModel
from tests.helpers import SHAPE, blocks_of, fresh_rng, invoke_well, random_layout
from tests.test_sensitivity import oracle_nll

SAMPLES, OTHERS = 7, 5  # windows that the sensitivity was measured on, and the rest of the file


@pytest.fixture
def points(llama, ids, tmp_path):
    """A sensitivity file."""
    out = tmp_path / "p.json"
    arguments = ("--data", ids, "--sync-tp-size", 4, "--samples", SAMPLES, "--seed", 3)
    invoke_well("sensitivity", llama, *arguments, "--out", out)
    return read_sensitivity(out)


@pytest.fixture
def measuring(llama, points, tmp_path):
    """Makes a measurer as a run does that is started anew."""

    def start(dtype="auto", data=None, aligned=None):
        if data is not None:
            data = dataclasses.replace(points.data, file=str(data), sha256=file_sha256(str(data)))
        costs = dataclasses.replace(points, data=data or points.data, aligned=aligned)
        return LayoutMeasurer(PlanModel(str(llama), dtype=dtype), costs, kept_beside=tmp_path / "plan.json")

    return start


def expected(llama, layout, windows):
    """The difference of a layout to the dense model in nats per token, its standard error, and how many windows."""
    blocks = blocks_of(llama)
    increase = (oracle_nll(blocks, layout, windows) - oracle_nll(blocks, Layout.dense(4), windows)) / 15
    count = len(windows)
    return [increase.mean(), math.sqrt(((increase - increase.mean()) ** 2).sum() / (count - 1) / count), count]


def test_costs_are_those_of_the_oracle_on_either_windows(llama, ids, points, measuring):
    windows = np.load(ids)[np.random.default_rng(3).permutation(SAMPLES + OTHERS)]
    measurer = measuring()
    for held_out, part in ((False, windows[:SAMPLES]), (True, windows[SAMPLES:])):
        for layout in (random_layout(), random_layout()):
            cost = measurer.measure(layout, held_out)
            assert [*vars(cost).values()] == pytest.approx(expected(llama, layout, part), abs=2e-6, rel=1e-5)
        dense = measurer.measure(Layout.dense(4), held_out)
        assert (dense.nats, dense.stderr) == (0, 0)
    for cost, change in zip(points.costs[:5], layer_changes("layers", 4, 4), strict=False):  # its own windows
        assert measurer.measure(change.layout, False).nats == pytest.approx(cost.nats, abs=1e-6)


def test_windows_to_confirm_on(ids, measuring, tmp_path):
    windows = np.load(ids)
    both = measuring().windows
    assert sorted(map(tuple, (*both[False], *both[True]))) == sorted(map(tuple, windows))
    others = fresh_rng().integers(3, SHAPE["vocab_size"], (20, 16))
    np.save(tmp_path / "others.npy", np.concatenate([others, others[:9]]))  # windows that are chosen by are left out
    found = measuring(data=tmp_path / "others.npy").windows
    assert not {tuple(window) for window in found[False]} & {tuple(window) for window in found[True]}
    assert {tuple(window) for window in found[True]} <= {tuple(window) for window in others}


def test_other_data_under_the_same_name_are_refused(llama, tmp_path):
    data = tmp_path / "ids.npy"
    np.save(data, np.random.randint(3, 90, (SAMPLES + OTHERS, 16)))
    arguments = ("--data", data, "--samples", SAMPLES, "--out", tmp_path / "p.json")
    invoke_well("sensitivity", llama, *arguments)
    np.save(data, np.random.randint(3, 90, (SAMPLES + OTHERS, 16)))
    with pytest.raises(UserError, match="is not the data that the costs were measured on"):
        LayoutMeasurer(PlanModel(str(llama)), read_sensitivity(tmp_path / "p.json"), kept_beside=tmp_path / "plan.json")
