"""Ranks that this process has started end as it does: by a signal, after they have saved, or with it."""

import multiprocessing
import os
import signal
import sys
import time

import pytest

from ladderize.errors import UserError
from ladderize.runtime.signals import handing_on_signals
from tests import warm
from tests.helpers import all_gone


def work(group, folder, save_seconds):
    """What a training does with signals: a note of each rank that began, and a last step after SIGTERM."""
    from ladderize.adapt.retrain.signals import stop_signals

    with stop_signals(announce=group.is_main) as stopped:
        (folder / f"{group.rank}.pid").write_text(str(os.getpid()))
        while not stopped():
            time.sleep(0.01)
        time.sleep(save_seconds)
        (folder / f"{group.rank}.saved").touch()
        raise UserError("stopped by a signal after step 7")


LEADER = """
import sys
from pathlib import Path
from ladderize.runtime.launch import run
from tests.test_group_signals import work
for number, seconds in enumerate(sys.argv[2:]):
    folder = Path(sys.argv[1]) / str(number)
    try:
        run(work, folder, float(seconds), tp_size=2, device="cpu", threads=1, stoppable=True)
    except BaseException as error:
        (folder / "outcome.new").write_text(f"{type(error).__name__}: {error}")
        (folder / "outcome.new").rename(folder / "outcome")
"""


def pids(folder, count=2):
    """Of the ranks, once all have begun."""
    deadline = time.monotonic() + 60
    while len(files := sorted(folder.glob("*.pid"))) < count or not all(file.read_text() for file in files):
        assert time.monotonic() < deadline, "the ranks have not begun"
        time.sleep(0.01)
    return [int(file.read_text()) for file in files]


def outcome_of(folder):
    deadline = time.monotonic() + 30
    while not (folder / "outcome").exists():
        assert time.monotonic() < deadline, "the ranks have not ended"
        time.sleep(0.01)
    return (folder / "outcome").read_text()


def test_signals_and_deaths(tmp_path):
    """One process starts groups of ranks, one after the other; each is ended in another way."""
    scenarios = [
        # (signals, to whom, seconds that saving takes, what is raised, whether the ranks have saved)
        ([signal.SIGTERM], "leader", 0.2, "UserError: stopped by a signal after step 7", True),
        ([signal.SIGINT], "leader", 0.2, "UserError: stopped by a signal after step 7", True),
        ([signal.SIGTERM, signal.SIGTERM], "leader", 60, "UserError: stopped by SIGTERM; run the same", False),
        ([signal.SIGTERM, signal.SIGINT], "leader", 60, "KeyboardInterrupt", False),
        ([signal.SIGKILL], "rank", 60, "UserError: rank 1 was killed by SIGKILL", False),
        ([signal.SIGKILL], "leader", 60, None, False),
    ]
    for number in range(len(scenarios)):
        (tmp_path / str(number)).mkdir()
    seconds = [scenario[2] for scenario in scenarios]
    leader = warm.WarmProcess([sys.executable, "-c", LEADER, tmp_path, *seconds])
    for number, (signals, whom, _, raised, saved) in enumerate(scenarios):
        folder = tmp_path / str(number)
        ranks = pids(folder)
        begin = time.monotonic()
        for signal_number in signals:
            os.kill(leader.pid if whom == "leader" else ranks[1], signal_number)
            time.sleep(0.3)
        if raised is not None:
            assert raised in outcome_of(folder)
        assert all_gone(ranks), number
        assert time.monotonic() - begin < 15, number  # not the minute that saving takes
        assert len(list(folder.glob("*.saved"))) == (2 if saved else 0), number
    assert "stopping after the step under way" in leader.communicate()[1]


def test_a_signal_before_the_ranks_can_save():
    """Then there is nothing to wait for."""
    process = multiprocessing.get_context("fork").Process(target=time.sleep, args=(60,))
    process.start()

    def lead():
        with handing_on_signals([process]):
            os.kill(os.getpid(), signal.SIGTERM)
            process.join(10)
            raise UserError("rank 0 was killed by SIGTERM; the whole group was stopped")

    with pytest.raises(UserError, match="stopped by SIGTERM"):
        lead()
    assert process.exitcode == -signal.SIGTERM
