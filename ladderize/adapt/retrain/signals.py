"""Being asked to stop: the step under way is finished, and the state saved."""

import multiprocessing
import os
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

HEARD = b"\nstopping after the step under way, whose state is then saved (Ctrl-C again stops at once)\n"


@contextmanager
def stop_signals(*, announce: bool) -> Iterator[Callable[[], bool]]:
    """SIGTERM and the first Ctrl-C ask to stop after the step under way; yields whether one came. A second Ctrl-C
    interrupts. announce: say on stderr that the signal was understood.

    A rank that ladderize has started leaves Ctrl-C, which a terminal sends to all processes, to the one that started
    it: that one hands it on as SIGTERM.
    """
    received: list[int] = []

    def note(number: int, frame: FrameType | None) -> None:
        if received and number == signal.SIGINT:
            raise KeyboardInterrupt
        received.append(number)
        if announce and len(received) == 1:
            os.write(2, HEARD)  # a handler may have interrupted a print, so it must not print itself

    try:
        left = multiprocessing.parent_process() is not None and signal.getsignal(signal.SIGINT) == signal.SIG_IGN
        heard = (signal.SIGTERM,) if left else (signal.SIGTERM, signal.SIGINT)
        before = {number: signal.signal(number, note) for number in heard}
    except ValueError:  # not the main thread: its owner handles signals
        yield lambda: False
        return
    try:
        yield lambda: bool(received)
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
