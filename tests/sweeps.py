"""What the tests of ``ladderize sweep`` share: a small sweep, and what it says and leaves."""

import json
from pathlib import Path

import numpy as np
import yaml

from ladderize.tradeoff.sweep.builder import Inputs, StageBuilder
from ladderize.tradeoff.sweep.plan import Planner
from ladderize.tradeoff.sweep.sweep_file import read_sweep
from tests.helpers import SHAPE, invoke, save_llama

FAST = {"prompt_len": 4, "output_len": 3, "repeat": 1, "warmup": 1, "no_check": True}


def make_place(folder: Path) -> Path:
    """A dense model and data."""
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


def sweep(folder: Path, content, *options, code: int = 0):
    """Run a sweep in ``folder / "out"``: what it said, and its document."""
    outcome = invoke("sweep", write(folder / "s.yaml", content), "--out", folder / "out", *options)
    assert outcome.code == code, outcome.stderr
    return outcome, read(folder / "out")


def planner(folder: Path, content) -> Planner:
    asked = read_sweep(write(folder / "s.yaml", content))
    return Planner.of(asked, StageBuilder.of(asked, Inputs(folder / "cache")), folder / "out")


def read(folder: Path) -> dict:
    return json.loads((folder / "sweep.json").read_text())


def stages_of(document) -> dict[str, dict]:
    found = [stage for point in document["points"] for stage in point["stages"]] + document["stages"]
    return {stage["output"]: stage for stage in found}


def ran(outcome) -> list[str]:
    """The stages that a run did, as it said."""
    lines = outcome.stderr.splitlines()
    return [line.partition(": done in")[0] for line in lines if ": done in" in line]


def rerun(place, out, **changes):
    outcome, _ = sweep(out.parent, spec(place, **changes))
    return sorted(line.split(":")[0].split()[0] for line in ran(outcome))
