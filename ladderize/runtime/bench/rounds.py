"""Interleaved rounds: every variant runs once in each, with and without communication.

The order is drawn anew for each round, so that disturbances of the machine hit all variants alike. Before that, the
messages of a pass are counted: the reference check cannot see a sum that is left out where sums are emulated, or where
weights are random.
"""

import contextlib
import random
import statistics
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, ClassVar, TypeVar

import torch
from torch.profiler import record_function

from ladderize.console import Console
from ladderize.errors import UserError
from ladderize.layout import APART, BLOCKING, DROPPED, HIDING, Layout
from ladderize.ranks.group import Ranks
from ladderize.runtime.bench.document import MODEL_ROW, Overlap, may_overlap
from ladderize.runtime.bench.options import BenchOptions
from ladderize.runtime.collectives.base import Collectives
from ladderize.runtime.collectives.observed import Message, Recording
from ladderize.runtime.graphs import capture
from ladderize.runtime.schedule import Schedule, ScheduleName
from ladderize.runtime.shards import Shape, group_size
from ladderize.runtime.spec import ModelSpec

SomeCollectives = TypeVar("SomeCollectives", bound=Collectives)


def synchronize(device: torch.device) -> None:
    """Wait until a GPU has done all its work; on a CPU do nothing."""
    if device.type == "cuda":
        torch.cuda.synchronize()


def seconds_together(group: Ranks, run: Callable[[], object], count: int, rounds: int, *, graph: bool = True) -> float:
    """Time a function on all ranks at once; return the seconds of one of its ``count`` parts.

    They are the median of all rounds but the first, each of the slowest rank.

    graph: on a GPU one graph starts all parts: launched one by one, small ones take as long as their launches.
    """
    if graph and group.device.type == "cuda":
        run = capture(run, group.device, warm_ups=1)[0].replay
    samples = []
    for _ in range(rounds):
        group.barrier()
        synchronize(group.device)
        begin = time.perf_counter()
        run()
        if graph:
            synchronize(group.device)
        samples.append(max(group.gather(time.perf_counter() - begin)) / count)
    return statistics.median(samples[1:])


class Timed(ABC):
    """A model and its input, which run once in every round, part by part.

    model: the object whose ``collectives`` carry its messages.
    seconds: of every counted round, by part.
    """

    parts: ClassVar[tuple[str, ...]]
    model: Any

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.seconds: dict[str, list[float]] = {part: [] for part in self.parts}

    @abstractmethod
    def run(self, passes: int | None = None, *, eager: bool = False) -> Iterator[int]:
        """Run once, and yield at the end of each part the number of its passes. All ranks call it.

        passes: the most of a part; None: as many as are timed.
        eager: without CUDA graphs, so that the collectives are called for each message.
        """

    def prepare(self) -> None:  # noqa: B027 - most have nothing to prepare
        """Do what must not be timed."""

    def end_part(self) -> None:
        """Wait until the work of a part is done."""
        synchronize(self.device)

    def sample(self) -> list[float]:
        """Run once and return the seconds of one pass of each part. All ranks call it, right after a barrier."""
        self.prepare()
        synchronize(self.device)
        seconds, begin = [], time.perf_counter()
        for passes in self.run():
            self.end_part()
            seconds.append((time.perf_counter() - begin) / passes)
            begin = time.perf_counter()
        return seconds

    def run_marked(self, passes: int) -> None:
        """Run a few passes of each part inside a span of torch's profiler that has the part's name."""
        running = self.run(passes)
        for part in self.parts:
            with record_function(part):
                next(running)
                synchronize(self.device)
        next(running, None)

    def samples_ms(self) -> dict[str, list[float]]:
        """Return the ms of every counted round, by part."""
        return {part: [1e3 * one for one in seconds] for part, seconds in self.seconds.items()}

    def median_ms(self, part: str) -> float:
        """Return the median of the counted rounds."""
        return statistics.median(self.seconds[part]) * 1e3


@dataclass
class Variant:
    """A model, or a baseline, at one batch size, by one schedule.

    silent: the same without communication; the difference in time is what ``timed`` waits for.
    messages: the messages of each part; empty in vLLM, whose are not seen.
    """

    name: str
    spec: ModelSpec
    timed: Any
    silent: Any = None
    kind: str = MODEL_ROW
    schedule: ScheduleName = "sequential"
    messages: dict[str, list[Message]] = field(default_factory=dict)
    overlap: dict[str, Overlap] | None = None
    architecture: str | None = None

    @property
    def overlapping(self) -> set[str]:
        """The parts in which the layout or the schedule lets a message run under compute."""
        return {part for part in self.messages if may_overlap(self.spec.layout.modes, self.schedule, part)}


def time_rounds(group: Ranks, variants: Sequence[Variant], options: BenchOptions, console: Console, title: str) -> None:
    """Run as many rounds over all variants as ``options`` say; all ranks call it."""
    order: list[Timed] = [one for variant in variants for one in (variant.timed, variant.silent) if one is not None]
    shuffle = random.Random(options.seed)  # the same on every rank
    rounds = options.warmup + options.repeat
    # nothing moves on the terminal while a sample is taken: the bar is drawn between rounds
    with console.progress(title, rounds) as advance:
        for number in range(1, rounds + 1):
            counted = number - options.warmup
            warming = f"warm-up {number} of {options.warmup}"
            advance(0, f"round {counted} of {options.repeat}" if counted > 0 else warming)
            shuffle.shuffle(order)
            for one in order:
                group.barrier()
                seconds = one.sample()
                if counted > 0:  # the group is done when its last rank is
                    for part, of_ranks in zip(one.parts, zip(*group.gather(seconds), strict=True), strict=True):
                        one.seconds[part].append(max(of_ranks))
            advance(1)


# ---- the messages of a pass, against those that its layout asks for ----


@dataclass(frozen=True)
class ExpectedMessages:
    """The all-reduces that a pass must complete: their number, and their bytes together.

    vocabulary: the number of first ones that are the embedding's.
    """

    all_reduces: int
    bytes: int
    vocabulary: int = 0


def sent_sums(layout: Layout) -> int:
    """Return the number of sync points at which something is sent."""
    return sum(mode != DROPPED for mode in layout.modes)


def read_sums(layout: Layout) -> int:
    """Return the number of sums that a backward pass sends: of sync points after which a sub-module reads the stream.

    An overlapped or delayed sum is there when the next sub-module has computed; if that one's own sum then blocks, the
    sub-module after it reads the stream with both.
    """
    return sent_sums(layout) - sum(one in HIDING and after == BLOCKING for one, after in pairwise(layout.modes))


def sums_in_groups(layout: Layout, ranks: int) -> int:
    """Return the number of sync points at which the processes of a virtual rank sum among themselves first."""
    if group_size(layout.sync_tp_size, ranks) == 1:
        return 0
    return sum(mode in APART for mode in layout.modes)


def expected_messages(
    shape: Shape, sums: int, itemsize: int, schedule: Schedule, rows: int, tokens: int, in_groups: int = 0
) -> ExpectedMessages:
    """Return the messages of one forward pass over ``rows`` x ``tokens``.

    The embedding's are among them where ranks share it. Each part of the schedule sends its own.

    sums: the number of sums of the layers.
    in_groups: the number of sums within groups.
    itemsize: bytes of a number of the stream.
    """
    shared, parts = int(not shape.replicate_vocab), schedule.parts(rows, tokens)
    whole = rows * tokens * shape.hidden * itemsize
    return ExpectedMessages(parts * (sums + in_groups + shared), (sums + in_groups + shared) * whole)


@contextlib.contextmanager
def sending_over(model: Any, collectives: SomeCollectives) -> Iterator[SomeCollectives]:
    """Replace ``model.collectives`` until the end of the block."""
    before, model.collectives = model.collectives, collectives
    try:
        yield collectives
    finally:
        model.collectives = before


def record_messages(timed: Timed, name: str, expected: Mapping[str, ExpectedMessages]) -> dict[str, list[Message]]:
    """Run one pass of each part, and return its messages. Raises UserError unless all expected ones were sent and
    waited for.

    name: for the message of the error.
    """
    messages = {}
    with sending_over(timed.model, Recording(timed.model.collectives)) as recording:
        for part, _ in zip(timed.parts, timed.run(1, eager=True), strict=True):
            messages[part], due = [*recording.messages], expected[part]
            recording.messages.clear()
            sums = [message for message in messages[part] if message.collective == "all_reduce"]
            completed = [message.bytes for message in sums if message.completed]
            if (len(completed), sum(completed)) != (due.all_reduces, due.bytes):
                raise UserError(
                    f"{name}: its {part} completed {len(completed)} all-reduces of {sum(completed)} bytes, where the"
                    f" layout asks for {due.all_reduces} of {due.bytes}: this is not the model that was asked for, so"
                    " nothing was timed"
                )
            for message in sums[: due.vocabulary]:
                message.vocabulary = True
    return messages
