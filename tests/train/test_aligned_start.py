"""``adapt --align``: an alignment whose checkpoint stays beside OUT, and a retraining that starts there."""

import json

import pytest

from ladderize.adapt.train import run
from tests.helpers import all_tensors, invoke, invoke_well, listing, refusal
from tests.train.commands import arguments, losses_of, same_weights, stopped_before_the_end, succeed


def aligned(place, out, *more, steps=4, run=invoke_well, **kwargs):
    return run(*arguments(place, out, "--align", "--distill-from", place / "dense", *more, steps=steps, **kwargs))


def refused(*given, **more):
    return aligned(*given, run=refusal, **more)


@pytest.fixture(scope="module")
def done(place, tmp_path_factory):
    folder = tmp_path_factory.mktemp("aligned")
    aligned(place, folder / "out")
    return folder


def test_it_is_an_alignment_and_a_retraining_of_that(place, done, tmp_path):
    assert listing(done) == ["out", "out-aligned"]
    invoke_well(
        *("adapt", place / "both", tmp_path / "beside", "--method", "align", "--distill-from", place / "dense"),
        *("--data", place / "ids.npy", "--seq-len", 48, "--device", "cpu", "--write", "last"),
        "--no-verify",
    )
    start = all_tensors(done / "out-aligned")
    assert same_weights(all_tensors(tmp_path / "beside"), start)
    succeed(place, tmp_path / "out", "--distill-from", place / "dense", model=tmp_path / "beside", steps=4)
    assert same_weights(all_tensors(tmp_path / "out"), all_tensors(done / "out"))
    assert losses_of(tmp_path / "out") == losses_of(done / "out")
    from_converted = succeed(place, tmp_path / "converted", "--distill-from", place / "dense", steps=4)
    assert losses_of(done / "out")[0] < from_converted["loss"]["first"]
    shown = invoke("inspect", done / "out").stdout
    assert shown.index("align: layers 0:4") < shown.index("full: layers 0:4")


def test_a_finished_alignment_is_not_made_again(place, done, tmp_path, monkeypatch):
    """Stopped after the alignment, the same command trains on from there; done, it finds both."""
    with monkeypatch.context() as patch:
        patch.setattr(run, "make_model", lambda *_: 1 / 0)
        assert aligned(place, tmp_path / "out", run=invoke).code != 0
    assert listing(tmp_path) == ["out-aligned"]
    monkeypatch.setattr("ladderize.adapt.layers.align.LayerAlignment", lambda *_, **__: pytest.fail("aligned again"))
    for said in ("out-aligned is complete", "out is complete"):
        assert said in aligned(place, tmp_path / "out").stderr
    assert same_weights(all_tensors(tmp_path / "out"), all_tensors(done / "out"))


def test_a_begun_training_goes_on_from_what_was_aligned(place, tmp_path, monkeypatch):
    """Also with --overwrite, with which an alignment would be made anew."""
    stopped_before_the_end(place, tmp_path / "out", "--align", "--distill-from", place / "dense", "--overwrite")
    before = all_tensors(tmp_path / "out-aligned")
    monkeypatch.setattr("ladderize.adapt.layers.align.LayerAlignment", lambda *_, **__: pytest.fail("aligned again"))
    outcome = aligned(place, tmp_path / "out", "--overwrite", steps=9)
    assert "resuming after step 6" in outcome.stderr
    assert same_weights(all_tensors(tmp_path / "out-aligned"), before)


def test_out_is_looked_at_before_anything_is_aligned(place, tmp_path, monkeypatch):
    monkeypatch.setattr(run, "adapt_layers", lambda *_, **__: pytest.fail("aligned"))
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "mine.txt").write_text("mine")
    for method in ("full", "lora"):
        assert "is not empty; choose another folder" in refused(place, tmp_path / "out", "--method", method)
    assert "--overwrite does not replace it" in refused(place, tmp_path / "out", "--overwrite")
    assert "is the source" in refused(place, place / "dense", "--overwrite")
    assert listing(tmp_path) == ["out"]


def test_it_reads_as_few_windows_as_it_is_told_to(place, tmp_path):
    """A training that was begun belongs to them."""
    stopped_before_the_end(place, tmp_path / "out", "--align", "--distill-from", place / "dense", "--samples", 3)
    document = json.loads((tmp_path / "out-aligned" / "alignment.json").read_text())
    assert document["data"]["samples"] == 3
    assert "a run with another samples (3, now 4)" in refused(place, tmp_path / "out", "--samples", 4)


def test_what_is_refused(place, done, tmp_path):
    dense = refused(place, tmp_path / "out", "--train", "all", model="dense")
    assert "is dense; --align aligns converted weights" in dense
    assert "was retrained already (full)" in refused(place, tmp_path / "out", model=done / "out")
    assert listing(tmp_path) == []
