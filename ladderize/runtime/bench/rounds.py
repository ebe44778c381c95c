"""Interleaved rounds of variants, each with and without communication, and single messages alone.

The order is drawn anew for each round, so that disturbances of the machine hit all variants alike.
"""

import contextlib
import dataclasses
import random
import statistics
import time
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, Generic, TypeVar

import torch

from ladderize.console import Console
from ladderize.errors import UserError
from ladderize.memory import PeakMemory
from ladderize.ranks.group import Ranks
from ladderize.runtime.bench.document import (
    MODEL_ROW,
    Environment,
    Overlap,
    PhaseCommunication,
    difference_interval,
    environment,
)
from ladderize.runtime.bench.options import GroupOptions
from ladderize.runtime.bench.plan import BenchPlan, SomeOptions
from ladderize.runtime.collectives.base import Collectives, NoCommunication
from ladderize.runtime.collectives.choose import choose
from ladderize.runtime.collectives.emulated import emulate
from ladderize.runtime.collectives.links import Link
from ladderize.runtime.collectives.observed import Recording
from ladderize.runtime.graphs import capture
from ladderize.runtime.spec import ModelSpec

ALONE_ROUNDS, ALONE_REPEAT = 6, 10
MIN_OVERLAP = 0.01  # of the time in flight: less under compute than this is none at all


class Timed(ABC):
    """Something that runs in every round.

    own_bytes: bytes held before and after a sample; None: peak memory is not measured.
    seconds: of every counted round, by part.
    """

    parts: ClassVar[tuple[str, ...]]
    own_bytes: int | None = None
    peak_memory_bytes: int | None = None

    def __init__(self) -> None:
        self.seconds: dict[str, list[float]] = {part: [] for part in self.parts}

    @abstractmethod
    def sample(self) -> tuple[float, ...]:
        """Run once and return the seconds of each of ``parts``. All ranks call it, right after a barrier."""

    def samples_ms(self) -> dict[str, list[float]]:
        return {part: [1e3 * one for one in seconds] for part, seconds in self.seconds.items()}

    def median_ms(self, part: str) -> float:
        return statistics.median(self.seconds[part]) * 1e3


@dataclass
class Message:
    """A message of a pass.

    collective: all_reduce, or all_gather of ``bytes`` from each rank.
    vocabulary: True for the embedding's or the LM head's, which every layout waits for.
    """

    collective: str
    bytes: int
    vocabulary: bool = False


@dataclass
class TimedVariant:
    """A row: a model, or a baseline, at one batch size.

    silent: the same without communication; the difference in time is what ``timed`` waits for.
    overlapping: the parts in which the layout or the schedule lets a message run under compute.
    messages: the messages of each part.
    figures: further fields of its row.
    """

    name: str
    spec: ModelSpec
    timed: Any
    silent: Any = None
    kind: str = MODEL_ROW
    overlapping: set[str] = field(default_factory=set)
    messages: dict[str, list[Message]] = field(default_factory=dict)
    overlap: dict[str, Overlap] | None = None
    figures: dict[str, Any] = field(default_factory=dict)

    def trace_path(self, folder: Path, number: int, batch: int, rank: int) -> Path:
        """Return the file of a rank's trace.

        number: of the variant.
        """
        schedule = self.figures.get("schedule")
        stem = Path(self.name).name + ("" if schedule is None else f"-{schedule.name}")
        stem = "".join(c if c.isalnum() or c in "+-." else "_" for c in stem)
        return folder / f"{number}-{stem}-batch{batch}-rank{rank}.json"

    def row_figures(self, ranks: int, batch: int) -> dict[str, Any]:
        """Return the fields of a ``VariantRow`` that describe the timed model.

        ranks: real or emulated.
        """
        layout, folder = self.spec.layout, self.spec.folder
        return {
            "model": self.name,
            "layout": str(layout),
            "attention_sync": list(layout.attention_sync),
            "mlp_sync": list(layout.mlp_sync),
            "sync_tp_size": layout.sync_tp_size,
            "weights": "random" if folder is None else str(folder),
            "dtype": self.spec.dtype,
            "tp_size": ranks,
            "batch_size": batch,
            "peak_memory_bytes": self.timed.peak_memory_bytes,
            "samples_ms": self.timed.samples_ms(),
            "overlap": self.overlap,
            **self.figures,
        }


def time_rounds(group: Ranks, timed: Sequence[Timed], options: GroupOptions, console: Console, title: str) -> None:
    """Run as many rounds over all of ``timed`` as ``options`` say; all ranks call it."""
    order = list(timed)
    shuffle = random.Random(options.seed)  # the same on every rank
    rounds = options.warmup + options.repeat
    # nothing moves on the terminal while a sample is taken: the bar is drawn between rounds
    with console.progress(title, rounds, animated=False) as advance:
        for number in range(1, rounds + 1):
            counted = number - options.warmup
            warming = f"warm-up {number} of {options.warmup}"
            advance(0, f"round {counted} of {options.repeat}" if counted > 0 else warming)
            shuffle.shuffle(order)
            for one in order:
                _take_sample(group, one, counted=counted > 0)
            advance(1)


def _take_sample(group: Ranks, timed: Timed, *, counted: bool) -> None:
    memory = contextlib.nullcontext() if timed.own_bytes is None else PeakMemory(group.device)
    with memory:
        group.barrier()
        seconds = timed.sample()
    if counted:
        # the group is done when its last rank is
        for part, of_ranks in zip(timed.parts, zip(*group.gather(seconds), strict=True), strict=True):
            timed.seconds[part].append(max(of_ranks))
    elif isinstance(memory, PeakMemory) and memory.rise is not None and timed.own_bytes is not None:
        timed.peak_memory_bytes = max(timed.peak_memory_bytes or 0, timed.own_bytes + memory.rise)


def both(variants: Sequence[TimedVariant]) -> list[Timed]:
    """Return the samples of each round: every variant with communication, and without."""
    return [timed for variant in variants for timed in (variant.timed, variant.silent)]


# ---- messages ----

SomeCollectives = TypeVar("SomeCollectives", bound=Collectives)


@contextlib.contextmanager
def sending_over(model: Any, collectives: SomeCollectives) -> Iterator[SomeCollectives]:
    """Replace ``model.collectives`` until the end of the block."""
    before, model.collectives = model.collectives, collectives
    try:
        yield collectives
    finally:
        model.collectives = before


def take_messages(what: str, recording: Recording, expected: Counter[int], embeddings: int = 0) -> list[Message]:
    """Return the messages recorded since the last call. Raises UserError unless all expected ones were sent and waited
    for.

    The reference check cannot see a sum that is left out where sums are emulated, or where weights are random.

    what: the pass, for the message of the error.
    expected: counts of all-reduces by bytes.
    embeddings: the number of first all-reduces that are the vocabulary's.
    """
    sums, gathered = recording.all_reduces, recording.gathered
    recording.all_reduces, recording.gathered = [], []
    completed = Counter(one.bytes for one in sums if one.end > 0)
    if completed != expected:
        raise UserError(
            f"{what} completed {_counted(completed)}, where its layout asks for {_counted(expected)}: this is not the"
            " model that was asked for, so nothing was timed"
        )
    messages = [Message("all_reduce", one.bytes, number < embeddings) for number, one in enumerate(sums)]
    return messages + [Message("all_gather", size, True) for size in gathered]


def _counted(messages: Counter[int]) -> str:
    sizes = " and ".join(f"{count} of {size} bytes" for size, count in sorted(messages.items())) or "none"
    return f"{messages.total()} all-reduces ({sizes})"


def synchronize(device: torch.device) -> None:
    """Wait until a GPU has done all its work; on a CPU do nothing."""
    if device.type == "cuda":
        torch.cuda.synchronize()


class AloneTimes:
    """The time of single collectives with nothing beside them, by name and size; measured when first asked for."""

    def __init__(self, group: Ranks, collectives: Collectives, link: Link | None, dtype: torch.dtype) -> None:
        self.group, self.collectives, self.link, self.dtype = group, collectives, link, dtype
        self.measured: dict[tuple[str, int], float] = {}

    def seconds(self, collective: str, size: int) -> float:
        """Return the seconds of one collective. All ranks call it.

        collective: all_reduce or all_gather.
        size: bytes of the message, of an all-gather those from each rank.
        """
        if (collective, size) not in self.measured:
            self.measured[collective, size] = self._measure(collective, size)
        return self.measured[collective, size]

    def milliseconds(self) -> dict[str, float]:
        """Return all times so far, in ms: ``alone_ms`` of bench.json."""
        return {f"{name} of {size} bytes": seconds * 1e3 for (name, size), seconds in sorted(self.measured.items())}

    def sizes_outside_range(self) -> list[int]:
        """Return the bytes of messages for which an emulated link's time is only extrapolated."""
        link = self.link
        return sorted(size for _, size in self.measured if link is not None and not link.in_range(size))

    def _measure(self, collective: str, size: int) -> float:
        if self.link is not None:
            return self.link.seconds(size * (self.collectives.ranks if collective == "all_gather" else 1))
        if self.collectives.ranks == 1 or isinstance(self.collectives, NoCommunication):
            return 0.0
        message = torch.zeros(size, dtype=torch.uint8, device=self.group.device)
        message = message.view(torch.bfloat16 if size % self.dtype.itemsize else self.dtype)
        communicate = getattr(self.collectives, collective)

        def back_to_back() -> None:
            for _ in range(ALONE_REPEAT):  # after a barrier ranks do not start at once
                communicate(message)

        run: Callable[[], None] = back_to_back
        if self.group.device.type == "cuda":  # launched one by one, small messages take as long as their launches
            run = capture(back_to_back, self.group.device, warm_ups=1)[0].replay
        samples = []
        for _ in range(ALONE_ROUNDS):
            self.group.barrier()
            synchronize(self.group.device)
            begin = time.perf_counter()
            run()
            synchronize(self.group.device)
            samples.append(max(self.group.gather(time.perf_counter() - begin)) / ALONE_REPEAT)
        return statistics.median(samples[1:])


@dataclass(frozen=True)
class BenchRun(Generic[SomeOptions]):
    """One rank's part of a benchmark of ladderize's runtime.

    backend: the name of the backend that carries messages.
    silence: collectives of as many ranks, without communication.
    """

    group: Ranks
    options: SomeOptions
    console: Console
    environment: Environment
    collectives: Collectives
    backend: str
    silence: NoCommunication
    alone: AloneTimes

    @classmethod
    def open(
        cls, group: Ranks, plan: BenchPlan[SomeOptions], console: Console, operations: str | None = None
    ) -> "BenchRun[SomeOptions]":
        """Return this rank's run. All ranks call it, and close ``collectives`` at the end."""
        options, link = plan.options, plan.link
        if options.emulate_tp is not None and link is not None:
            collectives: Collectives = emulate(options.emulate_tp, link, group.device)
            backend = f"emulated: {options.emulate_tp} ranks over {link.name}"
        else:
            collectives, backend = choose(
                options.backend, group, max_bytes=plan.longest_message, in_flight=plan.in_flight
            )
        alone = AloneTimes(group, collectives, link, plan.specs[0].torch_dtype)
        surroundings, silence = environment(group, operations=operations), NoCommunication(collectives.ranks)
        return cls(group, options, console, surroundings, collectives, backend, silence, alone)

    def alone_seconds(self, size: int) -> float:
        """Return the seconds of an all-reduce of ``size`` bytes with nothing beside it."""
        return self.alone.seconds("all_reduce", size)

    def communication(self, variant: TimedVariant, part: str) -> PhaseCommunication:
        """Return the communication of a variant in a part. All ranks call it."""
        timed, silent, messages = variant.timed, variant.silent, variant.messages[part]
        sums = [message.bytes for message in messages if not message.vocabulary]
        vocabulary = sum(self.alone.seconds(one.collective, one.bytes) for one in messages if one.vocabulary)
        alone = sum(map(self.alone_seconds, sums)) + vocabulary
        exposed = timed.median_ms(part) - silent.median_ms(part)
        return PhaseCommunication(
            all_reduces=len(sums),
            bytes=sum(sums),
            no_communication_ms=silent.median_ms(part),
            alone_ms=alone * 1e3,
            vocabulary_alone_ms=vocabulary * 1e3,
            exposed_ms=exposed,
            exposed_interval_ms=[1e3 * end for end in difference_interval(timed.seconds[part], silent.seconds[part])],
            hidden_ms=alone * 1e3 - exposed,
        )

    def judged(self, overlap: dict[str, Overlap], variant: TimedVariant) -> dict[str, Overlap]:
        """Return the overlaps of a trace, with ``proven`` set for each part that should overlap."""
        if self.collectives.name == "shm":  # ranks copy these messages themselves: none is in flight
            return overlap
        return {
            part: dataclasses.replace(one, proven=one.under_compute_ms > MIN_OVERLAP * one.in_flight_ms)
            if part in variant.overlapping
            else one
            for part, one in overlap.items()
        }

    def document_figures(self) -> dict[str, Any]:
        """Return the fields of a ``TimedDocument`` about the run."""
        return {
            "options": self.options,
            "environment": self.environment,
            "backend": self.backend,
            "emulated": self.alone.link is not None,
            "link": self.alone.link,
            "message_bytes_outside_link_range": self.alone.sizes_outside_range(),
            "alone_ms": self.alone.milliseconds(),
        }
