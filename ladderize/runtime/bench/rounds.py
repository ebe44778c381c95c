"""Interleaved rounds: every variant runs once in each, with and without communication.

The order is drawn anew for each round, so that disturbances of the machine hit all variants alike.
"""

import contextlib
import random
import statistics
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, TypeVar

import torch
from torch.profiler import record_function

from ladderize.console import Console
from ladderize.ranks.group import Ranks
from ladderize.runtime.bench.document import MODEL_ROW, Overlap, may_overlap
from ladderize.runtime.bench.options import BenchOptions
from ladderize.runtime.collectives.base import Collectives
from ladderize.runtime.collectives.observed import Message, Recording
from ladderize.runtime.graphs import capture
from ladderize.runtime.schedule import ScheduleName
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

    def sample(self) -> list[float]:
        """Run once and return the seconds of one pass of each part. All ranks call it, right after a barrier."""
        self.prepare()
        synchronize(self.device)
        seconds, begin = [], time.perf_counter()
        for passes in self.run():
            synchronize(self.device)
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


@contextlib.contextmanager
def sending_over(model: Any, collectives: SomeCollectives) -> Iterator[SomeCollectives]:
    """Replace ``model.collectives`` until the end of the block."""
    before, model.collectives = model.collectives, collectives
    try:
        yield collectives
    finally:
        model.collectives = before


def record_messages(timed: Timed, vocabulary: Mapping[str, int]) -> dict[str, list[Message]]:
    """Run one pass of each part, and return its messages.

    vocabulary: the number of first all-reduces of a part that are the embedding's.
    """
    messages = {}
    with sending_over(timed.model, Recording(timed.model.collectives)) as recording:
        for part, _ in zip(timed.parts, timed.run(1, eager=True), strict=True):
            messages[part] = [*recording.messages]
            recording.messages.clear()
            sums = [message for message in messages[part] if message.collective == "all_reduce"]
            for message in sums[: vocabulary.get(part, 0)]:
                message.vocabulary = True
    return messages
