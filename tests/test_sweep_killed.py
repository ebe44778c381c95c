"""``ladderize sweep`` that is killed, interrupted, or started twice."""

import contextlib
import os
import signal
from pathlib import Path

from tests import warm
from tests.helpers import invoke, invoke_well, one_sentence
from tests.sweeps import last_saved, ran, read, retraining, stages_of, start, write


def processes_in(folder) -> list[int]:
    """Of which the working folder is this one: the workers of a sweep."""
    found = []
    for entry in Path("/proc").iterdir():
        with contextlib.suppress(OSError):
            if entry.name.isdigit() and Path(os.readlink(entry / "cwd")) == Path(folder):
                found.append(int(entry.name))
    return found


def statuses(out) -> list[str]:
    return [stage["status"] for stage in stages_of(read(out)).values()]


def complete(out) -> set[str]:
    return {f"stages/{path.parent.name}" for path in out.glob("stages/*/stage.json")}


def test_whatever_ends_it_the_same_command_goes_on(place, tmp_path):
    """One sweep, ended in its retraining again and again: each run takes what was complete, and the retraining from
    where it was. That is long enough to be ended in it, also where this process is not given its turn for seconds."""
    warm.warm_python().preload("accelerate", "datasets", "peft")
    long = retraining(place, max_steps=300, heldout=1, eval_every=5)
    out, file = tmp_path / "out", write(tmp_path / "s.yaml", long)

    def started(times):
        """In its retraining, which has gone on so often."""
        before, process = last_saved(out), start(file, out)
        warm.wait_until(lambda: last_saved(out) > before, process)
        (log,) = out.glob("stages/adapt-*/log.txt")
        assert log.read_text().count("resuming after step") == times
        return process

    # its worker and the ranks are killed: a failed stage
    process = started(times=0)
    workers = processes_in(out)
    assert len(workers) >= 3  # the stage's, and its two ranks
    for worker in workers:
        with contextlib.suppress(ProcessLookupError):
            os.kill(worker, signal.SIGKILL)
    _, stderr = process.communicate()
    assert process.returncode == 1
    assert "was killed by SIGKILL (out of memory, perhaps)" in stderr
    assert sorted(statuses(out)) == ["done", "done", "failed", "skipped"]
    kept = complete(out)
    assert len(kept) == 2  # the dense model's evaluation, the conversion

    # Ctrl-C: what runs is saved
    process = started(times=1)
    assert f"another sweep runs in {out}" in one_sentence(invoke("sweep", file, "--out", out))
    os.kill(process.pid, signal.SIGINT)
    stdout, stderr = process.communicate()
    assert process.returncode == 130, (stdout, stderr)
    assert "complete stages are kept" in stderr
    warm.wait_until(lambda: processes_in(out) == [])
    assert "running" not in statuses(out)
    (log,) = out.glob("stages/adapt-*/log.txt")
    assert "\nError: stopped by a signal" in log.read_text()
    assert "Traceback" not in log.read_text()

    # SIGKILL: only what was not saved is lost
    process = started(times=2)
    process.kill()
    process.exit_code()
    warm.wait_until(lambda: processes_in(out) == [])  # no worker outlives it
    assert statuses(out).count("running") == 1
    assert complete(out) == kept

    outcome = invoke_well("sweep", file, "--out", out)
    assert [line.split(":")[0] for line in ran(outcome)] == ["adapt", "eval"]
    (log,) = out.glob("stages/adapt-*/log.txt")
    assert log.read_text().count("resuming after step") == 3
    document = read(out)
    assert document["complete"]
    assert {name for name, stage in stages_of(document).items() if stage["reused"]} == kept
