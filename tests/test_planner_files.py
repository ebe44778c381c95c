"""The planner's files: costs from a sweep, the recipe, the picture."""

import json
import math
from dataclasses import replace

import numpy as np
import pytest

from ladderize.checkpoint.opening import read_checkpoint
from ladderize.checkpoint.tensors import fingerprint
from ladderize.convert.recipe import read_recipe
from ladderize.errors import UserError
from ladderize.eval.options import EvalOptions
from ladderize.eval.results import EvalResults, EvaluatedModel, ModelResult, Perplexity
from ladderize.files.documents import write_json
from ladderize.layout import Layout
from ladderize.planning.plans.chosen_files import draw_front, write_plan_recipe
from ladderize.planning.plans.costs import PlanCosts, estimate_costs, read_plan_costs, read_retrained_costs
from ladderize.planning.plans.document import PlanChoice
from ladderize.planning.plans.layout_choice import plan_layout
from ladderize.planning.plans.layout_space import chosen_options, option_seconds
from tests.helpers import save_llama
from tests.planner_toys import (
    FakeMeasurer,
    all_options,
    pass_seconds,
    random_space,
    sensitivity_of,
    sweep_point,
    target_of,
    write_sweep_document,
)

LAYERS = 4
RETRAINED = {
    "ladder 2": ({"ladder": [2, 3]}, "full", 0.01),
    "ladder 2, not retrained": ({"ladder": [2, 3]}, "none", 0.4),
    "ladder all": ({"ladder": range(4)}, "full", 0.05),
    "spd all": ({"spd": range(4), "sync_tp_size": 2}, "blocks", 0.12),
    "both": ({"spd": range(4), "ladder": range(4), "sync_tp_size": 2}, "lora", 0.3),
    "for 4": ({"spd": [1], "sync_tp_size": 4}, "none", 0.001),
}


def results(layout, nll, *, windows=4):
    """results.json of one model. nll: of each window, in nats per token, of 10 tokens each."""
    perplexity = Perplexity(
        perplexity=math.exp(float(np.mean(nll))),
        stderr=0.05,
        nll_per_token=float(np.mean(nll)),
        tokens=10 * windows,
        windows=windows,
        seq_len=11,
        tokens_per_s=1.0,
        data_sha256="d" * 64,
        ids_sha256="i" * 64,
        window_nll=(10 * np.asarray(nll)).tolist(),
        window_tokens=[10] * windows,
    )
    model = EvaluatedModel(
        model="model",
        layout=str(layout),
        **layout.to_config(),
        parameters=1,
        dtype="float32",
        device="cpu",
        torch_version="2",
        transformers_version="5",
        add_bos_token=None,
        perplexity=perplexity,
    )
    return EvalResults(EvalOptions(tasks=()), [ModelResult(model)]).to_dict()


def write_sweep(folder, model):
    """A finished sweep of RETRAINED, and what each window costs more there."""
    folder.mkdir(exist_ok=True)
    dense_nll = np.random.uniform(1, 2, 4)
    differences, points = {}, []
    for name, (layers, adapted, nats) in {"dense": ({}, "none", 0.0), **RETRAINED}.items():
        layout = Layout.from_layers(LAYERS, **layers)
        differences[name] = nats * (1 + np.random.uniform(-0.2, 0.2, 4)) if nats else np.zeros(4)
        write_json(folder / f"{name}.json", results(layout, dense_nll + differences[name]))
        place = str(model) if name == "dense" else f"models/{name}"
        points.append(sweep_point(name, layout, model=place, results=f"{name}.json", adapted=adapted))
    return write_sweep_document(folder, model, points), differences


@pytest.fixture
def model(tmp_path):
    return save_llama(tmp_path / "model")


def mark(model):
    return fingerprint(read_checkpoint(model))


def test_costs_of_a_sweep_are_those_of_its_perplexities(tmp_path, model):
    _, differences = write_sweep(tmp_path / "sweep", model)
    for path in (tmp_path / "sweep", tmp_path / "sweep" / "sweep.json"):
        found = read_retrained_costs(path, num_layers=LAYERS, fingerprint=mark(model), sync_tp_size=2)
        assert [one.name for one in found.layouts] == [name for name in RETRAINED if name != "for 4"]
        (note,) = found.notes
        assert "for 4 is left out" in note
    for one in found.layouts:
        layers, _, _ = RETRAINED[one.name]
        assert one.layout == Layout.from_layers(LAYERS, **layers)
        assert one.cost.increase == pytest.approx(differences[one.name].mean())
        assert one.cost.increase_stderr == pytest.approx(differences[one.name].std(ddof=1) / 2)
        assert one.model == str((tmp_path / "sweep" / "models" / one.name).resolve())


def test_the_choice_is_among_what_was_retrained(tmp_path, model):
    _, differences = write_sweep(tmp_path / "sweep", model)
    seconds = pass_seconds()
    points_file = tmp_path / "points.json"
    sensitivity = sensitivity_of(LAYERS, sync_tp_size=2, pairs=True)
    write_json(points_file, replace(sensitivity, fingerprint=mark(model)).to_dict())
    target = target_of("16%")
    read = {"num_layers": LAYERS, "fingerprint": mark(model)}
    how = (seconds, 15, "end_to_end", target)
    alone = plan_layout(*how, read_plan_costs(None, tmp_path / "sweep", **read, sync_tp_size=2))
    both = plan_layout(*how, read_plan_costs(points_file, tmp_path / "sweep", **read, sync_tp_size=None))
    # by hand
    constant, layer = option_seconds(seconds, 15, "end_to_end")
    within = {
        name: constant + layer[chosen_options(Layout.from_layers(LAYERS, **layers))].sum()
        for name, (layers, _, _) in RETRAINED.items()
        if name != "for 4" and differences[name].mean() <= math.log(1.16)
    }
    best = min(within, key=lambda name: (within[name], differences[name].mean()))
    assert alone.chosen == both.chosen
    assert alone.model.endswith(best)
    assert alone.chosen.ms == pytest.approx(1000 * within[best])
    assert alone.statement == "measured by the sweep"
    assert PlanChoice.from_dict(both.to_dict(), "plan.json") == both
    assert alone.beyond is None
    # what single changes suggest is beside it, unless it is the same layout or there is none
    costs = read_plan_costs(points_file, None, **read, sync_tp_size=None)
    suggested, notes = None, []
    try:
        suggested = plan_layout(seconds, 15, "end_to_end", target, costs).chosen
    except UserError as error:
        notes = [f"of what was not retrained: {error}"]
    if suggested is not None and suggested.as_layout == both.chosen.as_layout:
        suggested = None
    assert both.beyond == suggested
    assert both.notes == [*alone.notes, *notes]
    # the front: undominated, and ends with the dense layout
    assert alone.front[-1].speedup == 1
    speeds, nats = [point.speedup for point in alone.front], [point.nats for point in alone.front]
    assert speeds == sorted(speeds, reverse=True)
    assert nats == sorted(nats, reverse=True)


def test_sweeps_of_others_are_refused(tmp_path, model):
    folder = tmp_path / "sweep"
    document, _ = write_sweep(folder, model)
    right = {"num_layers": LAYERS, "fingerprint": mark(model), "sync_tp_size": None}
    other = save_llama(tmp_path / "other", seed=1)
    for wrong, message in (
        ({"num_layers": 5}, "4 layers, but this one has 5"),
        ({"fingerprint": mark(other)}, "sweep of another model"),
    ):
        with pytest.raises(UserError, match=message):
            read_retrained_costs(folder, **(right | wrong))
    with pytest.raises(UserError, match="sync_tp_size 2 and 4; say with --sync-tp-size"):
        read_plan_costs(None, folder, **right)
    with pytest.raises(UserError, match="--sync-tp-size 8 has no effect: no layout of"):
        read_plan_costs(None, folder, **right | {"sync_tp_size": 8})
    dense = json.loads((folder / "dense.json").read_text())
    changed = json.loads((folder / "both.json").read_text())
    changed["models"][0]["ladderize"]["perplexity"]["data_sha256"] = "e" * 64
    write_json(folder / "both.json", changed)
    with pytest.raises(UserError, match="both is of other data"):
        read_retrained_costs(folder, **right)
    del dense["models"][0]["ladderize"]["perplexity"]
    write_json(folder / "dense.json", dense)
    with pytest.raises(UserError, match="the dense model has no perplexity"):
        read_retrained_costs(folder, **right)
    first, *others = document.points
    away = replace(document, points=[replace(first, results="../../secret.json"), *others])
    write_json(folder / "sweep.json", away.to_dict())
    with pytest.raises(UserError, match="lies outside of its folder"):
        read_retrained_costs(folder, **right)


# ---- what is written ----


def choice_of(layers=LAYERS, *, limit=0, pairs=True):
    points = PlanCosts(estimated(layers, pairs), None, 2)
    space = random_space(layers, alike=True)
    space.nats[:] = points.points.nats
    measurer = FakeMeasurer(space) if limit else None
    return plan_layout(pass_seconds(), 15, "end_to_end", target_of("40%"), points, measurer=measurer, limit=limit)


def estimated(layers, pairs):
    return estimate_costs(sensitivity_of(layers, sync_tp_size=2, pairs=pairs), "a file\nwith a line.json")


def test_a_recipe_makes_the_layout(tmp_path):
    """Of every layout of three layers, named or not."""
    choice = choice_of(3)
    source = Layout.dense(3)
    for options in all_options(3):
        chosen = replace(random_space(3, alike=True).described(options), speedup=1.2, estimated_nats=0.01)
        layout, path = chosen.as_layout, tmp_path / "recipe.yaml"
        write_plan_recipe(path, replace(choice, chosen=chosen))
        assert read_recipe(path).layout(source) == layout
    text = path.read_text().replace("\n# ", " ")
    assert text.startswith(
        "# Chosen by `ladderize plan` for --max-ppl-increase 40%, by the costs of a file?with a line"
    )
    assert "1.200x of the dense layout's speed, predicted" in text
    assert "+1.01% estimated (not verified)" in text


def test_the_picture(tmp_path):
    for choice in (choice_of(12), choice_of(LAYERS, limit=10)):
        for path in draw_front(choice, tmp_path / "front"):
            assert path.stat().st_size > 5000
