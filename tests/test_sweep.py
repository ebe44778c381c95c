"""``ladderize sweep``: every point is measured, and a stage that fails stops only what needs it."""

import itertools
import json
import shlex

import pytest

from ladderize.checkpoint.opening import read_checkpoint
from ladderize.checkpoint.tensors import fingerprint
from ladderize.files.documents import write_json
from ladderize.layout import Layout
from ladderize.sweep import run
from ladderize.sweep.stages import finished_stage, make_stage
from tests.helpers import ROOT, invoke, one_sentence, save_llama
from tests.sweeps import ran, read, spec, stages_of, sweep, write


@pytest.fixture(scope="module")
def swept(place, tmp_path_factory):
    """A whole sweep: its folder and what it said."""
    folder = tmp_path_factory.mktemp("swept")
    return folder / "out", sweep(folder, spec(place))[0]


def test_a_sweep_measures_every_point(place, swept):
    out, outcome = swept
    document = read(out)
    assert document["complete"] is True
    assert [point["adapted"] for point in document["points"]] == ["none", "none", "none", "none", "full"]
    dense, first, second, half, adapted = document["points"]
    assert set(dense["attention_sync"]) == {"blocking"}
    assert dense["model"] == str(place / "dense")
    assert Layout.from_layers(4, ladder=[2, 3]).to_config() == {key: first[key] for key in Layout.dense(1).to_config()}
    assert half["attention_sync"].count("dropped") == 2
    assert half["attention_sync"] == adapted["attention_sync"]
    assert adapted["timed"] == half["model"]
    assert adapted["tokens"] > 0
    assert (out / adapted["adaptation"] / "metrics.jsonl").is_file()
    divergences = {}
    for point in document["points"]:
        results = json.loads((out / point["results"]).read_text())
        assert [entry["ladderize"]["model"] for entry in results["models"]] == [point["model"]]
        predictions = results["models"][0]["ladderize"].get("predictions")
        assert (predictions is None) == (point is dense)
        assert point is dense or (predictions["reference"] == str(place / "dense") and predictions["mean_kl"] > 0)
        divergences |= {predictions["mean_kl"]: point["name"]} if point is not dense else {}
    (bench,) = document["benches"]
    rows = json.loads((out / bench).read_text())["rows"]
    assert [row["model"] for row in rows] == [point["timed"] for point in (dense, first, second, half)]
    (sensitivity,) = document["sensitivities"]
    assert json.loads((out / sensitivity).read_text())["mode"] == "sweep"
    for stage in stages_of(document).values():
        assert (out / stage["output"] / "stage.json").is_file()
        log = (out / stage["output"] / "log.txt").read_text()
        assert f"\n$ {stage['command']}" in log  # which was run
    assert ran(outcome)[-1].startswith("bench")
    assert "ladderize report" in outcome.stdout
    assert all(point["name"] in outcome.stdout for point in document["points"])


def test_the_same_sweep_runs_nothing(place, swept):
    out, _ = swept
    before = {path: path.stat().st_mtime_ns for path in out.rglob("*.safetensors")}
    outcome, document = sweep(out.parent, spec(place))
    assert ran(outcome) == []
    assert {path: path.stat().st_mtime_ns for path in out.rglob("*.safetensors")} == before
    assert all(stage["reused"] for stage in stages_of(document).values())


def test_the_example_is_the_file_of_examples(tmp_path):
    assert invoke("sweep", tmp_path / "s.yaml", "--write-example").code == 0
    written = (tmp_path / "s.yaml").read_text()
    assert written == (ROOT / "examples" / "sweep.yaml").read_text()
    assert invoke("sweep", "--write-example").stdout == written
    assert "exists" in one_sentence(invoke("sweep", tmp_path / "s.yaml", "--write-example"))


# ---- failures ----


def test_a_failing_stage_stops_only_what_needs_it(place, tmp_path):
    """Training that changes nothing makes nothing better, and writes nothing."""
    adapt = {**spec(place)["adapt"][1], "lr": 1e-30, "layouts": None, "write": "best", "heldout": 4}
    content = spec(place, sensitivity=None, layouts=[{"ladder": "all"}], adapt=["none", adapt])
    out = tmp_path / "out"
    outcome, document = sweep(tmp_path, content, code=1)
    assert "1 stage failed" in outcome.stderr.splitlines()[-1]
    assert document["complete"] is False
    dense, none, full = document["points"]
    assert [stage["status"] for stage in full["stages"]] == ["done", "failed", "skipped"]
    assert full["stages"][1]["message"] in outcome.stderr
    assert full["results"] is None
    assert dense["results"]
    assert none["results"]
    assert len(document["benches"]) == 1
    assert (out / full["stages"][1]["output"] / "log.txt").stat().st_size > 0
    assert ran(sweep(tmp_path, content, code=1)[0]) == []  # only the failed one was tried again


def test_layouts_that_no_sensitivity_chooses(place, tmp_path):
    content = spec(place, adapt=None, bench=None)
    content["layouts"] = [{"spd": "auto", "sync_tp_size": 2, "max_ppl_increase": 1e-12}, {"ladder": "all"}]
    outcome = invoke("sweep", write(tmp_path / "s.yaml", content), "--out", tmp_path / "out")
    document = read(tmp_path / "out")
    if outcome.code:  # else a random model happens to have a block that costs nothing
        assert "selects no block" in outcome.stderr.splitlines()[-1]
        assert document["points"][1]["stages"][0]["status"] == "failed"
    assert document["points"][2]["results"]


def test_a_model_that_changes_meanwhile_ends_the_sweep(place, tmp_path, monkeypatch):
    save_llama(tmp_path / "dense")
    content = spec(place, sensitivity=None, adapt=None, bench=None, layouts=[{"ladder": "all"}])
    content["model"] = str(tmp_path / "dense")

    def changing(stage, root):
        config = tmp_path / "dense" / "config.json"
        config.write_text(config.read_text() + "\n")

    monkeypatch.setattr(run, "run_stage", changing)
    outcome = invoke("sweep", write(tmp_path / "s.yaml", content), "--out", tmp_path / "out")
    assert outcome.code == 1
    assert "config.json changed while the sweep ran" in outcome.stderr.splitlines()[-1]
    assert not list((tmp_path / "out").glob("stages/*/stage.json"))


def test_a_sensitivity_that_fails_skips_what_it_would_choose(place, tmp_path):
    sensitivity = {"data": str(place / "ids.npy"), "seq_len": 2000}  # longer than the model's positions
    content = spec(place, sensitivity=sensitivity, bench=None)
    outcome, document = sweep(tmp_path, content, code=1)
    assert [stage["status"] for stage in document["stages"]] == ["failed"]
    dense, first, second, *half = document["points"]
    assert all(point["results"] for point in (dense, first, second))
    assert [[stage["status"] for stage in point["stages"]] for point in half] == [["skipped"], ["skipped"]]
    assert all(point["attention_sync"] == [] and point["model"] is None for point in half)
    rows = outcome.stdout.splitlines()
    assert any(line.startswith("half") for line in rows)


def test_a_stage_of_a_chain_reads_what_the_one_before_wrote(place, tmp_path):
    """An adapter is merged, in the middle too; what a chain and a single stage share runs once."""
    same = {"data": str(place / "ids.npy"), "seq_len": 16, "write": "last"}
    align = {**same, "method": "align", "samples": 8, "heldout": 4, "processes": 2}
    lora = {**same, "method": "lora", "max_steps": 3, "batch_size": 2, "lora_rank": 2}
    blocks = {**same, "method": "blocks", "samples": 10, "heldout": 4}
    adapt = [align, lora, [align, lora, blocks]]
    content = spec(place, sensitivity=None, bench=None, layouts=[{"ladder": "1:3"}], adapt=adapt)
    out = tmp_path / "out"
    _, single, merged, chain = sweep(tmp_path, content)[1]["points"]
    assert [stage["stage"] for stage in chain["stages"]] == ["convert", "adapt", "adapt", "adapt", "eval"]
    assert chain["stages"][:2] == single["stages"][:2]
    assert chain["name"] == "ladder 1:3, align 8 windows + lora + blocks 10 windows"
    assert (single["adapted"], single["tokens"]) == ("align", 8 * 16)
    assert (chain["adapted"], chain["tokens"]) == ("align + lora + blocks", 8 * 16 + 96 + 10 * 16)
    assert (merged["adapted"], merged["tokens"]) == ("lora", 96)
    assert (out / single["adaptation"] / "alignment.json").is_file()
    assert (out / merged["adaptation"] / "adapter_config.json").is_file()
    assert (out / chain["model"] / "distillation.json").is_file()
    assert chain["adaptation"] == f"{chain['stages'][2]['output']}/adapter"  # of the last stage that retrained
    for before, stage in itertools.pairwise(chain["stages"][1:4]):
        assert f"ladderize adapt {before['output']}/model " in stage["command"]
    started, *commands = [line for stage in chain["stages"][1:4] for line in stage["command"].split(" && ")]
    before, _, adapt = started.partition(" -m ")
    assert before == "torchrun --standalone --nproc-per-node 2"
    assert f"\n$ {started}" in (out / chain["stages"][1]["output"] / "log.txt").read_text()
    lines = [shlex.split(line)[1:] for line in (adapt, *commands)]
    assert [name for name, *_ in lines] == ["adapt", "adapt", "merge", "adapt"]
    fingerprints = json.loads((out / chain["adaptation"] / "adaptation.json").read_text())["fingerprints"]
    assert fingerprints["model"] == fingerprint(read_checkpoint(out / single["model"]))
    results = json.loads((out / chain["results"]).read_text())
    assert [entry["ladderize"]["model"] for entry in results["models"]] == [chain["model"]]


def test_a_benchmark_by_hand_in_which_a_model_failed_is_not_finished(tmp_path):
    stage = make_stage("bench", "bench", {}, lambda output: (("bench",),))
    (tmp_path / stage.output).mkdir(parents=True)
    for failed, finished in (({}, True), ({"m": "a logit is 9 off"}, False)):
        write_json(tmp_path / stage.output / "bench.json", {"complete": True, "failed": failed})
        assert (finished_stage(stage, tmp_path) is not None) == finished
