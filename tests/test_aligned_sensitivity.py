"""Sensitivities of aligned layers: against convert, adapt --method align and eval, on which windows, resuming, and who
reads them."""

import json
import sys
from unittest.mock import patch

import numpy as np
import pytest
import torch
import yaml

from ladderize.adapt.layers import rewrite
from ladderize.adapt.layers.options import SensitivityOptions
from ladderize.adapt.layers.sensitivity import LayerwiseScores, LayoutScores, write_sensitivity
from ladderize.adapt.layers.windows import Windows
from ladderize.blocks import read_windows
from ladderize.checkpoint.opening import open_checkpoint
from ladderize.console import SILENT
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
    path = tmp_path_factory.mktemp("ids") / "ids.npy"
    np.save(path, fresh_rng().integers(3, SHAPE["vocab_size"], (40, TOKENS)))
    return path


def measured(model, ids, out, *more, align=("--align",), run=invoke):
    return run("sensitivity", model, "--data", ids, "--samples", SCORED, "--seed", 5, "--out", out, *align, *more)


def well_measured(*arguments, **more):
    return measured(*arguments, run=invoke_well, **more)


def drawn(model, ids):
    return read_windows(open_checkpoint(str(model)), str(ids), seq_len=None, seed=5)


def by_commands(model, layout, windows, scored, folder, monkeypatch, *train):
    """Nats of each scored window: convert, adapt --method align on the windows after the first, eval."""
    rest = torch.from_numpy(windows[SCORED:])
    to_align = Windows(rest[:ALIGNED], rest[ALIGNED : ALIGNED + HELD_OUT])
    folder.mkdir()
    np.save(folder / "scored.npy", scored)
    np.save(folder / "aligned.npy", to_align.all.numpy())
    recipe = {key: value for key, value in Recipe.from_layout(layout).to_dict().items() if value is not None}
    (folder / "recipe.yaml").write_text(yaml.safe_dump(json.loads(json.dumps(recipe))))
    converted, aligned = folder / "converted", folder / "aligned"
    invoke_well("convert", model, converted, "--recipe", folder / "recipe.yaml", "--no-verify")
    monkeypatch.setattr(rewrite, "training_windows", lambda *_: to_align)
    more = ("--distill-from", model, "--data", folder / "aligned.npy", "--write", "last", "--no-verify", *train)
    invoke_well("adapt", converted, aligned, "--method", "align", *more)
    shown = invoke_well("eval", aligned, "--perplexity", folder / "scored.npy", "--json")
    nll = EvalResults.from_dict(json.loads(shown.stdout), "results").models[0].model.perplexity.window_nll
    return np.mean(nll) / (TOKENS - 1)


@pytest.mark.parametrize("mode", ["layers", "sweep"])
def test_an_entry_is_what_convert_adapt_and_eval_give(model, ids, tmp_path, mode, monkeypatch):
    out, options = tmp_path / "s.json", ("--mode", mode, "--sync-tp-size", 4)
    well_measured(model, ids, out, *options)
    document = read_sensitivity(out)
    assert vars(document.aligned) == {"samples": ALIGNED, "heldout": HELD_OUT, "seq_len": TOKENS}
    changes = layer_changes(mode, LAYERS, 4)
    numbers = fresh_rng().choice(len(changes), 2, replace=False)
    if mode == "sweep":  # whose costs are of one more layer
        numbers = [LAYERS - 1]
    for number in numbers:
        windows, train = drawn(model, ids), ("--train", "converted")
        folder, layout = tmp_path / str(number), changes[number].layout
        nats = by_commands(model, layout, windows, windows[:SCORED], folder, monkeypatch, *train)
        assert document.costs[number].nats == pytest.approx(nats - document.dense_nll, abs=1e-5)
    plain = tmp_path / "plain.json"
    well_measured(model, ids, plain, *options, align=())
    before = read_sensitivity(plain)
    assert before.dense_nll == pytest.approx(document.dense_nll, rel=1e-5)  # the dense model has nothing to align
    assert all(one.nats != other.nats for one, other in zip(before.costs, document.costs, strict=True))
    assert before.aligned is None


def test_how_much_to_align_on(model, ids, tmp_path, monkeypatch):
    bars = record_bars(monkeypatch)
    options = SensitivityOptions(str(model), str(ids), tmp_path / "s.json", samples=SCORED, align=True, align_samples=2)
    document = write_sensitivity(options)
    assert (document.aligned.samples, document.aligned.seq_len) == (2, TOKENS)
    assert [sum(bar.steps) for bar in bars] == [bar.total for bar in bars]


def test_two_processes_share_the_models(model, ids, tmp_path):
    command = ("sensitivity", model, "--data", ids, "--samples", SCORED, "--align", "--json")
    documents = []
    for start, name in ((warm.run, "one.json"), (warm.run_group, "two.json")):  # both without the patch above
        result = start([sys.executable, "-m", "ladderize", *command, "--out", tmp_path / name])
        assert result.returncode == 0, result.stderr
        documents.append(json.loads(result.stdout))
    one, two = documents
    for cost, other in zip(one["costs"], two["costs"], strict=True):
        assert cost["nats"] == pytest.approx(other["nats"], abs=1e-6)
    assert listing(tmp_path) == ["one.json", "two.json"]


@pytest.mark.parametrize("align", [(), ("--align",)])
def test_a_killed_run_goes_on(model, ids, tmp_path, monkeypatch, align):
    out, mode = tmp_path / "s.json", ("--mode", "sweep", "--sync-tp-size", 2)
    well_measured(model, ids, tmp_path / "whole.json", *mode, align=align)
    scored, most, original = [], 2, LayoutScores.__call__

    def noted(self, layout, *arguments):
        if len(scored) == most:
            raise UserError("stopped")
        scored.append(layout)
        return original(self, layout, *arguments)

    monkeypatch.setattr(LayoutScores, "__call__", noted)
    assert "stopped" in one_sentence(measured(model, ids, out, *mode, align=align))
    assert listing(tmp_path) == ["s.json.ladderize-work", "whole.json"]
    kept = json.loads((tmp_path / "s.json.ladderize-work" / "nll.json").read_text())["nll"]
    assert [len(row) for row in kept.values()] == [SCORED] * 2
    refused = one_sentence(measured(model, ids, out, *mode, "--samples", SCORED + 1, align=align))
    assert "holds unfinished work of a run with another data" in refused
    most = LAYERS + 1
    resumed = measured(model, ids, out, *mode, align=align)
    assert "2 models were measured before" in resumed.stderr
    assert scored == [*(change.layout for change in layer_changes("sweep", LAYERS, 2)), Layout.dense(LAYERS)]
    assert json.loads(out.read_text()) == json.loads((tmp_path / "whole.json").read_text())
    assert listing(tmp_path) == ["s.json", "whole.json"]


@pytest.fixture(scope="module")
def points(model, ids, tmp_path_factory):
    out = tmp_path_factory.mktemp("points") / "p.json"
    well_measured(model, ids, out, "--sync-tp-size", 4)
    return out


def aligned_measurer(model, points, folder):
    options = PlanOptions(model=str(model), hardware="h100-sxm", tp_sizes=(4,))
    return LayoutMeasurer(options, read_sensitivity(points), folder / "plan.json", SILENT)


def test_a_measured_layout_is_an_aligned_one(model, ids, points, tmp_path, monkeypatch):
    """As adapt --method align leaves it: every layer behind the first converted one is solved, too."""
    windows, layout = drawn(model, ids), Layout.from_layers(LAYERS, delayed=[1], ladder=[2], sync_tp_size=4)
    aligned, original = [], LayerwiseScores.__call__

    def noted(self, layout, *rest):
        aligned.append(layout)
        return original(self, layout, *rest)

    monkeypatch.setattr(LayerwiseScores, "__call__", noted)
    measurer = aligned_measurer(model, points, tmp_path)
    measured = measurer.measure(layout, False)
    assert f"{layout}, held out" in measurer.nlls  # aligned once, scored on all windows
    others = {window.tobytes() for window in measurer.scorer.windows.all.numpy()}
    assert not others & {w.tobytes() for windows in measurer.windows.values() for w in windows}
    held_out = measurer.measure(layout, True)
    again = aligned_measurer(model, points, tmp_path)  # a killed run goes on
    assert again.measure(layout, True) == held_out
    assert aligned == [layout, Layout.dense(LAYERS)]
    assert np.array_equal(measurer.windows[True], windows[SCORED + ALIGNED + HELD_OUT :][:SCORED])
    nats = by_commands(model, layout, windows, windows[:SCORED], tmp_path / "made", monkeypatch)
    assert measured.nats == pytest.approx(nats - read_sensitivity(points).dense_nll, abs=1e-5)
