"""What the tests of ``ladderize sweep`` share: a small sweep, and what it says and leaves."""

import contextlib
import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from unittest import mock

import yaml

from ladderize.console import SILENT, Console
from ladderize.sweep import run
from ladderize.sweep.run import SweepRun
from ladderize.sweep.stages import Stage
from ladderize.sweep.sweep_file import read_sweep
from tests import warm
from tests.helpers import invoke

COMMAND = "import sys; sys.argv[0] = 'ladderize'\nfrom ladderize.cli import main\nmain()"
FAST = {"prompt_len": 4, "output_len": 3, "repeat": 1, "warmup": 1, "no_check": True}


def spec(place, **changes):
    """A small sweep of the model in the fixture ``place``; None takes a key out."""
    content = {
        "model": str(place / "dense"),
        "no_verify": True,
        "layouts": [{"ladder": ["2:", "all"]}, {"name": "half", "spd": "1:3", "sync_tp_size": 2}],
        "adapt": [
            "none",
            {
                "method": "full", "layouts": "half", "data": str(place / "ids.npy"), "max_steps": 2, "batch_size": 2,
                "seq_len": 16, "write": "last",
            },
        ],
        "eval": {"perplexity": str(place / "heldout.npy"), "batch_size": 4},
        "bench": [FAST],
        **changes,
    }  # fmt: skip
    return {key: value for key, value in content.items() if value is not None}


def retraining(place, **changes):
    """A small sweep of one layout that is retrained, on two ranks."""
    adapt = {**spec(place)["adapt"][1], "tp_size": 2, **changes}
    del adapt["layouts"]
    return spec(place, layouts=[{"ladder": "all"}], adapt=[adapt], bench=None)


def write(path: Path, content) -> Path:
    path.write_text(yaml.safe_dump(content))
    return path


def sweep(folder: Path, content, *options, code: int = 0):
    """Run a sweep in ``folder / "out"``: what it said, and its document."""
    outcome = invoke("sweep", write(folder / "s.yaml", content), "--out", folder / "out", *options)
    assert outcome.code == code, outcome.stderr
    return outcome, read(folder / "out")


@contextlib.contextmanager
def stages_here() -> Iterator[None]:
    """Sweeps inside run their stages in this process, which spares each the imports. tests/test_sweep.py does not."""

    def run_here(stage: Stage, root: Path) -> None:
        before = Path.cwd()
        os.chdir(root)
        try:
            for step in stage.steps:
                step.run(step.options, Console())
        finally:
            os.chdir(before)

    with mock.patch.object(run, "run_stage", run_here):
        yield


def start(file: Path, out: Path) -> warm.WarmProcess:
    """A sweep in a process of its own."""
    return warm.WarmProcess([sys.executable, "-c", COMMAND, "sweep", file, "--out", out])


def last_saved(out: Path) -> int:
    """The step of the last complete state of the retraining."""
    states = out.glob("stages/adapt-*/model.ladderize-work/step-????????")
    return max((int(path.name.removeprefix("step-")) for path in states), default=0)


def set_gpus(monkeypatch, *names: str) -> None:
    """Let a sweep believe that this machine has these."""
    monkeypatch.setattr("torch.cuda.device_count", lambda: len(names))


def plan_of(folder: Path, content) -> SweepRun:
    asked = read_sweep(write(folder / "s.yaml", content))
    return SweepRun(asked, folder / "out", SILENT)


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
