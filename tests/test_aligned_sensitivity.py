"""Sensitivities of aligned models: against convert, adapt --method align and eval, on which windows, resuming, and who
reads them."""

import json
import sys
from unittest.mock import patch

import numpy as np
import pytest
import torch
import yaml

from ladderize.adapt.layers import rewrite
from ladderize.adapt.layers.layout_scores import AlignedLayouts
from ladderize.adapt.layers.sensitivity import UNFINISHED
from ladderize.adapt.layers.windows import Windows
from ladderize.blocks import read_windows
from ladderize.checkpoint.opening import open_checkpoint
from ladderize.convert.recipe import Recipe
from ladderize.convert.sensitivity_file import layer_changes, read_sensitivity
from ladderize.errors import UserError
from ladderize.eval.results import EvalResults
from ladderize.layout import Layout
from ladderize.plan.measure import LayoutMeasurer
from ladderize.plan.options import PlanOptions
from tests import warm
from tests.helpers import SHAPE, fresh_rng, invoke, invoke_well, listing, one_sentence, record_bars, save_llama

LAYERS = SHAPE["num_hidden_layers"]
SCORED, ALIGNED, HELD_OUT, TOKENS = 3, 12, 3, 16  # windows of so many tokens


@pytest.fixture(scope="module", autouse=True)
def few_tokens():
    """So few to align on by default."""
    with patch.multiple("ladderize.adapt.layers.options", SHORT=ALIGNED * TOKENS, TOKENS_PER_INPUT=1):
        yield


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return save_llama(tmp_path_factory.mktemp("aligned") / "dense", seed=int(torch.randint(1 << 30, ())))


@pytest.fixture(scope="module")
def ids(tmp_path_factory):
    """A file of 40 windows of random ids."""
    path = tmp_path_factory.mktemp("ids") / "ids.npy"
    np.save(path, fresh_rng().integers(3, SHAPE["vocab_size"], (40, TOKENS)))
    return path


def measured(model, ids, out, *more, align=("--align",)):
    """``ladderize sensitivity`` of the first windows."""
    where = ("--data", ids, "--samples", SCORED, "--seed", 5, "--out", out, "--threads", 1)
    return invoke("sensitivity", model, *where, *align, *more)


def well_measured(*arguments, **more):
    outcome = measured(*arguments, **more)
    assert outcome.code == 0, outcome
    return outcome


def drawn(model, ids):
    return read_windows(open_checkpoint(str(model)), str(ids), seq_len=None, seed=5)


def note_layouts(monkeypatch, noted):
    """Append to ``noted`` each layout that is scored from now on; returns it."""

    def scored(self, layout, *rest, original=AlignedLayouts.__call__):
        noted.append(layout)
        return original(self, layout, *rest)

    monkeypatch.setattr(AlignedLayouts, "__call__", scored)
    return noted


def by_commands(model, layout, windows, folder, monkeypatch):
    """Nats of each scored window: convert, adapt --method align on the windows after the scored ones, eval."""
    scored, rest = windows[:SCORED], torch.from_numpy(windows[SCORED:])
    own = Windows(rest[:ALIGNED], rest[ALIGNED : ALIGNED + HELD_OUT])
    folder.mkdir()
    np.save(folder / "scored.npy", scored)
    np.save(folder / "own.npy", own.all.numpy())
    recipe = {key: value for key, value in Recipe.from_layout(layout).to_dict().items() if value is not None}
    (folder / "recipe.yaml").write_text(yaml.safe_dump(json.loads(json.dumps(recipe))))
    converted, aligned = folder / "converted", folder / "aligned"
    invoke_well("convert", model, converted, "--recipe", folder / "recipe.yaml", "--no-verify")
    monkeypatch.setattr(rewrite, "training_windows", lambda *_: own)
    more = ("--distill-from", model, "--data", folder / "own.npy", "--write", "last", "--no-verify")
    invoke_well("adapt", converted, aligned, "--method", "align", *more)
    shown = invoke_well("eval", aligned, "--perplexity", folder / "scored.npy", "--json")
    return EvalResults.from_dict(json.loads(shown.stdout), "results").models[0].model.perplexity.window_nll


@pytest.mark.parametrize("mode", ["layers", "sweep"])
def test_an_entry_is_what_convert_adapt_and_eval_give(model, ids, tmp_path, mode, monkeypatch):
    out, how = tmp_path / "s.json", ("--mode", mode, "--sync-tp-size", 4)
    outcome = well_measured(model, ids, out, *how)
    assert f"each changed model was aligned first, on {ALIGNED} other windows of {TOKENS} tokens" in outcome.stdout
    document = read_sensitivity(out)
    assert vars(document.aligned) == {"samples": ALIGNED, "heldout": HELD_OUT, "seq_len": TOKENS}
    changes = layer_changes(mode, LAYERS, 4)
    number = int(fresh_rng().integers(len(changes)))
    if mode == "sweep":  # whose costs are of one more layer
        number = LAYERS - 1
    nll = by_commands(model, changes[number].layout, drawn(model, ids), tmp_path / "one", monkeypatch)
    nats = np.mean(nll) / (TOKENS - 1) - document.dense_nll
    assert document.costs[number].nats == pytest.approx(nats, abs=1e-5)
    plain = tmp_path / "plain.json"
    well_measured(model, ids, plain, *how, align=())
    before = read_sensitivity(plain)
    assert before.dense_nll == pytest.approx(document.dense_nll, rel=1e-5)  # the dense model has nothing to align
    assert all(one.nats != other.nats for one, other in zip(before.costs, document.costs, strict=True))
    assert before.aligned is None


def test_how_much_to_align_on(model, ids, tmp_path, monkeypatch):
    bars = record_bars(monkeypatch)
    said = well_measured(model, ids, tmp_path / "s.json", "--align-samples", 2).stdout
    assert f"aligned first, on 2 other windows of {TOKENS} tokens" in said
    assert [sum(bar.steps) for bar in bars] == [bar.total for bar in bars]
    assert bars[0].total == 7 * sum(range(1, LAYERS + 1)) + sum(range(LAYERS))  # layers aligned, and those in front
    refused = measured(model, ids, tmp_path / "plain.json", "--align-samples", 2, align=())
    assert one_sentence(refused).endswith("--align-samples has no effect without --align")


def test_two_processes_share_the_models(model, ids, tmp_path):
    command = ("sensitivity", model, "--data", ids, "--samples", SCORED, "--align", "--json")
    documents = []
    for start, name in ((warm.run, "one.json"), (warm.run_group, "two.json")):  # both without the patch above
        result = start([sys.executable, "-m", "ladderize", *command, "--out", tmp_path / name])
        assert result.returncode == 0, result.stderr
        documents.append(json.loads(result.stdout))
    one, two = documents
    for own, other in zip(one["costs"], two["costs"], strict=True):
        assert own["nats"] == pytest.approx(other["nats"], abs=1e-6)
    assert listing(tmp_path) == ["one.json", "two.json"]


def test_a_killed_run_goes_on(model, ids, tmp_path, monkeypatch):
    out, mode = tmp_path / "s.json", ("--mode", "sweep", "--sync-tp-size", 2)
    well_measured(model, ids, tmp_path / "whole.json", *mode)
    scored, original = [], AlignedLayouts.__call__

    def stopped(self, layout, *arguments):
        if len(scored) == 2:
            raise UserError("stopped")
        scored.append(layout)
        return original(self, layout, *arguments)

    with monkeypatch.context() as patch:
        patch.setattr(AlignedLayouts, "__call__", stopped)
        assert "stopped" in one_sentence(measured(model, ids, out, *mode))
    assert not out.exists()
    kept = json.loads(out.with_name(out.name + UNFINISHED).read_text())["nll"]
    assert [len(row) for row in kept.values()] == [SCORED] * 2
    refused = one_sentence(measured(model, ids, out, *mode, "--samples", SCORED + 1))
    assert "holds unfinished work with another data; delete it, or name another --out" in refused
    note_layouts(monkeypatch, scored)
    resumed = measured(model, ids, out, *mode)
    assert "2 models were measured before" in resumed.stderr
    every = [Layout.dense(LAYERS), *(change.layout for change in layer_changes("sweep", LAYERS, 2)[::-1])]
    assert scored == every  # each of them once, first what takes the least
    assert json.loads(out.read_text()) == json.loads((tmp_path / "whole.json").read_text())
    assert listing(tmp_path) == ["s.json", "whole.json"]


# ---- layouts that plan measures ----


@pytest.fixture(scope="module")
def points(model, ids, tmp_path_factory):
    out = tmp_path_factory.mktemp("points") / "p.json"
    well_measured(model, ids, out, "--sync-tp-size", 4)
    return out


def aligned_measurer(model, points, folder):
    options = PlanOptions(model=str(model), hardware="h100-sxm", tp_sizes=(4,))
    return LayoutMeasurer(options, read_sensitivity(points), kept_beside=folder / "plan.json")


def test_a_measured_layout_is_an_aligned_one(model, ids, points, tmp_path, monkeypatch):
    sensitivity = read_sensitivity(points)
    changes = layer_changes("layers", LAYERS, 4)
    costs_of = {change.layout: cost for change, cost in zip(changes, sensitivity.costs, strict=True)}
    layouts = [[*costs_of][number] for number in fresh_rng().choice(len(costs_of), 2, replace=False)]
    costs = [costs_of[layout] for layout in layouts]
    aligned = note_layouts(monkeypatch, [])
    measurer = aligned_measurer(model, points, tmp_path)
    measured = [measurer.measure(layouts[0], False)]
    assert str(layouts[0]) in measurer.tables[True]  # aligned once, scored on all windows
    others = {window.tobytes() for window in measurer.aligner.windows.all.numpy()}
    assert not others & {w.tobytes() for windows in measurer.windows.values() for w in windows}
    held_out = measurer.measure(layouts[0], True)
    again = aligned_measurer(model, points, tmp_path)  # a killed run goes on
    assert again.measure(layouts[0], True) == held_out
    measured += [again.measure(layout, False) for layout in layouts[1:]]
    assert sorted(map(str, aligned)) == sorted(map(str, [Layout.dense(LAYERS), *layouts]))
    np.testing.assert_allclose([cost.nats for cost in measured], [cost.nats for cost in costs], atol=1e-5)
    windows = drawn(model, ids)[SCORED + ALIGNED + HELD_OUT :][:SCORED]
    assert np.array_equal(measurer.windows[True], windows)


def test_plan_names_the_step(model, ids, points, tmp_path):
    hardware = ("--hardware", "h100-sxm", "--link", "nvlink", "--tp-size", 4, "--prompt-len", 8, "--output-len", 4)
    choice = ("--max-ppl-increase", "900%", "--sensitivity", points, "--verify", 2)
    recipe = tmp_path / "recipe.yaml"
    outcome = invoke_well("plan", model, *hardware, *choice, "--recipe-out", recipe, "--out", tmp_path / "plan.json")
    assert f"adapt dense-planned dense-planned-aligned --method align --distill-from {model} " in outcome.stdout
    aligned = {"samples": ALIGNED, "heldout": HELD_OUT, "seq_len": TOKENS}
    assert json.loads((tmp_path / "plan.json").read_text())["choice"]["aligned"] == aligned
    assert "`adapt --method align`" in recipe.read_text()
