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

    def all_reduce_async(self, x: Tensor, *into: Tensor) -> Handle:
        return self.inner.all_reduce_async(x, *into)

    def all_gather(self, x: Tensor) -> Tensor:
        return self.inner.all_gather(x)

    @property
    def parts(self) -> list[Collectives]:
        return [self.inner]


@dataclass
class Message:
    """A message of a pass: an all_reduce, or an all_gather of ``bytes`` from each rank.

    completed: True once the sum has been waited for.
    vocabulary: True for the embedding's or the LM head's, which every layout waits for.
    """

    collective: str
    over: Collectives
    bytes: int
    completed: bool = False
    vocabulary: bool = False


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

    def all_reduce_async(self, x: Tensor, *into: Tensor) -> Handle:
        message = Message("all_reduce", self.inner, x.nbytes)
        self.messages.append(message)
        with record_function(TRACED_START):
            handle = self.inner.all_reduce_async(x, *into)

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
