"""Backends that record or trace the messages of another one."""

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor
from torch.profiler import record_function

from ladderize.runtime.collectives.base import Collectives, Handle, Split


@dataclass
class ObservedAllReduce:
    """The bytes and the times of one all-reduce: ``start`` to ``started`` is the call that starts it, ``wait`` to
    ``end`` the wait for it, in seconds of the recording's clock.

    over: the collectives that carry it.
    """

    bytes: int
    over: Collectives
    start: float
    started: float = 0.0
    wait: float = 0.0
    end: float = 0.0


class Observed(Collectives):
    """A wrapper that passes every call on to another backend: the base of those that record or trace."""

    def __init__(self, inner: Collectives) -> None:
        super().__init__(inner.ranks)
        self.inner, self.name, self.copies = inner, inner.name, inner.copies

    def split(self, size: int) -> Split:
        return self.inner.split(size)

    def all_reduce_async(self, x: Tensor) -> Handle:
        return self.inner.all_reduce_async(x)

    def all_gather(self, x: Tensor) -> Tensor:
        return self.inner.all_gather(x)

    def tidy(self) -> None:
        self.inner.tidy()

    def settle(self) -> None:
        self.inner.settle()


class Recording(Observed):
    """A backend that records every all-reduce.

    gathered: bytes of the all-gathers, in their order.
    """

    def __init__(self, inner: Collectives, clock: Callable[[], float]) -> None:
        super().__init__(inner)
        self.clock = clock
        self.all_reduces: list[ObservedAllReduce] = []
        self.gathered: list[int] = []

    def split(self, size: int) -> Split:
        parts = [Recording(part, self.clock) for part in self.inner.split(size)]
        for part in parts:
            part.all_reduces, part.gathered = self.all_reduces, self.gathered
        return Split(*parts)

    def all_reduce_async(self, x: Tensor) -> Handle:
        seen = ObservedAllReduce(x.nbytes, self.inner, start=self.clock())
        self.all_reduces.append(seen)
        handle = self.inner.all_reduce_async(x)
        seen.started = self.clock()

        def finish() -> Tensor:
            seen.wait = self.clock()
            total = handle.wait()
            seen.end = self.clock()
            return total

        return Handle(finish)

    def all_gather(self, x: Tensor) -> Tensor:
        self.gathered.append(x.nbytes)
        return self.inner.all_gather(x)


TRACED_START, TRACED_WAIT = "all-reduce: start", "all-reduce: wait"


class Traced(Observed):
    """A backend that shows starts and waits in torch's profiler.

    sent: the all-reduces in their order: the collectives that carry them, and their bytes.
    """

    def __init__(self, inner: Collectives) -> None:
        super().__init__(inner)
        self.sent: list[tuple[Collectives, int]] = []

    def split(self, size: int) -> Split:
        parts = [Traced(part) for part in self.inner.split(size)]
        for part in parts:
            part.sent = self.sent
        return Split(*parts)

    def all_reduce_async(self, x: Tensor) -> Handle:
        self.sent.append((self.inner, x.nbytes))
        with record_function(TRACED_START):
            handle = self.inner.all_reduce_async(x)

        def finish() -> Tensor:
            with record_function(TRACED_WAIT):
                return handle.wait()

        return Handle(finish)

    def all_gather(self, x: Tensor) -> Tensor:
        with record_function("all-gather"):
            return self.inner.all_gather(x)
