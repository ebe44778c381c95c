"""``ladderize sweep`` that is killed, interrupted, or started twice."""

import contextlib
import os
import signal
import sys
from pathlib import Path

import pytest

from tests import warm
from tests.helpers import invoke, one_sentence
from tests.sweeps import make_place, ran, read, spec, stages_of, write

COMMAND = "import sys; sys.argv[0] = 'ladderize'\nfrom ladderize.cli import main\nmain()"


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    return make_place(tmp_path_factory.mktemp("killed"))


def content(place, **changes):
    """Retraining long enough to be killed in it, also where this process is not given its turn for seconds; on two
    processes."""
    adapt = {**spec(place)["adapt"][1], "max_steps": 150, "save_every": 5, "eval_every": 150, "processes": 2}
    del adapt["layouts"]
    return spec(place, sensitivity=None, layouts=[{"ladder": "all"}], adapt=[adapt], bench=None, **changes)


def start(file, out, *options):
    return warm.WarmProcess([sys.executable, "-c", COMMAND, "sweep", file, "--out", out, *options])


def processes_in(folder) -> list[int]:
    """Of which the working folder is this one: the workers of a sweep."""
    found = []
    for entry in Path("/proc").iterdir():
        with contextlib.suppress(OSError):
            if entry.name.isdigit() and Path(os.readlink(entry / "cwd")) == Path(folder):
                found.append(int(entry.name))
    return found


def saved(out):
    """A second state is being written, so the first one is complete."""
    return lambda: len(list(out.glob("stages/adapt-*/model.ladderize-work/*00*"))) > 1


def check_it_goes_on(file, out):
    """The next run takes what was complete, and the retraining from where it was."""
    complete = {path.parent.name for path in out.glob("stages/*/stage.json")}
    assert len(complete) == 2  # the dense model's evaluation, the conversion
    outcome = invoke("sweep", file, "--out", out)
    assert outcome.code == 0, outcome.stderr + "".join(path.read_text() for path in out.glob("stages/adapt-*/*.txt"))
    assert [line.split(":")[0] for line in ran(outcome)] == ["adapt", "eval"]
    (log,) = out.glob("stages/adapt-*/log.txt")
    assert "resuming after step" in log.read_text()
    document = read(out)
    assert document["complete"]
    assert {name for name, stage in stages_of(document).items() if stage["reused"]} == {
        f"stages/{name}" for name in complete
    }


def test_sigkill_loses_only_what_was_not_saved(place, tmp_path):
    out, file = tmp_path / "out", write(tmp_path / "s.yaml", content(place))
    process = start(file, out)
    warm.wait_until(saved(out), process)
    workers = processes_in(out)
    assert len(workers) >= 3  # the stage's, and its two ranks
    process.kill()
    process.exit_code()
    warm.wait_until(lambda: processes_in(out) == [])  # no worker outlives it
    statuses = [stage["status"] for stage in stages_of(read(out)).values()]
    assert statuses.count("running") == 1
    check_it_goes_on(file, out)


def test_ctrl_c_saves_what_runs_and_says_so(place, tmp_path):
    out, file = tmp_path / "out", write(tmp_path / "s.yaml", content(place))
    process = start(file, out)
    warm.wait_until((out / "sweep.json").exists, process)
    other = invoke("sweep", file, "--out", out)
    assert f"another sweep runs in {out}" in one_sentence(other)
    warm.wait_until(saved(out), process)
    os.kill(process.pid, signal.SIGINT)
    stdout, stderr = process.communicate()
    assert process.returncode == 130, (stdout, stderr)
    assert "complete stages are kept" in stderr
    warm.wait_until(lambda: processes_in(out) == [])
    assert [stage["status"] for stage in stages_of(read(out)).values()].count("running") == 0
    check_it_goes_on(file, out)


def test_a_worker_that_is_killed_is_a_failed_stage(place, tmp_path):
    out, file = tmp_path / "out", write(tmp_path / "s.yaml", content(place))
    process = start(file, out)
    warm.wait_until(saved(out), process)
    for worker in processes_in(out):
        with contextlib.suppress(ProcessLookupError):
            os.kill(worker, signal.SIGKILL)
    _, stderr = process.communicate()
    assert process.returncode == 1
    assert "was killed by SIGKILL (out of memory, perhaps)" in stderr
    check_it_goes_on(file, out)
