"""The messages of a pass, against those that its layout asks for.

They are counted before anything is timed: the reference check cannot see a sum that is left out where sums are
emulated, or where weights are random.
"""

import contextlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import Protocol

from ladderize.errors import UserError
from ladderize.layout import APART, BLOCKING, DROPPED, HIDING, Layout
from ladderize.runtime.collectives.base import Collectives
from ladderize.runtime.collectives.observed import Message, Recording
from ladderize.runtime.schedule import Schedule
from ladderize.runtime.shards import Shape, group_size


class Sender(Protocol):
    """A model, whose messages go over ``collectives``."""

    collectives: Collectives


@dataclass(frozen=True)
class ExpectedMessages:
    """The all-reduces that a pass must complete."""

    all_reduces: int
    bytes: int  # of all together
    vocabulary: int  # the number of first ones that are the embedding's, and do not count as the layers'


def sent_sums(layout: Layout, ranks: int) -> int:
    """Return the sums of a forward pass: of sync points that send, and those within the groups of a virtual rank."""
    sums = sum(mode != DROPPED for mode in layout.modes)
    if group_size(layout.sync_tp_size, ranks) > 1:
        sums += sum(mode in APART for mode in layout.modes)
    return sums


def read_sums(layout: Layout, ranks: int) -> int:
    """Return the number of sums that a backward pass sends: of sync points after which a sub-module reads the stream.

    An overlapped or delayed sum is there when the next sub-module has computed; if that one's own sum then blocks, the
    sub-module after it reads the stream with both.
    """
    both = sum(mode in HIDING and after == BLOCKING for mode, after in pairwise(layout.modes))
    return sent_sums(layout, ranks) - both


def expected_messages(
    shape: Shape, sums: int, itemsize: int, schedule: Schedule, rows: int, tokens: int
) -> ExpectedMessages:
    """Return the messages of a forward pass over ``rows`` x ``tokens`` with so many ``sums`` of the layers.

    The embedding's are among them where ranks share it. Each chunk of the schedule sends its own.
    """
    shared, chunks = int(not shape.replicate_vocab), schedule.parts(rows, tokens)
    whole = rows * tokens * shape.hidden * itemsize
    return ExpectedMessages(chunks * (sums + shared), (sums + shared) * whole, chunks * shared)


@contextlib.contextmanager
def recorded(model: Sender) -> Iterator[Recording]:
    """Record the messages of the model until the end of the block."""
    recording = Recording(model.collectives)
    model.collectives = recording
    try:
        yield recording
    finally:
        model.collectives = recording.inner


def record_messages(
    name: str, model: Sender, run: Iterator[None], expected: Mapping[str, ExpectedMessages]
) -> dict[str, list[Message]]:
    """Run one pass of each phase, and return its messages. Raises UserError unless all expected ones were sent and
    waited for.

    run: begun by ``Variant.run``, without CUDA graphs, so that the collectives are called for each message.
    """
    messages = {}
    with recorded(model) as recording:
        next(run)
        for phase, due in expected.items():
            recording.messages.clear()
            next(run)
            messages[phase] = [*recording.messages]
            sums = [message for message in messages[phase] if message.collective == "all_reduce"]
            completed = [message.bytes for message in sums if message.completed]
            if (len(completed), sum(completed)) != (due.all_reduces, due.bytes):
                raise UserError(
                    f"{name}: its {phase} completed {len(completed)} all-reduces of {sum(completed)} bytes, where the"
                    f" layout asks for {due.all_reduces} of {due.bytes}: this is not the model that was asked for, so"
                    " nothing was timed"
                )
            for message in sums[: due.vocabulary]:
                message.vocabulary = True
        next(run, None)
    return messages
