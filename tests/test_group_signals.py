"""Ranks that this process has started end as it does: by a signal, after they have saved, or with it."""

import os
import re
import signal
import sys
import time
from pathlib import Path

from ladderize.errors import UserError
from tests import warm
from tests.helpers import all_gone


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
from tests.test_group_signals import work
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
