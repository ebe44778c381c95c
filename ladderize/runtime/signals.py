"""Ctrl-C and SIGTERM for ranks that this process has started, and that save what they have before they end."""

import contextlib
import os
import signal
from collections.abc import Iterator, Sequence
from multiprocessing.process import BaseProcess
from types import FrameType

from ladderize.errors import UserError


@contextlib.contextmanager
def handing_on_signals(processes: Sequence[BaseProcess]) -> Iterator[None]:
    """SIGTERM and the first Ctrl-C reach every process as SIGTERM, and the block goes on: it ends when they do.

    A second signal kills them and ends the block. Raises KeyboardInterrupt or UserError where a signal ended the
    processes before they were ready to save.
    """
    received: list[int] = []

    def hand_on(number: int, frame: FrameType | None) -> None:
        received.append(number)
        again = len(received) > 1
        for process in processes:
            with contextlib.suppress(ProcessLookupError):
                os.kill(process.pid or 0, signal.SIGKILL if again else signal.SIGTERM)
        if again:
            raise _stopped(number)

    try:
        before = {number: signal.signal(number, hand_on) for number in (signal.SIGTERM, signal.SIGINT)}
    except ValueError:  # not the main thread: its owner handles signals
        yield
        return
    try:
        yield
    except UserError:
        if received and any(process.exitcode == -signal.SIGTERM for process in processes):
            raise _stopped(received[0]) from None
        raise
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _stopped(number: int) -> BaseException:
    if number == signal.SIGINT:
        return KeyboardInterrupt()
    return UserError("stopped by SIGTERM; run the same command again to resume from the last saved state")
