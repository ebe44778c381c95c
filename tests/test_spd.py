"""The whole of Sync-Point Drop in one command, on the bundled model."""

import json
import sys
from dataclasses import replace
from unittest import mock

import pytest
import torch
from safetensors.torch import load_file

from ladderize import load
from ladderize.adapt.layers import rewrite
from ladderize.adapt.layers.layer_files import LayerFiles
from ladderize.adapt.layers.rewrite import METHODS
from ladderize.convert.assignment import read_assignment
from ladderize.convert.inspection import read_retrainings
from ladderize.demo.command import MODEL
from ladderize.demo.corpus import documents
from ladderize.files.documents import parse_yaml
from tests import warm
from tests.helpers import epochs, invoke, listing, one_sentence


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    """A glob of two files."""
    folder, texts = tmp_path_factory.mktemp("data"), list(documents(400, test=False, seed=7))
    for name, part in (("a", texts[:150]), ("b", texts[150:])):
        (folder / f"{name}.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in part))
    return folder / "*.jsonl"


def run(out, text, *options, samples=12, heldout=4, repair="blocks", start=invoke):
    """``ladderize spd`` on a little text. start: gets the words of the command line."""
    sizes = ["--samples", samples, "--heldout", heldout, "--seq-len", 64]
    what = ["--sync-tp-size", 4, "--spd-fraction", 0.875, "--no-verify", "--repair", repair]
    return start("spd", MODEL, out, "--data", text, *sizes, *what, *options)


def test_two_processes_make_the_same_model(tmp_path, text):
    few, quarter = {"samples": 6, "heldout": 2}, ("--spd-fraction", 0.25)
    assert run(tmp_path / "one", text, *quarter, **few).code == 0
    few["start"] = lambda *words: warm.run_group([sys.executable, "-m", "ladderize", *words])
    result = run(tmp_path / "two", text, *quarter, "--json", **few)
    assert result.returncode == 0, result.stderr
    assert len(json.loads(result.stdout)["layers"]) == 2
    one, two = ((tmp_path / name / "model.safetensors").read_bytes() for name in ("one", "two"))
    assert one == two
    assert listing(tmp_path) == ["one", "two"]


@pytest.mark.parametrize(
    ("repair", "document", "names"),
    [("blocks", "distillation.json", "heads"), ("align", "alignment.json", "heads,neurons")],
)
def test_the_story(tmp_path, text, repair, document, names):
    """The least sensitive blocks are dropped, heads and neurons assigned, and the repair wins something."""
    with epochs(1):
        shown = run(tmp_path / "out", text, "--assign", names, samples=48, heldout=16, repair=repair)
    assert shown.code == 0, shown.stderr
    assert listing(tmp_path) == ["out"]
    assert {"assignment.json", "sensitivity.json", document, "ladderize.yaml"} <= set(listing(tmp_path / "out"))
    content = json.loads((tmp_path / "out" / document).read_text())
    assert content["heldout_divergence"]["after"] < content["heldout_divergence"]["before"]
    dropped = [row["block"] for row in content["spd"] if row["dropped"]]
    ascending = sorted(content["spd"], key=lambda row: row["sensitivity"])
    assert {row["block"] for row in ascending[:7]} == set(dropped)
    assert [i for i, mode in enumerate(content["attention_sync"]) if mode == "dropped"] == dropped
    # every block from the first dropped one on reads a changed stream
    repaired = dropped if repair == "blocks" else list(range(dropped[0], 8))
    assert [row["layer"] for row in content["layers"]] == repaired
    (retraining,) = read_retrainings(tmp_path / "out")
    assert (retraining.method, retraining.model, retraining.layers) == (repair, str(MODEL), repaired)
    solved = {(row["layer"], one["projection"]) for row in content["layers"] for one in row.get("projections", [])
              if one["ridge"] is not None}  # fmt: skip
    # the checkpoint: what was not repaired lies as it did, what was moved but not changed much lies in the new order
    assert parse_yaml((tmp_path / "out" / "ladderize.yaml").read_text())["recipe"]["assignment"] == "assignment.json"
    found = read_assignment(tmp_path / "out" / "assignment.json")
    assert sorted(found.heads) == dropped
    assert sorted(found.neurons) == (dropped if "neurons" in names else [])
    assert all(report.error_after <= report.error_before for report in found.report.values())
    config = json.loads((MODEL / "config.json").read_text())
    before, after = (load_file(folder / "model.safetensors") for folder in (MODEL, tmp_path / "out"))
    for layer in range(8):
        prefix = f"model.layers.{layer}."
        old = {name.removeprefix(prefix): tensor for name, tensor in before.items() if name.startswith(prefix)}
        moved = found.permuted(layer, old, config)
        for name, tensor in moved.items():
            difference = (after[prefix + name].float() - tensor.float()).norm() / tensor.float().norm()
            same = (layer, name.rpartition(".")[0]) not in solved if repair == "align" else layer not in repaired
            assert difference == 0 if same else repair == "align" or difference < 0.25
    assert any(not torch.equal(before[name], after[name]) for name in before)
    load(tmp_path / "out")


def test_the_steps_are_taken_up_again(tmp_path, text, monkeypatch):
    quarter = ("--spd-fraction", 0.25)
    assert run(tmp_path / "whole", text, *quarter).code == 0
    stopped = replace(METHODS["blocks"], run=mock.Mock(side_effect=KeyboardInterrupt))
    for patched in (
        mock.patch.object(rewrite, "assign_layers", side_effect=KeyboardInterrupt),
        mock.patch.dict(METHODS, {"blocks": stopped}),
        mock.patch.object(rewrite, "convert_checkpoint", side_effect=KeyboardInterrupt),
    ):
        with patched:
            assert run(tmp_path / "out", text, *quarter).code == 130
        assert listing(tmp_path) == ["out.ladderize-work", "whole"]
    for options, other in ((["--seq-len", 32], "data"), (["--spd-fraction", 0.1], "spd_fraction (0.25, now 0.1)")):
        refused = one_sentence(run(tmp_path / "out", text, *quarter, *options))
        assert f"with another {other}; give the old value again" in refused
    monkeypatch.setattr(rewrite, "write_sensitivity", lambda *a, **k: pytest.fail("the blocks were measured already"))
    monkeypatch.setattr(rewrite, "assign_layers", lambda *a, **k: pytest.fail("heads were assigned already"))
    monkeypatch.setattr(LayerFiles, "save", lambda *a: pytest.fail("the blocks were trained already"))
    for _ in range(2):  # the second finds OUT, which this command wrote
        assert run(tmp_path / "out", text, *quarter).code == 0
    out, whole = ((tmp_path / name / "model.safetensors").read_bytes() for name in ("out", "whole"))
    assert out == whole
    assert listing(tmp_path) == ["out", "whole"]
    assert "out" in one_sentence(
        run(tmp_path / "out", text, *quarter, "--seq-len", 32)
    )  # another run does not replace it
