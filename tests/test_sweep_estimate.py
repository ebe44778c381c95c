"""What a sweep says of itself before it runs: how long it takes, and whether its margin can be shown."""

import json
from dataclasses import replace

import numpy as np
import pytest

from ladderize.demo.inputs import TASKS
from ladderize.tradeoff.sweep import builder, run
from ladderize.tradeoff.sweep.estimate import START_SECONDS, Estimator
from ladderize.tradeoff.sweep.margin import CHANGED, Questions, margin_words, questions_needed
from tests.helpers import fresh_rng, invoke
from tests.sweeps import make_place, planner, spec, write


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    return make_place(tmp_path_factory.mktemp("sweep"))


def test_a_stage_takes_what_its_tokens_take(place, tmp_path):
    data = str(place / "ids.npy")

    def seconds(device="cpu", gpus=0, **adapt):
        adapt = {"method": "full", "data": data, "batch_size": 4, "heldout": 1, "eval_every": 10**6, **adapt}
        made = planner(tmp_path, spec(place, layouts=[{"ladder": "0"}], adapt=[adapt], sensitivity=None))
        made = replace(made, builder=replace(made.builder, gpus=gpus))
        (stage,) = made.plan().points[1].adapting
        return Estimator(made.config, device, 1e6, 1e9, 10**6, None).seconds(stage) - START_SECONDS

    assert seconds(max_tokens="200k") == pytest.approx(2 * seconds(max_tokens="100k"), rel=0.01)
    assert seconds("cuda", 4, max_tokens="100k") == pytest.approx(seconds(max_tokens="100k") / 4)
    lora = seconds(max_tokens="100k", method="lora") - START_SECONDS  # it is merged, too
    assert lora == pytest.approx(3 / 4 * seconds(max_tokens="100k"), rel=0.01)  # no gradients of what is frozen
    aligned = {"method": "align", "batch_size": None, "heldout": None, "eval_every": None, "seq_len": 16}
    assert seconds(**aligned, samples=20) == pytest.approx(10 * seconds(**aligned, samples=2))


def test_the_dry_run_says_on_what_and_how_long(place, tmp_path, monkeypatch):
    """Every kind of stage is estimated, and the machine's time is what its GPUs share."""
    for module in (builder, run):
        monkeypatch.setattr(module, "visible_gpus", lambda: ["0", "1"])
    tasks = {"tasks": ["demo_copying"], "include_path": str(TASKS), "include_default_tasks": False, "limit": 50}
    file = write(tmp_path / "s.yaml", spec(place, eval=tasks))
    outcome = invoke("sweep", file, "--out", tmp_path / "out", "--dry-run", "--json")
    document = json.loads(outcome.stdout)
    shares = {stage["stage"]: (stage["on"], stage["share"]) for stage in document["stages"]}
    assert shares["eval"] == ("1 GPU", 0.5)
    assert shares["sensitivity"] == ("2 GPUs", 1.0)
    assert shares["convert"] == ("", 0.5)
    assert all(stage["seconds"] >= START_SECONDS for stage in document["stages"])
    assert "these tasks ask 50: too few; raise limit" in document["notes"][-1]


# ---- the margin ----


def test_the_questions_that_a_margin_takes():
    """One that has them shows it in four of five evaluations: the lower end of the paired interval is above it."""
    rng = fresh_rng()
    needed = questions_needed([Questions(100, 0, 100)], 2.0)
    changes = [CHANGED / 2, 1 - CHANGED, CHANGED / 2]
    gains = rng.choice([-1, 0, 1], p=changes, size=(400, needed))
    low = gains.mean(1) - 1.96 * gains.std(1) / np.sqrt(needed)
    assert 0.7 < (low > -0.02).mean() < 0.93
    even = questions_needed([Questions(100, 0, 100)] * 2, 2.0)
    assert even == pytest.approx(needed, rel=0.02)
    assert questions_needed([Questions(20, 0, 20), Questions(180, 0, 180)], 2.0) > 2 * even  # the smaller one decides
    enough = [Questions(needed, 0, needed)]
    assert "too few" not in margin_words(enough, 2.0)
    assert "too few, add tasks" in margin_words([Questions(9, 0, 9)], 2.0)
