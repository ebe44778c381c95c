"""A backend that records the messages of another one."""

from dataclasses import dataclass

from torch import Tensor
from torch.profiler import record_function

from ladderize.runtime.collectives.base import Collectives, Handle, Split

TRACED_START, TRACED_WAIT = "all-reduce: start", "all-reduce: wait"


class Observed(Collectives):
    """A wrapper that passes every call on to another backend."""

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


@dataclass
class RecordedSum:
    """The collectives that carry an all-reduce, its bytes, and whether it was waited for."""

    over: Collectives
    bytes: int
    completed: bool = False


class Recording(Observed):
    """A backend that records every message, and shows starts and waits in torch's profiler.

    all_reduces: in their order.
    gathered: bytes of the all-gathers, in their order.
    """

    def __init__(self, inner: Collectives) -> None:
        super().__init__(inner)
        self.all_reduces: list[RecordedSum] = []
        self.gathered: list[int] = []

    def split(self, size: int) -> Split:
        parts = [Recording(part) for part in self.inner.split(size)]
        for part in parts:
            part.all_reduces, part.gathered = self.all_reduces, self.gathered
        return Split(*parts)

    def all_reduce_async(self, x: Tensor) -> Handle:
        recorded = RecordedSum(self.inner, x.nbytes)
        self.all_reduces.append(recorded)
        with record_function(TRACED_START):
            handle = self.inner.all_reduce_async(x)

        def finish() -> Tensor:
            with record_function(TRACED_WAIT):
                total = handle.wait()
            recorded.completed = True
            return total

        return Handle(finish)

    def all_gather(self, x: Tensor) -> Tensor:
        self.gathered.append(x.nbytes)
        with record_function("all-gather"):
            return self.inner.all_gather(x)
