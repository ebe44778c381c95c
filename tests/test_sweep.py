"""``ladderize sweep``: every point is measured, and a stage that fails stops only what needs it."""

import itertools
import json
import shlex

import pytest

from ladderize.checkpoint.opening import read_checkpoint
from ladderize.checkpoint.tensors import fingerprint
from ladderize.layout import Layout
from ladderize.sweep import run
from tests.helpers import ROOT, invoke, save_llama
from tests.sweeps import ran, read, set_gpus, spec, stages_of, sweep, write


def small(place):
    return spec(place, layouts=[{"ladder": "2:"}, spec(place)["layouts"][1]])


@pytest.fixture(scope="module")
def swept(place, tmp_path_factory):
    """A whole sweep: its folder and what it said."""
    folder = tmp_path_factory.mktemp("swept")
    return folder / "out", sweep(folder, small(place))[0]


def test_a_sweep_measures_every_point(place, swept):
    out, outcome = swept
    document = read(out)
    assert document["complete"] is True
    assert [point["adapted"] for point in document["points"]] == ["none", "none", "none", "full"]
    dense, first, half, adapted = document["points"]
    assert set(dense["attention_sync"]) == {"blocking"}
    assert dense["model"] == str(place / "dense")
    assert Layout.from_layers(4, ladder=[2, 3]).to_config() == {key: first[key] for key in Layout.dense(1).to_config()}
    assert half["attention_sync"].count("dropped") == 2
    assert half["attention_sync"] == adapted["attention_sync"]
    assert adapted["timed"] == half["model"]
    assert adapted["tokens"] > 0
    assert (out / adapted["adaptation"] / "metrics.jsonl").is_file()
    for point in document["points"]:
        results = json.loads((out / point["results"]).read_text())
        assert [entry["ladderize"]["model"] for entry in results["models"]] == [point["model"]]
        predictions = results["models"][0]["ladderize"].get("predictions")
        assert (predictions is None) == (point is dense)
        assert point is dense or (predictions["reference"] == str(place / "dense") and predictions["mean_kl"] > 0)
    (bench,) = document["benches"]
    rows = json.loads((out / bench).read_text())["rows"]
    assert [row["model"] for row in rows] == [point["timed"] for point in (dense, first, half)]
    for stage in stages_of(document).values():
        assert (out / stage["output"] / "stage.json").is_file()
        log = (out / stage["output"] / "log.txt").read_text()
        assert f"\n$ {stage['command']}" in log  # which was run
    assert ran(outcome)[-1].startswith("bench")
    assert all(point["name"] in outcome.stdout for point in document["points"])


def test_the_same_sweep_runs_nothing(place, swept):
    out, _ = swept
    before = {path: path.stat().st_mtime_ns for path in out.rglob("*.safetensors")}
    outcome, document = sweep(out.parent, small(place))
    assert ran(outcome) == []
    assert {path: path.stat().st_mtime_ns for path in out.rglob("*.safetensors")} == before
    assert all(stage["reused"] for stage in stages_of(document).values())


def test_the_example_is_the_file_of_examples():
    assert invoke("sweep", "--write-example").stdout == (ROOT / "examples" / "sweep.yaml").read_text()


# ---- failures ----


def test_a_failing_stage_stops_only_what_needs_it(place, tmp_path):
    """Training that changes nothing makes nothing better, and writes nothing."""
    adapt = {**spec(place)["adapt"][1], "lr": 1e-30, "layouts": None, "write": "best", "heldout": 4}
    content = spec(place, layouts=[{"ladder": "all"}], adapt=["none", adapt])
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


def test_a_model_that_changes_meanwhile_ends_the_sweep(place, tmp_path, monkeypatch):
    save_llama(tmp_path / "dense")
    content = spec(place, adapt=None, bench=None, layouts=[{"ladder": "all"}])
    content["model"] = str(tmp_path / "dense")

    def changing(stage, root):
        config = tmp_path / "dense" / "config.json"
        config.write_text(config.read_text() + "\n")

    monkeypatch.setattr(run, "run_stage", changing)
    outcome = invoke("sweep", write(tmp_path / "s.yaml", content), "--out", tmp_path / "out")
    assert outcome.code == 1
    assert "config.json changed while the sweep ran" in outcome.stderr.splitlines()[-1]
    assert not list((tmp_path / "out").glob("stages/*/stage.json"))


def test_a_stage_of_a_chain_reads_what_the_one_before_wrote(place, tmp_path, monkeypatch):
    """An adapter is merged, in the middle too; what a chain and a single stage share runs once, on all devices."""
    set_gpus(monkeypatch, "0", "1")
    same = {"data": str(place / "ids.npy"), "seq_len": 16, "write": "last"}
    align = {**same, "method": "align", "samples": 8, "heldout": 4}
    lora = {**same, "method": "lora", "max_steps": 3, "batch_size": 2, "lora_rank": 2, "device": "cpu"}
    blocks = {**same, "method": "blocks", "samples": 10, "heldout": 4, "device": "cpu"}
    adapt = [align, lora, [align, lora, blocks]]
    content = spec(place, bench=None, layouts=[{"ladder": "1:3"}], adapt=adapt)
    content["eval"]["device"] = "cpu"
    out = tmp_path / "out"
    _, single, merged, chain = sweep(tmp_path, content)[1]["points"]
    assert [stage["stage"] for stage in chain["stages"]] == ["convert", "adapt", "adapt", "adapt", "eval"]
    assert chain["stages"][:2] == single["stages"][:2]
    assert chain["name"] == "ladder 1:3+align+lora+blocks"
    assert (single["adapted"], single["tokens"]) == ("align", 8 * 16)
    assert (chain["adapted"], chain["tokens"]) == ("align + lora + blocks", 8 * 16 + 96 + 10 * 16)
    assert (merged["adapted"], merged["tokens"]) == ("lora", 96)
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
    # killed between the merge and the mark of its stage
    (out / merged["stages"][1]["output"] / "stage.json").unlink()
    assert sweep(tmp_path, content)[1]["complete"]
