"""`ladderize plot` and `adapt --plot`: what the curves are read from, and that they are drawn."""

import json

import pytest

from ladderize.adapt.retrain.curves import read_curves, smoothed
from ladderize.errors import UserError
from tests.helpers import invoke, one_sentence

METRICS = [
    {"step": 0, "heldout_perplexity": 9.0, "dense_heldout_perplexity": 4.0},
    *({"step": step, "loss": 2.0 / step, "divergence": 1.0 / step} for step in range(1, 61)),
    {"step": 60, "heldout_perplexity": 5.0},
]


def write_run(folder, *, about="adaptation.json", weight=1.0, tail=""):
    folder.mkdir()
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in METRICS) + tail)
    objective = {"distill_weight": weight, "temperature": 1.0}
    content = {"options": {"objective": objective}} if about == "adaptation.json" else {"objective": objective}
    (folder / about).write_text(json.dumps({"schema_version": 1, **content}))
    return folder


def write_blocks(folder, name):
    folder.mkdir()
    report = {"block": 3, "curve": [[0, 0.5], [10, 0.25]]}
    blocks = [report] if name == "distillation.json" else [{"block": 2, "distillation": None}, {"distillation": report}]
    (folder / name).write_text(json.dumps({"schema_version": 1, "blocks": blocks}))
    return folder


def write_layers(folder, name, layers=(2, 3)):
    folder.mkdir(exist_ok=True)
    projections = [
        {"projection": projection, "ridge": ridge, "error_before": 0.4, "error_after": after}
        for projection, ridge, after in [
            *(("self_attn.q_proj", 0.1, 0.1), ("self_attn.k_proj", None, 0.4), ("self_attn.v_proj", 0.1, 0.1)),
            *(("self_attn.o_proj", 0.01, 0.3), ("mlp.gate_proj", 0.1, 0.2), ("mlp.up_proj", 0.1, 0.1)),
            ("mlp.down_proj", None, 0.4),
        ]
    ]
    reports = [{"layer": layer, "seconds": 1.0, "projections": projections} for layer in layers]
    content = {"layers": reports} if name == "alignment.json" else {"blocks": [{"alignment": own} for own in reports]}
    (folder / name).write_text(json.dumps({"schema_version": 1, **content}))
    return folder


@pytest.mark.parametrize(
    ("about", "weight", "label"), [("adaptation.json", 1.0, "KL"), ("run.json", 0, "cross-entropy")]
)
def test_what_a_retraining_left_is_read(tmp_path, about, weight, label):
    curves = read_curves(write_run(tmp_path / "run", about=about, weight=weight, tail='{"step": 61, "lo'))
    assert curves.label == f"loss ({label})"
    assert curves.loss == [(step, 2.0 / step) for step in range(1, 61)]
    assert curves.heldout == [(0, 9.0), (60, 5.0)]
    assert curves.dense == 4.0


@pytest.mark.parametrize("name", ["distillation.json", "spd.json"])
def test_what_a_distillation_left_is_read(tmp_path, name):
    assert read_curves(write_blocks(tmp_path / "run", name)).blocks == {3: [(0, 0.5), (10, 0.25)]}


@pytest.mark.parametrize("name", ["alignment.json", "spd.json"])
def test_what_an_alignment_left_is_read(tmp_path, name):
    aligned = read_curves(write_layers(tmp_path / "run", name)).aligned
    assert [report.layer for report in aligned] == [2, 3]
    assert aligned[0].errors("attention reads") == pytest.approx((0.4, 0.2))
    assert aligned[0].errors("attention writes") == pytest.approx((0.4, 0.3))
    assert aligned[0].errors("MLP reads") == pytest.approx((0.4, 0.15))
    assert aligned[0].errors("MLP writes") == pytest.approx((0.4, 0.4))


def test_all_that_a_chain_left_is_drawn(tmp_path):
    """Aligned, then distilled, then retrained: what each step wrote goes along with the checkpoint."""
    chain = write_run(tmp_path / "chain")
    write_layers(chain, "alignment.json")
    write_blocks(tmp_path / "blocks", "distillation.json").joinpath("distillation.json").rename(
        chain / "distillation.json"
    )
    curves = read_curves(chain)
    assert curves.aligned
    assert curves.blocks
    assert curves.loss
    assert invoke("plot", chain, write_layers(tmp_path / "other", "spd.json"), "--out", tmp_path / "c").code == 0
    picture = (tmp_path / "c.svg").read_text()
    titles = ["chain: aligned layers", "other: aligned layers", "chain: distilled blocks", "Training loss"]
    titles.append("Held-out perplexity; dashed: the dense model, 4")
    assert [picture.count(f">{title}<") for title in titles] == [1, 1, 1, 1, 1]
    assert picture.count(">layer<") == 2
    assert picture.count(">step<") == 3
    assert all(f">{name}<" in picture for name in ("attention reads", "MLP writes", "before", "after", "block 3"))


def test_several_runs_are_drawn(tmp_path):
    runs = [write_run(tmp_path / "a"), write_run(tmp_path / "b", weight=0.5), write_blocks(tmp_path / "c", "spd.json")]
    outcome = invoke("plot", *runs, "--out", tmp_path / "curves")
    assert outcome.code == 0, outcome.stderr
    assert (tmp_path / "curves.png").read_bytes()[:4] == b"\x89PNG"
    picture = (tmp_path / "curves.svg").read_text()
    assert "<svg" in picture
    assert str(tmp_path / "curves.png") in outcome.stdout


def test_points_are_smoothed():
    assert smoothed([(1, 2.0), (2, 4.0)]) == [(1.0, 2.0), (2.0, 4.0)]
    assert len(smoothed([(step, 1.0) for step in range(1000)])) == 20


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "is not a folder; name the output of adapt or spd"),
        ({}, "has no metrics.jsonl, and no alignment.json, spd.json, distillation.json with aligned layers or"),
        ({"metrics.jsonl": "x\n"}, "line 1 is not JSON"),
        ({"metrics.jsonl": '{"step": "x"}\n'}, "step is 'x', but must be of type int"),
        ({"spd.json": '{"schema_version": 1, "blocks": [{"distillation": null}]}'}, "has no metrics.jsonl"),
    ],
)
def test_what_cannot_be_drawn(tmp_path, content, message):
    folder = tmp_path / "run"
    if content is not None:
        folder.mkdir()
        for name, text in content.items():
            (folder / name).write_text(text)
    with pytest.raises(UserError, match=message):
        read_curves(folder)
    assert message in one_sentence(invoke("plot", folder, "--out", tmp_path / "curves"))


def test_a_stem_that_cannot_be_written(tmp_path):
    assert "--out" in one_sentence(invoke("plot", write_run(tmp_path / "a"), "--out", tmp_path / "none" / "curves"))
