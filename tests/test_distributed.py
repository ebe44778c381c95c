"""Groups of ranks: values come back, one failure ends all of them with one sentence, nothing stays behind. And their
collectives."""

import os
import re
import signal
import sys
import time
from pathlib import Path

import pytest
import torch

from ladderize.boundary import DEBUG
from ladderize.errors import UserError
from ladderize.ranks.device import cores
from ladderize.runtime import launch as distributed
from ladderize.runtime.collectives.shm import SharedMemory
from tests import groups, warm
from tests.helpers import all_gone, invoke


def segments():
    """Shared memory of the groups that this process has started; other workers have theirs."""
    return sorted(Path("/dev/shm").glob(f"ladderize-{os.getpid()}-*"))


@pytest.fixture(scope="module")
def of_two():
    """What two ranks, which are started once, say of all that ends well."""
    seed = int(torch.randint(1 << 30, ()))
    calls = {
        "values": (groups.values, 3),
        "long": (groups.reduce_long, 1 << 24),
        "in flight": (groups.many_in_flight, 6, 6),
    }
    for backend in ("shm", "gloo"):
        calls["random", backend] = groups.reduce_randomly, backend, 60, seed
    found = distributed.run(groups.in_turn, list(calls.values()), tp_size=2, device="cpu")
    return dict(zip(calls, found, strict=True))


def test_values_come_back_from_rank_0(of_two):
    assert distributed.run(groups.values, 3, tp_size=1, device="cpu", threads=1) == [0, 1, [0], 5, 1]
    assert of_two["values"] == [0, 2, [0, 1], 5, max(1, len(cores()) // 2)]


def test_an_exception_of_any_rank_is_one_sentence_and_with_debug_a_traceback(monkeypatch, capfd):
    monkeypatch.setenv(DEBUG, "")
    with pytest.raises(UserError, match="rank 0 failed: unexpected error: ValueError: this rank has had enough"):
        distributed.run(groups.fail, 0, tp_size=2, device="cpu")
    assert "Traceback" not in capfd.readouterr().err
    with pytest.raises(UserError):
        invoke("--debug", "inspect", "/no/such/folder")  # a command's --debug is what its ranks read
    with pytest.raises(UserError):
        distributed.run(groups.fail, 1, tp_size=2, device="cpu")
    assert 'raise ValueError("this rank has had enough")' in capfd.readouterr().err


def test_a_killed_rank_takes_the_group_down(tmp_path):
    with pytest.raises(UserError, match="rank 1 was killed by SIGKILL.*; the whole group was stopped"):
        distributed.run(groups.die, 1, tmp_path / "pid", tp_size=2, device="cpu")
    other = int((tmp_path / "pid.0").read_text())
    with pytest.raises(ProcessLookupError):
        os.kill(other, 0)
    assert not segments()


def test_a_stopped_rank_takes_the_group_down(tmp_path):
    """By SIGSTOP: it lives, and would be waited for without end."""
    with pytest.raises(UserError, match=r"^rank 1 \(process \d+\) lives but has sent nothing for 1 s, so this"):
        distributed.run(groups.stop, 1, tmp_path / "pid", tp_size=2, device="cpu")
    with pytest.raises(ProcessLookupError):
        os.kill(int((tmp_path / "pid").read_text()), 0)
    assert not segments()


@pytest.mark.parametrize("backend", ["shm", "gloo"])
def test_sums_of_random_messages(of_two, backend):
    assert of_two["random", backend] <= 1
    assert not segments()


def test_a_long_message_is_not_summed_before_it_has_left(of_two):
    """The early rank has its peer's message long before its own, too long for any socket buffer, is gone."""
    assert of_two["long"] == 0


def test_four_ranks_as_two_by_two():
    seed = int(torch.randint(1 << 30, ()))
    calls = [(groups.split_sums, backend, seed) for backend in ("shm", "gloo")]
    seen = [([0, 1], [0, 2]), ([0, 1], [1, 3]), ([2, 3], [0, 2]), ([2, 3], [1, 3])]
    assert distributed.run(groups.in_turn, calls, tp_size=4, device="cpu", threads=1) == [seen, seen]
    assert not segments()


def test_as_many_messages_in_flight_as_there_are_slots(of_two):
    assert of_two["in flight"] == 0
    with pytest.raises(UserError, match="more than 6 messages are in flight"):
        distributed.run(groups.many_in_flight, 6, 7, tp_size=2, device="cpu")


def test_where_shared_memory_cannot_serve(monkeypatch):
    problem = SharedMemory.problem
    assert problem(hosts=["a", "a"], cores=2, max_bytes=100) is None
    assert "several hosts" in problem(hosts=["a", "b"], cores=2, max_bytes=100)
    assert "3 ranks would busy-wait on 2 cores" in problem(hosts=["a"] * 3, cores=2, max_bytes=100)
    assert "4 ranks would busy-wait on 2 cores" in problem(hosts=["a"] * 2, cores=2, max_bytes=100, others=2)
    assert "are free" in problem(hosts=["a", "a"], cores=2, max_bytes=1 << 50)
    monkeypatch.setattr("platform.machine", lambda: "aarch64")
    assert "memory ordering" in problem(hosts=["a", "a"], cores=2, max_bytes=100)


def test_a_launcher_that_started_another_number(monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "4")
    monkeypatch.setenv("RANK", "0")
    with pytest.raises(UserError, match="--tp-size 2 was asked for, but the launcher started 4 processes"):
        distributed.check_group_size(2, "cpu")


def work(group, folder, save_seconds):
    """What a training does with signals: a note of each rank that began, and a last step after SIGTERM."""
    from ladderize.adapt.train.loop import stop_signals

    with stop_signals(announce=group.is_main) as stopped:
        (folder / f"{group.rank}.pid").write_text(str(os.getpid()))
        while not stopped():
            time.sleep(0.01)
        (folder / f"{group.rank}.stopping").touch()
        time.sleep(save_seconds)
        (folder / f"{group.rank}.saved").touch()
        raise UserError("stopped by a signal after step 7")


LONGER = 2 * warm.PATIENCE
LEADER = """
import sys
from pathlib import Path
from ladderize.runtime.launch import run
from tests.test_distributed import work
for number, seconds in enumerate(sys.argv[2:]):
    folder = Path(sys.argv[1]) / str(number)
    try:
        run(work, folder, float(seconds), tp_size=2, device="cpu", threads=1, stoppable=True)
    except BaseException as error:
        (folder / "outcome.new").write_text(f"{type(error).__name__}: {error}")
        (folder / "outcome.new").rename(folder / "outcome")
"""


def numbers(folder):
    """The process ids of the ranks that have begun."""
    return [int(text) for file in sorted(folder.glob("*.pid")) if (text := file.read_text())]


def catches_sigterm(pid):
    (caught,) = re.findall(r"SigCgt:\s*(\w+)", Path(f"/proc/{pid}/status").read_text())
    return bool(int(caught, 16) >> (signal.SIGTERM - 1) & 1)


def test_signals_and_deaths(tmp_path):
    """One process starts groups of ranks, one after the other; each is ended in another way."""
    scenarios = [
        # (signals, to whom, seconds that saving takes, what is raised, whether the ranks have saved)
        ([signal.SIGTERM], "leader", 0.2, "UserError: stopped by a signal after step 7", True),
        ([signal.SIGINT], "leader", 0.2, "UserError: stopped by a signal after step 7", True),
        ([signal.SIGTERM, signal.SIGTERM], "leader", LONGER, "UserError: stopped by a signal; run the same", False),
        ([signal.SIGTERM, signal.SIGINT], "leader", LONGER, "UserError: stopped by a signal", False),
        ([signal.SIGKILL], "rank", LONGER, "UserError: rank 1 was killed by SIGKILL", False),
        ([signal.SIGKILL], "leader", LONGER, None, False),
    ]
    for number in range(len(scenarios)):
        (tmp_path / str(number)).mkdir()
    seconds = [scenario[2] for scenario in scenarios]
    leader = warm.WarmProcess([sys.executable, "-c", LEADER, tmp_path, *seconds])
    for number, (signals, whom, _, raised, saved) in enumerate(scenarios):
        folder = tmp_path / str(number)
        warm.wait_until(lambda: len(numbers(folder)) == 2 and catches_sigterm(leader.pid), leader)  # noqa: B023
        ranks = numbers(folder)
        for place, signal_number in enumerate(signals):
            os.kill(leader.pid if whom == "leader" else ranks[1], signal_number)
            if place < len(signals) - 1:  # two that come at once may be one
                warm.wait_until(lambda: len(list(folder.glob("*.stopping"))) == 2, leader)  # noqa: B023
        if raised is not None:
            warm.wait_until((folder / "outcome").exists)
            assert raised in (folder / "outcome").read_text()
        assert all_gone(ranks), number  # before they have saved
        assert len(list(folder.glob("*.saved"))) == (2 if saved else 0), number
    assert "stopping after the step under way" in leader.communicate()[1]
