"""Backends that note or show what another one does."""

from collections.abc import Callable
from typing import Any

from torch import Tensor
from torch.profiler import record_function

from ladderize.runtime.collectives.base import Collectives, Handle


class Recording(Collectives):
    """Another backend, with a note of every all-reduce: what it moved and when it was started, waited for and done."""

    def __init__(self, inner: Collectives, clock: Callable[[], float]) -> None:
        super().__init__(inner.ranks)
        self.inner, self.clock, self.name = inner, clock, inner.name
        self.records: list[dict[str, Any]] = []
        self.gathered: list[int] = []

    def all_reduce_async(self, x: Tensor) -> Handle:
        record = {"bytes": x.nbytes, "start": self.clock()}
        self.records.append(record)
        handle = self.inner.all_reduce_async(x)
        record["started"] = self.clock()

        def finish() -> Tensor:
            record["wait"] = self.clock()
            total = handle.wait()
            record["end"] = self.clock()
            return total

        return Handle(finish)

    def all_gather(self, x: Tensor) -> Tensor:
        self.gathered.append(x.nbytes)
        return self.inner.all_gather(x)

    def close(self) -> None:
        self.inner.close()


START, WAIT = "all-reduce: start", "all-reduce: wait"


class Traced(Collectives):
    """Another backend, whose starts and waits appear in torch's profiler; ``sizes``: bytes of the all-reduces, in their
    order."""

    def __init__(self, inner: Collectives) -> None:
        super().__init__(inner.ranks)
        self.inner, self.name = inner, inner.name
        self.sizes: list[int] = []

    def all_reduce_async(self, x: Tensor) -> Handle:
        self.sizes.append(x.nbytes)
        with record_function(START):
            handle = self.inner.all_reduce_async(x)

        def finish() -> Tensor:
            with record_function(WAIT):
                return handle.wait()

        return Handle(finish)

    def all_gather(self, x: Tensor) -> Tensor:
        with record_function("all-gather"):
            return self.inner.all_gather(x)
