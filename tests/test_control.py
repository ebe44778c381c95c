"""``control`` of a sweep.yaml: the dense model after the same training, a point of its own."""

import json

from ladderize.layout import Layout
from ladderize.sweep.plan import control_stages
from ladderize.sweep.sweep_file import AdaptStage
from tests.helpers import invoke
from tests.sweeps import planner, spec, sweep


def controlled(place, *methods, **changes):
    """An alignment, and training on text too, with a control."""
    same = {"data": str(place / "ids.npy"), "seq_len": 16, "write": "last"}
    align = {**same, "method": "align", "samples": 8, "heldout": 4}
    trained = [
        {**same, "method": method, "max_steps": 2, "batch_size": 2, "distill_weight": 0.5, "lr": 0.01}
        for method in methods
    ]
    layouts = [{"ladder": "3"}, {"spd": "0", "sync_tp_size": 2}]
    adapt = ["none", {"stages": [align, *trained], "control": True}]
    return spec(place, **{"layouts": layouts, "sensitivity": None, "adapt": adapt, "bench": None, **changes})


def test_the_control_is_the_dense_model_with_the_same_training(place, tmp_path):
    """Trained are the layers that one of the layouts converts; an alignment is left out, an adapter merged."""
    out = tmp_path / "out"
    outcome, document = sweep(tmp_path, controlled(place, "lora", "full"))
    assert document["complete"] is True
    dense, *points, control = document["points"]
    assert (control["name"], control["adapted"]) == ("dense, lora + full", "lora + full")
    assert {**control, "attention_sync": dense["attention_sync"]} == control
    assert set(control["mlp_sync"]) == {"blocking"}
    assert control["timed"] == dense["timed"]
    assert control["tokens"] == 2 * 2 * 2 * 16
    trained = [point for point in points if point["adapted"] == "align + lora + full"]
    assert [point["control"] for point in trained] == [control["model"]] * 2
    assert [point["control"] for point in (dense, control, points[0])] == [None] * 3
    layouts = [Layout(tuple(p["attention_sync"]), tuple(p["mlp_sync"]), p["sync_tp_size"]) for p in trained]
    layers = sorted({layer for layout in layouts for layer in layout.converted_layers})
    assert len(layers) < 4  # so that this is not all of them
    assert json.loads((out / control["adaptation"] / "adaptation.json").read_text())["layers"] == layers
    first, second = control["stages"][:2]
    assert f"ladderize adapt {place / 'dense'} " in first["command"]
    assert f"ladderize adapt {first['output']}/model " in second["command"]
    assert control["name"] in outcome.stdout
    page = invoke("report", out, "--out", tmp_path / "page.html")
    assert page.code == 0, page.stderr
    assert control["name"] in (tmp_path / "page.html").read_text()


def test_a_control_waits_until_all_layouts_are_known(place, tmp_path):
    layouts = [{"ladder": "3"}, {"name": "half", "mode": "spd", "fraction": 0.5, "sync_tp_size": 2}]
    sensitivity = {"data": str(place / "ids.npy"), "samples": 4}
    made = planner(tmp_path, controlled(place, "full", layouts=layouts, sensitivity=sensitivity))
    plan = made.plan()
    assert (plan.points[-1].name, plan.points[-1].hold.status) == ("dense, full", "waiting")
    assert plan.points[-1].stages == []
    (failed,) = plan.sensitivities
    lost = made.plan(lost={failed.key})
    assert lost.points[-1].hold.status == "skipped"
    assert not lost.waiting


def test_what_of_a_recipe_is_of_the_dense_model():
    full = {"distill_weight": 0.5, "hidden_weight": 2.0, "lr": 0.1}
    stages = [
        AdaptStage("a", "align", {"data": "x"}),
        AdaptStage("a", "full", full, promote=3),
        AdaptStage("a", "lora", {"train": "all"}),
        AdaptStage("a", "full", {"train": "converted"}),
    ]
    layouts = [Layout.from_layers(6, ladder=[2]), Layout.from_layers(6, spd=[4, 5], sync_tp_size=2)]
    made = control_stages(stages, layouts)
    assert [(stage.method, stage.options, stage.promote) for stage in made] == [
        ("full", {"distill_weight": 0.5, "lr": 0.1, "train": "2,4:6"}, None),
        ("lora", {"train": "all"}, None),
        ("full", {"train": "2,4:6"}, None),
    ]
