"""The whole of Sync-Point Drop in one command, on the bundled model."""

import json
import math
import sys

import pytest
import torch
from safetensors.torch import load_file

from ladderize import load
from ladderize.adapt.layers import rewrite, spd
from ladderize.adapt.layers.layer_files import LayerFiles
from ladderize.adapt.layers.spd import SpdDocument
from ladderize.convert.heads import permute_heads, read_head_map
from ladderize.convert.inspection import read_retrainings
from ladderize.convert.sensitivity_file import LayerCost
from ladderize.demo.corpus import documents
from ladderize.demo.inputs import MODEL
from ladderize.errors import UserError
from ladderize.eval.results import Perplexity
from ladderize.files.parsing import parse_yaml
from tests import warm
from tests.helpers import invoke, listing, one_sentence

LADDERIZE = [sys.executable, "-m", "ladderize"]


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    """A glob of two files."""
    folder, texts = tmp_path_factory.mktemp("data"), list(documents(400, test=False, seed=7))
    for name, part in (("a", texts[:150]), ("b", texts[150:])):
        (folder / f"{name}.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in part))
    return folder / "*.jsonl"


def run(out, text, *options, samples=12, heldout=4, calibration=4, repair="blocks", start=invoke):
    """``ladderize spd`` on a little text. start: gets the words of the command line."""
    sizes = ["--samples", samples, "--heldout", heldout, "--calibration-samples", calibration, "--seq-len", 64]
    what = ["--sync-tp-size", 4, "--spd-fraction", 0.875, "--no-verify", "--threads", 1, "--repair", repair]
    what += ["--epochs", 1] if repair != "align" else []
    return start("spd", MODEL, out, "--data", text, *sizes, *what, *options)


def test_two_processes_make_the_same_model(tmp_path, text):
    few = {"samples": 6, "heldout": 2, "calibration": 3}
    assert run(tmp_path / "one", text, **few).code == 0
    result = run(tmp_path / "two", text, "--json", **few, start=lambda *words: warm.run_group([*LADDERIZE, *words]))
    assert result.returncode == 0, result.stderr
    assert len(json.loads(result.stdout)["blocks"]) == 8
    one, two = ((tmp_path / name / "model.safetensors").read_bytes() for name in ("one", "two"))
    assert one == two
    assert listing(tmp_path) == ["one", "two"]


def test_the_story(tmp_path, text):
    """Each step wins something, for which it takes more text."""
    shown = run(tmp_path / "out", text, "--epochs", 2, samples=48, heldout=16, calibration=16)
    assert shown.code == 0, shown.stderr
    assert listing(tmp_path) == ["out"]
    assert {"head_map.json", "sensitivity.json", "spd.json", "ladderize.yaml"} <= set(listing(tmp_path / "out"))
    document = json.loads((tmp_path / "out" / "spd.json").read_text())
    ppl = {name: value["perplexity"] for name, value in document["perplexity"].items()}
    assert list(ppl) == ["dense", "sync points dropped", "+ head grouping", "+ distillation"]
    assert ppl["dense"] < ppl["+ distillation"] < min(ppl["sync points dropped"], ppl["+ head grouping"])
    for value in ppl.values():
        assert f"{value:.4f}" in shown.stdout
    dropped = [row["block"] for row in document["blocks"] if row["dropped"]]
    assert len(dropped) == 7
    ascending = sorted(document["blocks"], key=lambda row: row["sensitivity"])
    assert {row["block"] for row in ascending[:7]} == set(dropped)
    for row in document["blocks"]:
        trained = row["dropped"]
        assert (row["distillation"] is not None) == (row["grouping"] is not None) == trained
    # the checkpoint: what was not trained lies as it did, what was grouped but not changed much lies in the new order
    record = parse_yaml((tmp_path / "out" / "ladderize.yaml").read_text())
    assert record["recipe"]["head_map"] == "head_map.json"
    card = (tmp_path / "out" / "README.md").read_text()
    assert f"{ppl['dense']:.4f} (dense)" in card
    assert f"{ppl['+ distillation']:.4f} (distillation)" in card
    head_map = read_head_map(tmp_path / "out" / "head_map.json")
    before, after = (load_file(folder / "model.safetensors") for folder in (MODEL, tmp_path / "out"))
    for layer in range(8):
        prefix = f"model.layers.{layer}."
        old = {name.removeprefix(prefix): tensor for name, tensor in before.items() if name.startswith(prefix)}
        moved = permute_heads(old, head_map.orders.get(layer, tuple(range(8))), 8, 4)
        for name, tensor in moved.items():
            difference = (after[prefix + name].float() - tensor.float()).norm() / tensor.float().norm()
            assert difference == 0 if layer not in dropped else difference < 0.25
    assert any(not torch.equal(before[name], after[name]) for name in before)
    load(tmp_path / "out")


def test_the_steps_are_taken_up_again(tmp_path, text, monkeypatch):
    assert run(tmp_path / "whole", text).code == 0
    for home, step in ((spd, "group_heads"), (spd, "distill"), (rewrite, "convert_checkpoint")):

        def killed(*arguments, **keywords):
            raise KeyboardInterrupt

        with monkeypatch.context() as patch:
            patch.setattr(home, step, killed)
            assert run(tmp_path / "out", text).code == 130
        assert listing(tmp_path) == ["out.ladderize-work", "whole"]
    monkeypatch.setattr(spd, "group_heads", lambda *a, **k: pytest.fail("the heads were grouped already"))
    monkeypatch.setattr(LayerFiles, "save", lambda *a: pytest.fail("the blocks were trained already"))
    assert run(tmp_path / "out", text).code == 0
    assert (tmp_path / "out" / "model.safetensors").read_bytes() == (
        tmp_path / "whole" / "model.safetensors"
    ).read_bytes()
    assert listing(tmp_path) == ["out", "whole"]


@pytest.mark.parametrize(
    ("options", "code", "message"),
    [
        (["--sync-tp-size", "3"], 1, "--sync-tp-size 3 does not divide"),
        (["--sync-tp-size", "1"], 2, "--sync-tp-size"),
        (["--spd-fraction", "1.5"], 2, "--spd-fraction must be above 0 and at most 1"),
        (["--head-grouping", "magic"], 2, "'magic' is not one of 'error', 'paper', 'none'"),
        (["--samples", "100000"], 1, "too few for 100000 to train on"),
        (["--lr", "-1", "--repair", "blocks"], 2, "--lr must be a finite number of at least 0, not -1"),
        (["--data", "{tmp}/empty.txt"], 1, "empty.txt holds no rows"),
    ],
)
def test_what_is_refused(tmp_path, text, options, code, message):
    (tmp_path / "empty.txt").write_text("")
    arguments = ["--sync-tp-size", 4, "--data", text, "--seq-len", 64]
    outcome = invoke(
        "spd", MODEL, tmp_path / "out", *arguments, *(option.replace("{tmp}", str(tmp_path)) for option in options)
    )
    assert outcome.code == code
    assert message in outcome.stderr
    assert listing(tmp_path) == ["empty.txt"]


def test_other_work_is_refused(tmp_path, text, monkeypatch):
    monkeypatch.setattr(spd, "group_heads", lambda *a, **k: (_ for _ in ()).throw(UserError("no")))
    assert run(tmp_path / "out", text).code == 1
    for options, other in (
        (["--seq-len", 32], "data"),
        (["--lr", 1e-3], "options"),
        (["--spd-fraction", 0.1], "spd_fraction"),
    ):
        assert f"with another {other}; delete it" in one_sentence(run(tmp_path / "out", text, *options))
    assert listing(tmp_path) == ["out.ladderize-work"]


def test_a_step_that_makes_it_worse_is_said():
    def measured(*values):
        names = ("dense", "sync points dropped", "+ head grouping", "+ distillation")
        return {name: Perplexity(value, None, 1.0, 8, 1, 8) for name, value in zip(names, values, strict=False)}

    assert spd.made_worse(measured(4.0, 6.0, 5.5, 4.5)) is None
    assert spd.made_worse(measured(4.0, 6.0)) is None
    assert spd.made_worse(measured(4.0, 6.0, 6.0, 5.5)) is None  # heads were grouped as they were
    assert spd.made_worse(measured(4.0, 6.0, 6.00004, 5.5)) is None  # the message would name the same figure twice
    for unknown in (measured(4.0, 6.0, math.nan, 4.5), measured(4.0, math.nan, 5.5, 4.5)):
        assert spd.made_worse(unknown).startswith("head grouping raised the held-out perplexity from ")
    told = spd.made_worse(measured(4.0, 6.0, 5.5, 5.75))
    assert told == (
        "distillation raised the held-out perplexity from 5.5000 (+ head grouping) to 5.7500; try a lower --lr, or more"
        " --samples"
    )


def test_alignment_repairs_by_default(tmp_path, text):
    shown = run(tmp_path / "out", text, samples=48, heldout=16, calibration=4, repair="align")
    assert shown.code == 0, shown.stderr
    document = SpdDocument.from_dict(json.loads((tmp_path / "out" / "spd.json").read_text()), "spd.json")
    assert document.repair == "align"
    (retraining,) = read_retrainings(tmp_path / "out")
    assert retraining.left_by_alignment == document.divergence["+ alignment"]
    first = min(row.block for row in document.blocks if row.dropped)
    for row in document.blocks:  # every block from the first dropped one on reads a changed stream
        assert (row.alignment is not None) == (row.block >= first)
        assert row.distillation is None
    assert list(document.perplexity) == ["dense", "sync points dropped", "+ head grouping", "+ alignment"]
    dense, before, grouped, aligned = (value.perplexity for value in document.perplexity.values())
    assert dense < aligned < min(before, grouped)
    load(tmp_path / "out")


@pytest.mark.parametrize("option", [("--epochs", 1), ("--lr", 1e-3), ("--patience", 1), ("--batch-size", 2)])
def test_options_of_training_have_no_effect_on_alignment(tmp_path, text, option):
    outcome = invoke("spd", MODEL, tmp_path / "out", "--data", text, "--sync-tp-size", 4, *option)
    assert f"{option[0]} has no effect with --repair align" in one_sentence(outcome)
    assert outcome.code == 2


def test_the_least_sensitive_are_dropped():
    def dropped(fraction, *values):
        return spd.least_sensitive([LayerCost(i, "spd", 0.0, s, s, s) for i, s in enumerate(values)], fraction)

    assert dropped(0.5, 0.04, 0.3, -0.02, 12.0) == [0, 2]
    assert dropped(0.01, 0.04, 0.3, -0.02, 12.0) == [2]  # at least one
    assert dropped(0.6, 2, 1, 2, 1, 2) == [0, 1, 3]  # of equals the lower
