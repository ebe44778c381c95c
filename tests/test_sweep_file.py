"""sweep.yaml: its grids, what is refused before anything runs, and the plan that ``--dry-run`` shows."""

import itertools
import json
import re
from pathlib import Path

import numpy as np
import pytest

from ladderize.sweep.sweep_file import sweep_spec
from tests.helpers import invoke, invoke_well, listing, one_sentence
from tests.sweeps import FAST, plan_of, spec, write


def planned(place, tmp_path, **changes):
    """The document of ``--dry-run``."""
    file = write(tmp_path / "s.yaml", spec(place, **changes))
    outcome = invoke_well("sweep", file, "--out", tmp_path / "out", "--dry-run", "--json")
    assert not (tmp_path / "out").exists()
    return json.loads(outcome.stdout)


# ---- grids ----


@pytest.fixture(autouse=True)
def _data(tmp_path_factory, monkeypatch):
    """What files name without a folder is there."""
    folder = tmp_path_factory.mktemp("data")
    for name in ("a", "b", "x"):
        np.save(folder / f"{name}.npy", np.arange(3, 67).reshape(4, 16))
    monkeypatch.chdir(folder)


def test_lists_are_a_grid(place):
    layouts = [{"ladder": ["0:2", "2:"], "spd": ["0", "1", "2"], "sync_tp_size": 2}]
    adapt = {"method": "full", "data": ["a.npy", "b.npy"], "max_tokens": ["1k", 2000], "lr": [0.1, 0.2]}
    adapt |= {"distill_weight": 1, "teacher_cache": "answers"}
    bench = [{**FAST, "batch_size": [1, 2], "prompt_len": [4, 8]}, FAST]
    read = sweep_spec(spec(place, layouts=layouts, adapt=["none", adapt], bench=bench), "s.yaml")
    recipes = [(one.recipe.ladder, one.recipe.spd) for one in read.layouts]
    assert recipes == list(itertools.product(["0:2", "2:"], "012"))
    assert [[stage.options.method for stage in way.stages] for way in read.adapt] == [[]] + [["full"]] * 4
    options = [stage.options for way in read.adapt for stage in way.stages]
    assert {(each.max_tokens, each.lr) for each in options} == {*itertools.product([1000, 2000], [0.1, 0.2])}
    assert all(len(each.data) == 2 for each in options)
    assert {each.teacher_cache for each in options} == {str(Path.cwd() / "answers")}
    assert [one.options.prompt_len for one in read.bench] == [4, 8, 4]
    assert [one.options.batch_sizes for one in read.bench] == [(1, 2), (1, 2), (1,)]


def test_a_grid_of_teachers(place):
    """Of weight 0 there is none."""
    adapt = {"method": "full", "data": "a.npy", "max_tokens": "1k", "distill_weight": [0, 1]}
    read = sweep_spec(spec(place, adapt=[adapt]), "s.yaml")
    assert [way.stages[0].options.distill_from for way in read.adapt] == [None, "DENSE"]


def test_a_layout_that_is_named_twice_is_measured_once(place, tmp_path):
    layouts = [{"ladder": "0:4"}, {"name": "again", "ladder": "all"}, {"ladder": [["0", "1"], "0:2"]}]
    adapt = ["none", {**spec(place)["adapt"][1], "layouts": "again"}]
    document = planned(place, tmp_path, layouts=layouts, adapt=adapt)
    titles = [stage["title"] for stage in document["stages"] if stage["stage"] == "convert"]
    assert titles == ["convert: ladder 0:4", "convert: ladder 0:2"]
    kinds = [stage["stage"] for stage in document["stages"]]
    assert (kinds.count("adapt"), kinds.count("eval")) == (1, 4)


def test_the_forms_of_a_chain(place):
    """A name, a mapping, a list and ``stages`` are the same; what is said once is of all."""
    full = {"method": "full", "max_tokens": ["1k", "2k"]}
    forms = ["none", "align", ["align", full], {"stages": ["align", full], "layouts": ["half"]}, [{"method": "align"}]]
    read = sweep_spec(spec(place, adapt=forms, data="x.npy"), "s.yaml")
    none, align, *chains, alone = read.adapt
    assert none.stages == ()
    assert [stage.options.method for stage in align.stages] == ["align"]
    assert [stage.options for stage in alone.stages] == [stage.options for stage in align.stages]
    assert [one.layouts for one in chains] == [(), (), ("half",), ("half",)]
    assert [[stage.options.method for stage in way.stages] for way in chains] == [["align", "full"]] * 4
    assert [way.stages[1].options.max_tokens for way in chains] == [1000, 2000] * 2
    assert {Path(name).name for way in chains for stage in way.stages for name in stage.options.data} == {"x.npy"}


# ---- the plan ----


LORA = {"method": "lora", "max_steps": 3}
NAMES = {
    "one way": (["align", ["align", LORA]], ["+align", "+align+lora"]),
    "an option that one of them has": (
        [LORA, {**LORA, "lora_rank": 2, "lr": 1e-3}],
        ["+lora", "+lora(--lora-rank 2 --lr 0.001)"],
    ),
    "the same after the first stage": (
        [["align", LORA], [{"method": "align", "samples": 64}, LORA]],
        ["+align+lora", "+align(--samples 64)+lora"],
    ),
    "another layout's": ([{"method": "align", "layouts": "half"}, {"method": "align", "samples": 64}], ["+align"]),
}


@pytest.mark.parametrize("case", NAMES)
def test_names_are_short_and_have_what_differs(place, tmp_path, case):
    """A way that only another layout is adapted in makes no name longer."""
    ways, names = NAMES[case]
    layouts = [{"name": "all", "ladder": "all"}, {"name": "half", "ladder": "0"}]
    content = spec(place, layouts=layouts, adapt=ways, data=str(place / "ids.npy"), bench=None)
    points = [point.name for point in plan_of(tmp_path, content).points()]
    assert len(points) == len({*points})
    assert [name.removeprefix("all") for name in points if name.startswith("all")] == names


def test_a_dry_run_writes_nothing(place, tmp_path):
    document = planned(place, tmp_path)
    kinds = [stage["stage"] for stage in document["stages"]]
    assert kinds == ["eval", "convert", "eval", "convert", "eval", "convert", "eval", "adapt", "eval", "bench"]
    assert document["unplanned"] == []
    assert not any(stage["kept"] for stage in document["stages"])
    assert listing(tmp_path) == ["s.yaml"]


# ---- what is refused ----


FULL = {"method": "full", "data": "x.npy", "max_tokens": "1k"}
REFUSED = {
    "what the sweep decides": ({"adapt": [{**FULL, "align": True}]}, r"adapt\[0\]: align cannot be given here"),
    "align after others": (
        {"adapt": [[FULL, {"method": "align", "data": "x.npy"}]]},
        r"adapt\[0\]: align solves anew .*put it first",
    ),
    "ranks that do not fit": ({"layouts": [{"spd": "all", "sync_tp_size": 3}]}, r"layouts\[0\].*does not divide the 8"),
    "promote without an evaluation": (
        {"adapt": [{**FULL, "promote": 1}], "eval": None},
        "promote goes by what eval measures",
    ),
    "data to train on": ({"adapt": [{**FULL, "data": "nowhere.npy"}]}, "nowhere.npy names nothing that exists"),
    "a long prompt": ({"bench": [{"prompt_len": 99}]}, r"bench\[0\].*over the model's 64 positions"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_does_not_fit_is_refused_before_anything_runs(place, tmp_path, case):
    changes, message = REFUSED[case]
    if "layouts" in changes:  # the entry that adapt is for is not among them
        changes = {"adapt": None, **changes}
    file = write(tmp_path / "s.yaml", spec(place, **changes))
    assert re.search(message, one_sentence(invoke("sweep", file, "--out", tmp_path / "out")))
    assert listing(tmp_path) == ["s.yaml"]


def test_folders_that_are_refused(place, tmp_path):
    file = write(tmp_path / "s.yaml", spec(place))
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "thesis.tex").write_text("")
    assert "no folder of a sweep" in one_sentence(invoke("sweep", file, "--out", tmp_path / "full"))
    assert listing(tmp_path / "full") == ["thesis.tex"]
    assert "is not a folder" in one_sentence(invoke("sweep", file, "--out", file))
    assert "is not empty" in one_sentence(invoke("sweep", file, "--out", place / "dense"))
    assert one_sentence(invoke("sweep", file)).startswith("Error: say where to keep everything")
