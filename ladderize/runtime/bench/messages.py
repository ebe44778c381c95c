"""The messages of a pass, against those that its layout asks for, counted before anything is timed: the reference check
cannot see a sum that is left out where sums are emulated, or where weights are random."""

import contextlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from torch import Tensor
from torch.profiler import record_function

from ladderize.errors import UserError
from ladderize.layout import APART, BLOCKING, DROPPED, HIDING, Layout
from ladderize.runtime.collectives.base import Collectives, Handle, Split
from ladderize.runtime.schedule import Schedule
from ladderize.runtime.shards import Shape, group_size

TRACED_START, TRACED_WAIT = "all-reduce: start", "all-reduce: wait"


class Observed(Collectives):
    """A wrapper that passes every call on to another backend, sums by ``send``."""

    def __init__(self, inner: Collectives) -> None:
        super().__init__(inner.ranks)
        self.inner, self.name, self.copies = inner, inner.name, inner.copies

    def split(self, size: int) -> Split:
        return self.inner.split(size)

    def all_reduce_async(self, x: Tensor, *into: Tensor) -> Handle:
        return self.send(lambda message: self.inner.all_reduce_async(message, *into), x)

    def all_reduce_blocking(self, x: Tensor) -> Handle:
        return self.send(self.inner.all_reduce_blocking, x)

    def send(self, all_reduce: Callable[[Tensor], Handle], x: Tensor) -> Handle:
        return all_reduce(x)

    def all_gather(self, x: Tensor) -> Tensor:
        return self.inner.all_gather(x)

    @property
    def parts(self) -> list[Collectives]:
        return [self.inner]


@dataclass
class Message:
    """A message of a pass: an all_reduce, or an all_gather of ``bytes`` from each rank."""

    collective: str
    over: Collectives
    bytes: int
    completed: bool = False  # once the sum has been waited for
    vocabulary: bool = False  # the embedding's or the LM head's, which every layout waits for


class Recording(Observed):
    """A backend that records its messages in their order, and shows starts and waits in torch's profiler."""

    def __init__(self, inner: Collectives) -> None:
        super().__init__(inner)
        self.messages: list[Message] = []

    def split(self, size: int) -> Split:
        split = [Recording(recording) for recording in self.inner.split(size)]
        for recording in split:
            recording.messages = self.messages
        return Split(*split)

    def send(self, all_reduce: Callable[[Tensor], Handle], x: Tensor) -> Handle:
        message = Message("all_reduce", self.inner, x.nbytes)
        self.messages.append(message)
        with record_function(TRACED_START):
            handle = all_reduce(x)

        def finish() -> Tensor:
            with record_function(TRACED_WAIT):
                total = handle.wait()
            message.completed = True
            return total

        return Handle(finish)

    def all_gather(self, x: Tensor) -> Tensor:
        self.messages.append(Message("all_gather", self.inner, x.nbytes, completed=True, vocabulary=True))
        with record_function("all-gather"):
            return self.inner.all_gather(x)


def sent_sums(layout: Layout, ranks: int) -> int:
    """Return the sums of a forward pass: of sync points that send, and those within the groups of a virtual rank."""
    sums = sum(mode != DROPPED for mode in layout.modes)
    if group_size(layout.sync_tp_size, ranks) > 1:
        sums += sum(mode in APART for mode in layout.modes)
    return sums


def read_sums(layout: Layout, ranks: int) -> int:
    """Return the number of sums that a backward pass sends: of sync points after which a sub-module reads the stream.
    An overlapped or delayed sum is there when the next sub-module has computed; if that one's own sum then blocks, the
    sub-module after it reads the stream with both."""
    both = sum(mode in HIDING and after == BLOCKING for mode, after in pairwise(layout.modes))
    return sent_sums(layout, ranks) - both


def expected_messages(
    shape: Shape, sums: int, itemsize: int, schedule: Schedule, rows: int, tokens: int
) -> tuple[int, int]:
    """Return the all-reduces of a forward pass over ``rows`` x ``tokens`` with so many ``sums`` of the layers, and the
    bytes of all together. The embedding's are among them where ranks share it. Each chunk of the schedule sends its
    own."""
    sums += not shape.replicate_vocab
    return schedule.parts(rows, tokens) * sums, sums * rows * tokens * shape.hidden * itemsize


@contextlib.contextmanager
def recorded(model: Any) -> Iterator[Recording]:
    """Record the messages of the model, which go over its ``collectives``, until the end of the block."""
    recording = Recording(model.collectives)
    model.collectives = recording
    try:
        yield recording
    finally:
        model.collectives = recording.inner


def record_messages(
    name: str, model: Any, run: Iterator[None], expected: Mapping[str, tuple[int, int]]
) -> dict[str, list[Message]]:
    """Run one pass of each phase without CUDA graphs, and return its messages. Raises UserError unless all that are
    expected were sent and waited for."""
    messages = {}
    with recorded(model) as recording:
        next(run)
        for phase, (due, due_bytes) in expected.items():
            recording.messages.clear()
            next(run)
            messages[phase] = [*recording.messages]
            sums = [message for message in recording.messages if message.collective == "all_reduce"]
            completed = [message.bytes for message in sums if message.completed]
            if (len(completed), sum(completed)) != (due, due_bytes):
                raise UserError(
                    f"{name}: its {phase} completed {len(completed)} all-reduces of {sum(completed)} bytes, where the"
                    f" layout asks for {due} of {due_bytes}: this is not the model that was asked for, so nothing was"
                    " timed"
                )
        next(run, None)
    return messages
