"""``ladderize sweep`` that a launcher has started on several hosts: here two processes, which take each other for
another host's."""

import json
import re
from dataclasses import replace
from datetime import timedelta
from threading import Thread

import pytest

from ladderize.errors import UserError
from ladderize.ranks.environment import launched
from ladderize.tradeoff.sweep import hosts
from ladderize.tradeoff.sweep.hosts import linked, started_hosts
from ladderize.tradeoff.sweep.launch import StageLaunch
from ladderize.tradeoff.sweep.meeting import launch_variables, meet, set_by_srun, without_launcher
from tests import warm
from tests.helpers import invoke
from tests.sweeps import FAST, last_saved, ran, read, retraining, stages_of, start, write

PLACES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


def start_on_two(file, out):
    port = warm.free_port()
    places = [dict(zip(PLACES, (str(rank), "2", "0", "1", "localhost", str(port)), strict=True)) for rank in range(2)]
    same = {"LADDERIZE_RENDEZVOUS_SECONDS": "300", "GLOO_SOCKET_IFNAME": "lo"}
    return [start(file, out, **place, **same) for place in places]


def test_stages_run_on_every_host(place, tmp_path):
    """The retraining on both; all else on one."""
    file, out = write(tmp_path / "s.yaml", retraining(place, bench=[FAST])), tmp_path / "out"
    lead, other = start_on_two(file, out)
    _, stderr = lead.communicate()
    assert lead.returncode == 0, stderr
    assert other.communicate() == ("", "")
    assert other.returncode == 0
    document = read(out)
    assert document["complete"]
    logs = {stage["output"]: (out / stage["output"] / "log.txt").read_text() for stage in stages_of(document).values()}
    assert {re.search(r"host (\d)\) ====", text)[1] for text in logs.values()} == {"0", "1"}
    (shared,) = [output for output in logs if output.startswith("stages/adapt")]
    assert "torchrun --nnodes 2 " in logs[shared]
    assert "on 2 processes" in logs[shared]
    assert (out / shared / "log-1.txt").stat().st_size > 0
    assert not list(out.glob(".sweep.json.hosts"))
    assert ran(invoke("sweep", file, "--out", out)) == []  # one host alone would do the same


def test_where_the_leader_is_killed_the_other_ends_and_all_goes_on(place, tmp_path):
    long = retraining(place, max_steps=150, heldout=1, eval_every=5)
    file, out = write(tmp_path / "s.yaml", long), tmp_path / "out"
    lead, other = start_on_two(file, out)
    warm.wait_until(lambda: last_saved(out), lead)
    lead.kill()
    _, stderr = other.communicate()
    assert other.returncode == 1
    # what torch's C++ says before is heard here alone: this process has imported torch before it knew its rank
    assert re.search(r"^Error: process 0 of the sweep is gone; run the same command again.*\n\Z", stderr, re.MULTILINE)
    outcome = invoke("sweep", file, "--out", out)
    assert outcome.code == 0, outcome.stderr
    (log,) = out.glob("stages/adapt-*/log.txt")
    assert "resuming after step" in log.read_text()
    assert read(out)["complete"]


def test_a_host_that_says_nothing_more_is_missed(tmp_path, monkeypatch):
    """Whoever waits for it ends, and tells the others why."""
    port = str(warm.free_port())
    for name, value in zip(PLACES, ("0", "2", "0", "1", "localhost", port), strict=True):
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(hosts, "LOST_SECONDS", warm.PATIENCE)
    said = []

    def other():
        store = meet(replace(launch_variables(), rank=1), timedelta(seconds=warm.PATIENCE))
        store.set("1>0/0", '{"name": "b"}')
        said.append(json.loads(store.get("0>1/0"))["gone"])

    thread = Thread(target=other)
    thread.start()

    def lead():
        with linked(started_hosts()) as link:
            assert link.await_message(1) == {"name": "b"}
            monkeypatch.setattr(hosts, "LOST_SECONDS", 1.0)
            link.await_message(1)

    with pytest.raises(UserError, match="process 1 of the sweep has been silent"):
        lead()
    thread.join()
    assert "has been silent" in said[0]


# ---- what takes which hosts ----


@pytest.mark.parametrize(
    ("method", "given", "gpus", "expected"),
    [
        ("full", {"batch_size": 64}, 8, StageLaunch(16, True, 8, 2)),
        ("full", {}, 8, StageLaunch(16, True, 8, 2)),
        ("lora", {"batch_size": 12}, 8, StageLaunch(12, True, 6, 2)),
        ("full", {"batch_size": 7}, 8, StageLaunch(7, True, 7)),
        ("full", {"processes": 8, "fsdp": False}, 8, StageLaunch(8, False, 8)),
        ("full", {"processes": 16, "tp_size": 8}, 8, StageLaunch(16, True, 8, 2)),
        ("sensitivity", {}, 8, StageLaunch(8, False, 8)),
        ("align", {}, 8, StageLaunch(1, False, 1)),
        ("align", {"processes": 16}, 8, StageLaunch(16, False, 8, 2)),
        ("eval", {"tp_size": 4}, 8, StageLaunch(1, False, 4)),
        ("full", {"device": "cpu"}, 8, StageLaunch()),
        ("full", {"processes": 2}, 0, StageLaunch(2, True, 1, 2)),
        ("full", {"processes": 4}, 0, StageLaunch(4, True, 4)),
    ],
)
def test_which_stages_take_all_hosts(method, given, gpus, expected):
    assert StageLaunch.of(given, method, gpus, hosts=2) == expected


STEP = {"SLURM_STEP_NUM_TASKS": "3", "SLURM_STEP_NUM_NODES": "3", "SLURM_PROCID": "2", "SLURM_LOCALID": "0"}
STEP |= {"SLURM_JOB_ID": "41234", "SLURM_STEP_NODELIST": "gpu[07-08,11]"}


def test_a_process_that_srun_alone_has_started(monkeypatch):
    for name in (*PLACES, *STEP):
        monkeypatch.delenv(name, raising=False)
    found = set_by_srun(STEP)
    assert dict(zip(PLACES, ("2", "3", "0", "1", "gpu07", "21234"), strict=True)) == found
    assert set_by_srun({**STEP, "SLURM_STEP_NODELIST": "a,b,c"})["MASTER_ADDR"] == "a"
    batch = {name: value for name, value in STEP.items() if "STEP" not in name}
    for none in ({}, batch, {**STEP, "WORLD_SIZE": "3"}, {**STEP, "SLURM_STEP_NUM_TASKS": "1"}):
        assert set_by_srun(none) == {}
    for name, value in found.items():
        monkeypatch.setenv(name, value)
    assert (started_hosts().rank, started_hosts().size) == (2, 3)
    assert without_launcher({**found, "TORCHELASTIC_RUN_ID": "x", "HOME": "/"}) == {"HOME": "/"}
    for name, value in set_by_srun({**STEP, "SLURM_STEP_NUM_NODES": "1"}).items():
        monkeypatch.setenv(name, value)
    assert launched().local_size == 3
    with pytest.raises(UserError, match="launcher started 3 here: say torchrun --nproc-per-node 1, or srun"):
        started_hosts()
