"""One rank of a group that is not there: every collective becomes a delay of the length that a link is said to take."""

import functools
import statistics
import time

import torch
from torch import Tensor

from ladderize.runtime.collectives.base import Collectives, Handle, side_by_side
from ladderize.runtime.collectives.links import Link

# Only the long part of a long delay is slept: waking up is late by a fraction of a millisecond, and the core is cold by
# then.
SLEEP_SLACK = 2e-3


class Emulated(Collectives):
    """Collectives of ``ranks`` ranks over ``link``, for one process on a CPU: a timer. Sums are this rank's partials
    alone.

    One message is on the link at a time: a second one starts when the first is through.
    """

    name = "emulated"

    def __init__(self, ranks: int, link: Link) -> None:
        super().__init__(ranks)
        self.seconds = functools.cache(link.seconds)
        self.free_at = 0.0

    def all_reduce_async(self, x: Tensor) -> Handle:
        now = time.perf_counter()  # first of all: what follows is this program's own time, not the link's
        start = now if now > self.free_at else self.free_at
        self.free_at = done_at = start + self.seconds(x.nbytes)
        return Handle(functools.partial(_through, x, done_at))

    def all_gather(self, x: Tensor) -> Tensor:
        return self.all_reduce_async(side_by_side(x, self.ranks)).wait()


class EmulatedOnGpu(Collectives):
    """The same on a GPU: a kernel that idles for that long, on a communication stream; CUDA graphs can capture it."""

    name = "emulated"

    def __init__(self, ranks: int, link: Link, device: torch.device) -> None:
        super().__init__(ranks)
        self.link = link
        self.stream = torch.cuda.Stream(device)
        self.cycles_per_second = _cycles_per_second()

    def all_reduce_async(self, x: Tensor) -> Handle:
        self.stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self.stream):
            torch.cuda._sleep(int(self.link.seconds(x.nbytes) * self.cycles_per_second))
            through = self.stream.record_event()

        def finish() -> Tensor:
            # for this message, and not for those that were sent after it
            torch.cuda.current_stream().wait_event(through)
            return x

        return Handle(finish)

    def all_gather(self, x: Tensor) -> Tensor:
        return self.all_reduce_async(side_by_side(x, self.ranks)).wait()


def emulate(ranks: int, link: Link, device: torch.device) -> Collectives:
    return EmulatedOnGpu(ranks, link, device) if device.type == "cuda" else Emulated(ranks, link)


def _through(x: Tensor, done_at: float) -> Tensor:
    sleep_until(done_at)
    return x


def sleep_until(deadline: float) -> None:
    """Return at ``deadline`` (time.perf_counter) and not before: sleep first, so that the core is free, then watch the
    clock."""
    clock = time.perf_counter
    left = deadline - clock()
    if left > SLEEP_SLACK:
        time.sleep(left - SLEEP_SLACK)
    while clock() < deadline:
        pass


def _cycles_per_second() -> float:
    """The rate of the clock that the idling kernel counts, measured: its documentation promises none."""
    cycles = 20_000_000
    samples = []
    torch.cuda._sleep(20 * cycles)  # until an idle GPU's clock has risen
    for _ in range(5):
        start, stop = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        torch.cuda._sleep(cycles)
        stop.record()
        torch.cuda.synchronize()
        samples.append(cycles / (start.elapsed_time(stop) / 1e3))
    return statistics.median(samples[1:])
