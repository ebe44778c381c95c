"""``promote`` of a sweep.yaml: which layouts go on, by what was measured of them, and what becomes of the others."""

import json
import shutil

import pytest

from ladderize.eval.results import EvaluatedModel, ModelResult
from ladderize.eval.table import mean_accuracy
from ladderize.layout import Layout
from ladderize.sweep import run
from ladderize.sweep.plan import Entrant, promoted, ranking
from tests.helpers import fresh_rng, invoke, invoke_well
from tests.sweeps import ran, read, spec, stages_here, sweep, write


@pytest.fixture(scope="module", autouse=True)
def _stages_here():
    with stages_here():
        yield


# ---- the rule ----


def entrants_of(rng, count):
    """Small numbers: many ties."""
    pairs = rng.integers(0, 5, (count, 2)).tolist()
    return [Entrant(float(accuracy), float(speed)) for accuracy, speed in pairs]


def better(one, other):
    return matches(one, other) and not matches(other, one)


def matches(one, other):
    return one.accuracy >= other.accuracy and one.speed >= other.speed


@pytest.mark.parametrize("count", [0, 1, 4, 25])
def test_the_ranking_is_front_by_front(count):
    """Against the definition: a model's front is the longest chain of models each better than the next that ends in
    it."""
    entrants = entrants_of(fresh_rng(), count)

    def front(one):
        return max((1 + front(other) for other in entrants if better(other, one)), default=0)

    expected = sorted(entrants, key=lambda one: (front(one), -one.accuracy))
    assert [(front(one), one.accuracy) for one in ranking(entrants)] == [(front(one), one.accuracy) for one in expected]
    assert {id(one) for one in ranking(entrants)} == {id(one) for one in entrants}


def test_what_dense_beats_comes_after_what_it_does_not():
    slow, fast = Entrant(0.6, 0.9), Entrant(0.2, 1.5)
    assert promoted([slow, fast], None, 1) == [True, False]
    assert promoted([slow, fast], Entrant(0.7, 1.0), 1) == [False, True]
    assert promoted([slow, fast], Entrant(0.7, 1.0), 2) == [True, True]  # a place is a place


MEASURED = EvaluatedModel(
    model="a", layout="2 layers: dense", **Layout.dense(2).to_config(), parameters=1, dtype="float32",
    device="cpu", torch_version="", transformers_version="",
)  # fmt: skip


def test_a_group_of_tasks_counts_as_one_task():
    """As in comparisons: the questions of a group count alike."""
    results = {"one": {"acc,none": 0.2}, "two": {"acc,none": 0.8}, "other": {"acc,none": 0.6}, "group": {}}
    counts = {"one": {"effective": 30}, "two": {"effective": 10}, "other": {"effective": 500}}
    harness = {"results": results, "group_subtasks": {"group": ["one", "two"]}, "n-samples": counts}
    assert mean_accuracy(ModelResult(MEASURED, harness)) == pytest.approx((0.35 + 0.6) / 2)


def test_a_metric_that_lm_eval_calls_better_stands_for_its_task():
    """As in comparisons. Without one, and without perplexity, nothing can be promoted by accuracy."""
    results = {"one": {"acc,none": 0.2}, "two": {"strict,none": 0.4, "length,none": 0.9}, "three": {"bleu,none": 31.0}}
    better = {"two": {"length": False, "strict": True}, "three": {"bleu": True}}
    entry = ModelResult(MEASURED, {"results": results, "higher_is_better": better})
    assert mean_accuracy(entry) == pytest.approx((0.2 + 0.4) / 2)
    assert mean_accuracy(ModelResult(MEASURED, {"results": {"two": results["two"]}})) is None


# ---- a sweep ----

LATE = "it is not among the 1 best"
LAYOUTS = [{"name": "two", "ladder": "2:"}, {"name": "all", "ladder": "all"}, {"spd": "all", "sync_tp_size": 2}]


def tournament(place, **changes):
    """Three layouts, each aligned; one of them is trained on."""
    same = {"data": str(place / "ids.npy"), "seq_len": 16, "write": "last"}
    align = {**same, "method": "align", "samples": 8, "heldout": 4}
    full = {**same, "method": "full", "max_steps": 2, "batch_size": 2, "promote": 1}
    return spec(place, **{"layouts": LAYOUTS, "adapt": [[align, full]], **changes})


def measured(out, point, bench):
    """Accuracy and speed, as the files have them."""
    results = json.loads((out / point["results"]).read_text())
    speed = -(point["attention_sync"] + point["mlp_sync"]).count("blocking")
    if bench is not None:
        rows = json.loads((out / bench).read_text())["rows"]
        speed = next(row["speedup"]["end_to_end"] for row in rows if row["model"] == point["timed"])
    return Entrant(-results["models"][0]["ladderize"]["perplexity"]["perplexity"], speed)


@pytest.fixture(scope="module")
def swept(place, tmp_path_factory):
    """Its folder, what it was about to do, and what it said."""
    folder = tmp_path_factory.mktemp("tournament")
    dry = dry_run(folder, tournament(place))
    return folder, dry, sweep(folder, tournament(place))[0]


@pytest.fixture
def played(swept, tmp_path):
    """The folder again, to go on with: what was measured is kept."""
    return shutil.copytree(swept[0], tmp_path / "played")


def dry_run(folder, content):
    file = write(folder / "s.yaml", content)
    return json.loads(invoke("sweep", file, "--out", folder / "out", "--dry-run", "--json").stdout)


def check_promoted(out, outcome):
    """The best goes on, by its accuracy after the stage before and its times, or else its blocking sync points."""
    document = read(out)
    assert document["complete"] is True
    dense, *points = document["points"]
    aligned, trained = points[::2], points[1::2]
    assert [point["adapted"] for point in (*aligned, *trained)] == ["align"] * 3 + ["align + full"] * 3
    timings = next(iter(document["benches"]), None)
    best = promoted([measured(out, point, timings) for point in aligned], measured(out, dense, timings), 1)
    assert best.count(True) == 1
    for point, is_best in zip(trained, best, strict=True):
        last = point["stages"][-1]
        if is_best:
            assert point["results"] is not None
        else:
            assert (last["stage"], last["status"], last["message"]) == ("adapt", "not promoted", LATE)
            assert (point["results"], point["model"]) == (None, None)
    assert LATE in outcome.stdout


def test_only_the_best_go_on(place, swept):
    folder, dry, outcome = swept
    assert len(dry["unplanned"]) == 3
    check_promoted(folder / "out", outcome)
    stages = [line.split(":")[0] for line in ran(outcome)]
    assert stages.count("adapt") == 4
    assert stages.index("bench") < len(stages) - 1  # times decide, too
    assert ran(sweep(folder, tournament(place))[0]) == []
    assert dry_run(folder, tournament(place))["unplanned"] == []
    invoke_well("report", folder / "out", "--out", folder / "page.html")
    assert LATE in (folder / "page.html").read_text()


def test_without_times_blocking_sync_points_decide(place, played):
    outcome, document = sweep(played, tournament(place, bench=None))
    assert document["benches"] == []
    check_promoted(played / "out", outcome)


def test_the_others_go_on_where_an_evaluation_fails(place, played, monkeypatch):
    """The whole way: the failed layout is skipped, of the others the best is trained."""
    found = {point["name"]: point for point in read(played / "out")["points"]}
    shutil.rmtree((played / "out" / found["two+align"]["results"]).parent)
    unlucky = run.run_stage

    def failing(stage, root):
        return "no luck" if stage.title == "eval: two+align" else unlucky(stage, root)

    monkeypatch.setattr(run, "run_stage", failing)
    _, document = sweep(played, tournament(place, bench=None), code=1)
    found = {point["name"]: point for point in document["points"]}
    last = {name: point["stages"][-1] for name, point in found.items()}
    assert last["two+align+full"]["status"] == "skipped"
    assert last["two+align+full"]["message"] == "the stage eval that decides it failed"
    others = [point for name, point in found.items() if name.endswith("full") and not name.startswith("two")]
    assert sorted(point["stages"][-1]["status"] for point in others) == ["done", "not promoted"]


def test_two_rounds(place, played):
    """Who is left behind in the first takes no part in the second."""
    content = tournament(place, bench=None)
    align, full = content["adapt"][0]
    content["adapt"] = [[align, {**full, "promote": 2}, {**full, "seed": 1}]]
    points = sweep(played, content)[1]["points"]
    last = [point["stages"][-1]["status"] for point in points if point["adapted"] == "align + full + full"]
    assert sorted(last) == ["done", "not promoted", "not promoted"]
    middle = [point["stages"][-1]["status"] for point in points if point["adapted"] == "align + full"]
    assert sorted(middle) == ["done", "done"]
