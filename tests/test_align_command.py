"""`ladderize adapt --method align`: what it writes and says, that it goes on, several processes, what is refused."""

import json
import shutil
import sys
from itertools import takewhile
from unittest import mock

import numpy as np
import pytest
import torch

from ladderize.adapt.layers import rewrite
from ladderize.adapt.layers.layer_files import LayerFiles
from ladderize.adapt.layers.options import AlignOptions
from ladderize.adapt.layers.windows import training_windows
from ladderize.checkpoint.opening import open_checkpoint
from ladderize.eval.results import Perplexity
from ladderize.modeling import load
from tests import warm
from tests.helpers import (
    ROOT,
    all_tensors,
    change_weights,
    changed_tensors,
    edit_json,
    invoke,
    invoke_well,
    listing,
    record_bars,
    refusal,
    save_llama,
    training_command,
)

WORK = "out.ladderize-work"
PLACE = ["dense", "ids.npy", "spd"]


def command(pair, out, *options, verified=False):
    (dense, model), verify = pair, [] if verified else ["--no-verify"]
    sizes = [] if "--samples" in options else ["--samples", 60, "--heldout", 12]
    write = [] if "--write" in options else ["--write", "last"]
    same = ["--distill-from", dense, "--data", dense.parent / "ids.npy", "--device", "cpu"]
    return ["adapt", model, out, "--method", "align", *same, *verify, *sizes, *write, *options]


def aligned(pair, out, *options, **more):
    return invoke_well(*command(pair, out, *options, **more))


def test_a_checkpoint_is_written_with_its_document(pair, tmp_path, monkeypatch):
    """It loads in plain transformers (which --no-verify would skip); its perplexity is the one that was measured."""
    bars = record_bars(monkeypatch)
    shown = aligned(pair, tmp_path / "out", "--json", verified=True)
    assert all(sum(bar.steps) == bar.total for bar in bars)
    assert bars[0].steps[1:] == [1, 7, 7, 7]  # the first is of layer 0, which is as it was
    document, out = json.loads(shown.stdout), tmp_path / "out"
    stored = json.loads((out / "alignment.json").read_text())
    assert len(stored.pop("run_sha256")) == 64
    assert stored == document
    assert [row["layer"] for row in document["layers"]] == [1, 2, 3]
    written = set()
    for row in document["layers"]:
        names = [entry["projection"] for entry in row["projections"]]
        assert [name.rpartition(".")[2][0] for name in names] == list("qkvogud")
        for entry in row["projections"]:
            assert (entry["error_after"] < entry["error_before"]) == (entry["ridge"] is not None)
            assert entry["error_after"] <= entry["error_before"]
            if entry["ridge"] is not None:
                written.add(f"model.layers.{row['layer']}.{entry['projection']}.weight")
    ppl = {name: value["perplexity"] for name, value in document["heldout_perplexity"].items()}
    assert list(ppl) == ["dense", "before", "after"]
    assert document["heldout_divergence"]["after"] < 0.7 * document["heldout_divergence"]["before"]
    assert changed_tensors(pair[1], out) == written
    assert listing(tmp_path) == sorted([*PLACE, "out"])
    assert "alignment:" in (out / "ladderize.yaml").read_text()
    # every key stands in its section of docs/files.md
    section = (ROOT / "docs" / "files.md").read_text().partition("## `alignment.json`")[2].partition("\n## ")[0]
    keys = {*document, *document["layers"][0], *document["layers"][0]["projections"][0], *document["options"]}
    keys -= {"schema_version", "ladderize_version", "attention_sync", "mlp_sync", "sync_tp_size"}  # of every document
    assert {key for key in keys if f"`{key}`" not in section and key != "layout"} == set()
    # the measures are those of the model
    options = AlignOptions(str(tmp_path / "ids.npy"), samples=60, heldout=12)
    ids = training_windows(open_checkpoint(str(pair[0])), options).heldout
    np.save(tmp_path / "heldout.npy", ids.numpy())
    scored = json.loads(invoke("eval", out, "--perplexity", tmp_path / "heldout.npy", "--json").stdout)
    assert scored["models"][0]["ladderize"]["perplexity"]["perplexity"] == pytest.approx(ppl["after"], rel=1e-5)
    with torch.no_grad():
        p, q = (load(folder, dtype="float32")(ids).logits[:, :-1].log_softmax(-1) for folder in (pair[0], out))
    divergence = float((p.exp() * (p - q)).sum(-1).mean())
    assert divergence == pytest.approx(document["heldout_divergence"]["after"], rel=1e-4)


def test_write_best_writes_nothing_that_got_worse(pair, tmp_path):
    """Farther from the dense model, although its perplexity fell."""
    fell = {"dense": 9.2, "before": 9.0, "after": 8.9}
    found = {name: Perplexity(x, None, 1.0, 8, 1, 8) for name, x in fell.items()}
    measures = found, {"before": 0.25, "after": 0.5}
    with mock.patch.object(rewrite, "heldout_measures", return_value=measures):
        message = refusal(*command(pair, tmp_path / "out", "--write", "best"))
    assert "alignment never lowered the held-out KL (before 0.25, after 0.5), so nothing" in message
    assert listing(tmp_path) == sorted([*PLACE, WORK])
    assert "layer-00001.safetensors" in listing(tmp_path / WORK)
    rose = {**found, "after": Perplexity(9.1, None, 1.0, 8, 1, 8)}
    with mock.patch.object(rewrite, "heldout_measures", return_value=(rose, measures[1])):
        written = aligned(pair, tmp_path / "out", "--write", "last")
    assert "layers up to 3 are already aligned" in written.stderr
    assert listing(tmp_path) == sorted([*PLACE, "out"])


@pytest.mark.parametrize("method", ["align", "blocks", "full", "spd"])
@pytest.mark.parametrize("wide", ["norm", "proj"])
def test_every_tensor_keeps_its_own_dtype(place, tmp_path, method, wide):
    """The others are bfloat16. The same run on equal weights in float32, rounded once, gives the same."""
    for run in ("mixed", "float32"):
        shutil.copytree(place, tmp_path / run)
        for model in (tmp_path / run / "dense", tmp_path / run / "spd"):
            change_weights(model, lambda name, tensor: tensor if wide in name else tensor.bfloat16())
            if run == "float32":
                change_weights(model, lambda _, tensor: tensor.float())
        invoke_well(*training_command(method, tmp_path / run, tmp_path / run / "out"), "--dtype", "float32")
    before, mixed, exact = (all_tensors(tmp_path / folder) for folder in ("mixed/spd", "mixed/out", "float32/out"))
    changed = {name for name, tensor in exact.items() if not torch.equal(tensor, before[name].float())}
    assert changed
    if wide == "norm" and method == "align":
        # what comes after reads what was rounded; and a ridge is chosen by the errors of the rounded weights
        files = [tmp_path / run / "out" / "alignment.json" for run in ("mixed", "float32")]
        documents = [json.loads(path.read_text()) for path in files]
        chosen = [{one["projection"]: one["ridge"] for one in each["layers"][0]["projections"]} for each in documents]
        alike = [name for name in ("mlp.gate_proj", "mlp.up_proj") if chosen[0][name] == chosen[1][name]]
        changed &= {f"model.layers.0.{name}.weight" for name in alike}
    assert {name: tensor.dtype for name, tensor in mixed.items()} == {name: x.dtype for name, x in before.items()}
    for name, tensor in mixed.items():
        if name in changed or "norm" in name:
            assert torch.equal(tensor, exact[name].to(tensor.dtype)), name


@pytest.mark.parametrize("method", ["align", "blocks"])
def test_a_killed_run_ends_with_the_same_weights(place, tmp_path, monkeypatch, method):
    invoke_well(*training_command(method, place, tmp_path / "whole"))
    save, solved = LayerFiles.save, []

    def killed(self, layer, *rest):
        save(self, layer, *rest)
        solved.append(layer)
        if len(solved) == 1:
            raise KeyboardInterrupt

    monkeypatch.setattr(LayerFiles, "save", killed)
    again = training_command(method, place, tmp_path / "out")
    assert invoke(*again).code == 130
    assert listing(tmp_path) == [WORK, "whole"]
    assert listing(tmp_path / WORK) == ["layer-00000.safetensors", "run.json"]
    assert "holds unfinished work of a run with another options" in refusal(*again, "--seed", 1)
    assert "0 are already " in invoke_well(*again).stderr
    assert solved == ([0, 1, 2, 3] if method == "align" else [0, 2])
    out, whole = ((tmp_path / name / "model.safetensors").read_bytes() for name in ("out", "whole"))
    assert out == whole
    assert listing(tmp_path) == ["out", "whole"]


def test_two_processes_solve_the_same_weights(pair, tmp_path):
    """But for rounding: sums are added up in another order. One of them has no window that is held out."""
    sizes = ["--samples", 61, "--heldout", 1]
    aligned(pair, tmp_path / "one", *sizes)
    more = command(pair, tmp_path / "two", *sizes, "--json")
    result = warm.run_group([sys.executable, "-m", "ladderize", *more])
    assert result.returncode == 0, result.stderr
    assert [row["layer"] for row in json.loads(result.stdout)["layers"]] == [1, 2, 3]
    documents = [json.loads((tmp_path / name / "alignment.json").read_text()) for name in ("one", "two")]
    entries = [
        {f"{row['layer']}.{entry['projection']}": entry for row in document["layers"] for entry in row["projections"]}
        for document in documents
    ]
    assert list(entries[0]) == list(entries[1])
    # only up to where another ridge is chosen, as rounding may of two that are as good: what comes after reads another
    # stream
    alike = list(takewhile(lambda name: entries[0][name]["ridge"] == entries[1][name]["ridge"], entries[0]))
    for name in [*entries[0]][: len(alike) + 1]:
        assert entries[1][name]["error_after"] == pytest.approx(entries[0][name]["error_after"], rel=0.05)
    one, two = (all_tensors(tmp_path / out) for out in ("one", "two"))
    for key in (f"model.layers.{name}.weight" for name in alike):
        assert (one[key] - two[key]).norm() < 1e-3 * one[key].norm()
    one, two = (document["heldout_divergence"] for document in documents)
    assert two == pytest.approx(one, rel=1e-3 if len(alike) == len(entries[0]) else 0.1)
    assert listing(tmp_path) == sorted([*PLACE, "one", "two"])


@pytest.mark.parametrize(
    ("options", "code", "message"),
    [
        (["--train", ":2"], 1, "--train: 0 are the same as in the dense model; only 1:4 can be rewritten"),
        (["--samples", 70, "--heldout", 3], 1, "72 windows of 16 tokens, too few for 70 to train on and 3 held out"),
        (["--data", "b.npy"], 2, "and one --data file"),
        (["--lr", 1e-3], 2, "--lr has no effect with --method align"),
    ],
)
def test_what_is_refused(pair, tmp_path, options, code, message):
    assert message in refusal(*command(pair, tmp_path / "out", *options), code=code)
    assert listing(tmp_path) == PLACE


def test_models_that_do_not_belong_together(pair, tmp_path):
    """Another model of the same shape is refused, also one that shares the embedding; one that shares the unconverted
    layers and was trained from there on is a relative."""
    dense, model = pair
    wide = save_llama(tmp_path / "wide", seed=5, intermediate_size=64)
    turned = save_llama(tmp_path / "turned", seed=5)
    edit_json(turned / "config.json", rope_parameters={"rope_type": "default", "rope_theta": 5e5})
    source, strangers = all_tensors(dense), {}
    for number, same in enumerate(([], ["embed_tokens"], ["embed_tokens", "layers.0"])):
        strangers[number] = save_llama(tmp_path / f"stranger {number}", seed=6)
        kept = {name for name in source if any(prefix in name for prefix in same)}
        change_weights(strangers[number], lambda name, weight, kept=kept: source[name] if name in kept else weight)
    for teacher, student, message in (
        (dense, dense, "is dense"),
        (model, model, "is not dense (4 layers: spd 1:4 (sync_tp_size 4)); name the model that"),
        (wide, model, "shapes; name the model that"),
        (turned, model, "in its rope; name the model that"),
        (strangers[0], model, f"has other weights than {model} (in model.embed_tokens.weight); name the model that"),
        (strangers[1], model, f"has other weights than {model} (in model.layers.0.mlp.down_proj.weight); name the"),
    ):
        assert message in refusal(*command((teacher, student), tmp_path / "out"))
    assert not {"out", WORK} & set(listing(tmp_path))
    aligned((strangers[2], model), tmp_path / "out")
