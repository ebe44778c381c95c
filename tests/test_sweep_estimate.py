"""What a sweep says of itself before it runs: how long it takes, and whether its margin can be shown."""

import json
import re
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import yaml

from ladderize.adapt.data_specs import parse_specs
from ladderize.adapt.train.memory import estimate
from ladderize.adapt.train.options import Budget, Objective, RetrainOptions, parse_count
from ladderize.adapt.train.task import Launch, open_task
from ladderize.console import human_bytes
from ladderize.demo.inputs import TASKS
from ladderize.errors import UserError
from ladderize.layout import Layout
from ladderize.runtime.shards import read_shape
from ladderize.tradeoff.sweep import builder, run
from ladderize.tradeoff.sweep.estimate import EFFICIENCY, START_SECONDS, Estimator
from ladderize.tradeoff.sweep.margin import CHANGED, Questions, margin_words, questions_needed
from ladderize.tradeoff.sweep.planned import PlanDocument
from tests.helpers import ROOT, fresh_rng, invoke, save_sparse
from tests.sweeps import planner, spec, write


def test_a_stage_takes_what_its_tokens_take(place, tmp_path):
    data = str(place / "ids.npy")

    def seconds(device="cpu", gpus=0, **adapt):
        adapt = {"method": "full", "data": data, "batch_size": 4, "heldout": 1, "eval_every": 10**6, **adapt}
        made = planner(tmp_path, spec(place, layouts=[{"ladder": "0"}], adapt=[adapt], sensitivity=None))
        made = replace(made, builder=replace(made.builder, gpus=gpus))
        (stage,) = made.plan().points[1].adapting
        return Estimator(made.config, device, 1e6 / EFFICIENCY[device], 1e9, 10**6, None).seconds(stage) - START_SECONDS

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


def test_what_lies_on_the_disk_while_it_trains(place, tmp_path, monkeypatch):
    """As much as adapt itself counts, of all that run side by side; what a killed run left is there."""
    for module in (builder, run):
        monkeypatch.setattr(module, "visible_gpus", lambda: ["0", "1"])
    adapt = {"method": "full", "data": str(place / "ids.npy"), "max_steps": 2, "batch_size": 2, "seq_len": 16}
    ways = [{**adapt, "processes": 1}, {**adapt, "train": "0:1", "processes": 1}, {**adapt, "method": "lora"}]
    content = spec(place, layouts=[{"ladder": "1:"}], adapt=ways, sensitivity=None, bench=None)
    made = planner(tmp_path, content)
    plan = made.plan()
    (tmp_path / "out").mkdir()
    of_layers = [PlanDocument.of(plan, made, gpus) for gpus in ([], ["0"], ["0", "1"])]
    convert = ["convert", place / "dense", tmp_path / "model", "--ladder", "1:"]
    assert invoke(*convert).code == 0
    taken = []
    for way in ways:
        given = {key: value for key, value in way.items() if key != "processes"}
        words = [word for key, value in given.items() for word in (f"--{key.replace('_', '-')}", value)]
        asked = ["adapt", tmp_path / "model", *words, "--distill-from", place / "dense", "--dry-run", "--json"]
        taken.append(json.loads(invoke(*asked).stdout)["state_bytes"])
    assert [one.unfinished_bytes for one in of_layers[0].stages if one.stage == "adapt"] == taken
    assert taken[1] < taken[0]
    assert [one.unfinished_bytes for one in of_layers] == [max(taken), max(taken), taken[0] + taken[1]]
    stage = plan.points[1].adapting[0]
    left = tmp_path / "out" / stage.output / "model.ladderize-work"
    left.mkdir(parents=True)
    (left / "state").write_bytes(bytes(1000))
    document = PlanDocument.of(plan, made)
    assert next(one for one in document.stages if one.output == stage.output).unfinished_bytes == taken[0] - 1000
    monkeypatch.setattr(run.shutil, "disk_usage", lambda _: SimpleNamespace(free=document.output_bytes))
    with pytest.raises(UserError, match="the sweep needs at least"):
        run.check_room_for(plan, made)


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


# ---- the tutorial ----

RATE = 4e14  # operations a second and GPU: 40 % of an H100's bf16 peak
QUESTIONS = {"hellaswag": 10042, "arc_easy": 2376, "arc_challenge": 1172, "winogrande": 1267, "gsm8k": 1319}


def test_the_sweep_of_the_tutorial_fits_its_machine(tmp_path, monkeypatch):
    """Its file, on an 8B whose weights nobody reads and on GPUs that are not there."""
    page = (ROOT / "docs" / "tutorial.md").read_text(encoding="utf-8")
    content = yaml.safe_load(page.partition("```yaml\n")[2].partition("```")[0])
    monkeypatch.chdir(tmp_path)
    save_sparse(tmp_path / "llama-8b", read_shape("8b"))
    for name in ("wiki.txt", "wiki-test.txt"):
        (tmp_path / name).write_text("a" * 1_200_000)
    (tmp_path / "chat.jsonl").write_text('{"text": "a row"}\n')
    for module in (builder, run):
        monkeypatch.setattr(module, "visible_gpus", lambda: list(map(str, range(8))))
    monkeypatch.setattr(builder, "file_sha256", lambda name: name.rpartition("/")[2])
    tasks = [Questions(count, count * (name == "gsm8k"), count) for name, count in QUESTIONS.items()]
    monkeypatch.setattr(run, "count_questions", lambda _: tasks)
    of = Estimator(read_shape("8b"), "cuda", RATE / EFFICIENCY["cuda"], 3.35e12, 16 * 10**9, tasks)
    monkeypatch.setattr(run.Estimator, "of", lambda *_: of)
    outcome = invoke("sweep", write(tmp_path / "sweep.yaml", content), "--dry-run")
    assert outcome.code == 0, outcome.stderr
    told = " ".join(page.partition("## 5. ")[2].partition("## 6. ")[0].split())
    rows = [re.split(r" {2,}", line) for line in outcome.stdout.splitlines()]
    (training,) = {tuple(row[2:]) for row in rows if row[0].startswith("adapt")}
    (evaluation,) = {tuple(row[2:4]) for row in rows if row[0].startswith("eval")}
    total = re.search(r"the others take (about .*?); at least (.*) of disk, and (.*) while it trains", outcome.stdout)
    needed = re.search(r"takes about ([\d,]+) questions.*ask ([\d,]+)$", outcome.stderr, re.MULTILINE)
    assert training[0] == "8 GPUs, sharded"
    assert evaluation[0] == "8 GPUs"
    save_sparse(tmp_path / "all", read_shape("8b"), Layout.from_layers(32, ladder=range(32)))
    full = content["adapt"][1]
    options = RetrainOptions(
        parse_specs((full["data"],)),
        distill_from="llama-8b",
        objective=Objective(distill_weight=1.0),
        budget=Budget(parse_count(full["max_tokens"])),
        batch_size=full["batch_size"],
        micro_batch_size=full["micro_batch_size"],
        seq_len=full["seq_len"],
        device="cuda",
    )
    sharded = estimate(open_task("all", options, Launch("cuda", 8, sharded=True), None))
    assert sharded.memory_bytes < 80e9
    assert total[3] == human_bytes(sharded.state_bytes)  # the sweep counts what adapt does
    for figure in (
        *training[1:],
        evaluation[1],
        *total.groups(),
        *needed.groups(),
        human_bytes(sharded.memory_bytes),
    ):
        assert figure in told
