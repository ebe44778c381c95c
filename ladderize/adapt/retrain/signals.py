"""Being asked to stop: the step under way is finished, and the state saved."""

import os
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

HEARD = b"\nstopping after the step under way, whose state is then saved (Ctrl-C again stops at once)\n"


@contextmanager
def stop_signals(*, announce: bool) -> Iterator[Callable[[], bool]]:
    """SIGTERM and the first Ctrl-C ask to stop after the step under way; yields whether one came. A second Ctrl-C
    interrupts. announce: say on stderr that the signal was understood."""
    received: list[int] = []

    def note(number: int, frame: FrameType | None) -> None:
        if received and number == signal.SIGINT:
            raise KeyboardInterrupt
        received.append(number)
        if announce and len(received) == 1:
            os.write(2, HEARD)  # a handler may have interrupted a print, so it must not print itself

    try:
        before = {number: signal.signal(number, note) for number in (signal.SIGTERM, signal.SIGINT)}
    except ValueError:  # not the main thread: its owner handles signals
        yield lambda: False
        return
    try:
        yield lambda: bool(received)
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
