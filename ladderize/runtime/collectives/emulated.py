"""The collectives of one rank of a group that is not there: each is a delay as long as the link takes."""

import functools
import time
from collections.abc import Callable

import torch
from torch import Tensor

from ladderize.errors import UserError
from ladderize.runtime.collectives.base import AcrossGroups, Collectives, Handle, Split
from ladderize.runtime.collectives.gpu import OnStream
from ladderize.runtime.collectives.links import Interconnect, Link
from ladderize.runtime.native.library import why_no_triton

# Only the long part of a long delay is slept: waking up is late by a fraction of a millisecond, and the core is cold by
# then.
SLEEP_SLACK = 2e-3


class Emulated(Collectives):
    """Emulated collectives of ``ranks`` ranks over ``link``, on a CPU: a timer. Sums are this rank's partials alone.
    One message is on the link at a time: a second one starts when the first is through."""

    name = "emulated"

    def __init__(self, ranks: int, link: Link) -> None:
        super().__init__(ranks)
        self.seconds = functools.cache(link.seconds)
        self.free_at = 0.0

    def all_reduce_async(self, x: Tensor) -> Handle:
        now = time.perf_counter()  # read first: what follows is this program's own time, not the link's
        start = now if now > self.free_at else self.free_at
        self.free_at = done_at = start + self.seconds(x.nbytes)

        def finish() -> Tensor:
            sleep_until(done_at)
            return x

        return Handle(finish)


class EmulatedOnGpu(OnStream):
    """Emulated collectives on a GPU: a kernel that idles on a communication stream. CUDA graphs can capture it."""

    name = "emulated"

    def __init__(self, ranks: int, link: Link, device: torch.device) -> None:
        super().__init__(ranks, device)
        self.link = link
        self.idle = idle_on_gpu()

    def reduce(self, x: Tensor, total: Tensor) -> None:
        self.idle(round(self.link.seconds(x.nbytes) * 1e9))


def idle_on_gpu() -> Callable[[int], None]:
    """Return a function that keeps the current stream busy for some nanoseconds."""
    problem = why_no_triton()
    if problem is not None:
        raise UserError(f"emulated ranks on a GPU need Triton: {problem}")
    from ladderize.runtime.native.triton_kernels import idle

    return idle


def emulate(ranks: int, link: Link, device: torch.device, interconnect: Interconnect | None = None) -> Collectives:
    """Return the emulated collectives of ``ranks`` ranks. interconnect: has the links within groups of them, and
    across; None: they are not split."""

    def made(count: int, over: Link) -> Collectives:
        return EmulatedOnGpu(count, over, device) if device.type == "cuda" else Emulated(count, over)

    def make_split(size: int) -> Split:
        assert interconnect is not None
        inner, outer = interconnect.parts(ranks, size)
        within = made(size, inner)
        return Split(within, AcrossGroups(within, made(ranks // size, outer), 0))

    emulated = made(ranks, link)
    if interconnect is not None:
        emulated.make_split = make_split
    return emulated


def sleep_until(deadline: float) -> None:
    """Return at ``deadline`` (time.perf_counter): sleep first, to free the core, then watch the clock."""
    clock = time.perf_counter
    left = deadline - clock()
    if left > SLEEP_SLACK:
        time.sleep(left - SLEEP_SLACK)
    while clock() < deadline:
        pass
