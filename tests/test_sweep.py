"""``ladderize sweep``: every stage is kept under what it depends on, and a sweep goes on from anything."""

import json
from pathlib import Path

import numpy as np
import pytest
import yaml

from ladderize.layout import Layout
from tests.helpers import ROOT, SHAPE, invoke, one_sentence, save_llama

FAST = {"prompt_len": 4, "output_len": 3, "repeat": 1, "warmup": 1, "no_check": True}


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """A dense model and data."""
    folder = tmp_path_factory.mktemp("sweep")
    save_llama(folder / "dense")
    np.save(folder / "ids.npy", np.random.randint(3, SHAPE["vocab_size"], (24, 16)))
    np.save(folder / "heldout.npy", np.random.randint(3, SHAPE["vocab_size"], (6, 16)))
    return folder


def spec(place, **changes):
    """A small sweep; None takes a key out."""
    content = {
        "model": str(place / "dense"),
        "no_verify": True,
        "sensitivity": {"data": str(place / "ids.npy"), "samples": 4},
        "layouts": [{"ladder": ["2:", "all"]}, {"name": "half", "mode": "spd", "fraction": 0.5, "sync_tp_size": 2}],
        "adapt": [
            "none",
            {
                "method": "full",
                "layouts": "half",
                "data": str(place / "ids.npy"),
                "max_steps": 2,
                "batch_size": 2,
                "seq_len": 16,
                "write": "last",
            },
        ],
        "eval": {"perplexity": str(place / "heldout.npy"), "batch_size": 4},
        "bench": [FAST],
        **changes,
    }
    return {key: value for key, value in content.items() if value is not None}


def write(path: Path, content) -> Path:
    path.write_text(yaml.safe_dump(content))
    return path


def read(folder: Path) -> dict:
    return json.loads((folder / "sweep.json").read_text())


def stages_of(document) -> dict[str, dict]:
    found = [stage for point in document["points"] for stage in point["stages"]] + document["stages"]
    return {stage["output"]: stage for stage in found}


def ran(outcome) -> list[str]:
    """The stages that a run did, as it said."""
    lines = outcome.stderr.splitlines()
    return [line.partition(": done in")[0] for line in lines if ": done in" in line]


@pytest.fixture(scope="module")
def swept(place):
    """A whole sweep: its folder and what it said."""
    file = write(place / "sweep.yaml", spec(place))
    outcome = invoke("sweep", file, "--out", place / "out")
    assert outcome.code == 0, outcome.stderr
    return place / "out", outcome


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
    for point in document["points"]:
        results = json.loads((out / point["results"]).read_text())
        assert [entry["ladderize"]["model"] for entry in results["models"]] == [point["model"]]
    (bench,) = document["benches"]
    rows = json.loads((out / bench).read_text())["rows"]
    assert [row["model"] for row in rows] == [point["timed"] for point in (dense, first, second, half)]
    (sensitivity,) = document["sensitivities"]
    assert json.loads((out / sensitivity).read_text())["mode"] == "spd"
    for stage in stages_of(document).values():
        assert (out / stage["output"] / "stage.json").is_file()
        assert stage["command"].startswith("ladderize ")
    assert ran(outcome)[-1].startswith("bench")
    assert "ladderize report" in outcome.stdout


def test_the_same_sweep_runs_nothing(place, swept):
    out, _ = swept
    before = {path: path.stat().st_mtime_ns for path in out.rglob("*.safetensors")}
    outcome = invoke("sweep", place / "sweep.yaml", "--out", out)
    assert outcome.code == 0, outcome.stderr
    assert ran(outcome) == []
    assert {path: path.stat().st_mtime_ns for path in out.rglob("*.safetensors")} == before
    assert all(stage["reused"] for stage in stages_of(read(out)).values())


def test_the_example_is_the_file_of_examples(tmp_path):
    assert invoke("sweep", tmp_path / "s.yaml", "--write-example").code == 0
    written = (tmp_path / "s.yaml").read_text()
    assert written == (ROOT / "examples" / "sweep.yaml").read_text()
    assert invoke("sweep", "--write-example").stdout == written
    assert "exists" in one_sentence(invoke("sweep", tmp_path / "s.yaml", "--write-example"))
