"""What a model's passes send: that it is what the layout asks for, what it takes alone, and what could hide it.

Every message is checked before any timing. The reference check cannot see a sum that is left out where sums are
emulated, or where weights are random.
"""

import contextlib
import statistics
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, TypeVar

import torch

from ladderize.errors import UserError
from ladderize.layout import BLOCKING, DROPPED, OVERLAPPED, Layout
from ladderize.ranks.group import Ranks
from ladderize.runtime.bench.cost_model import Operation, covers
from ladderize.runtime.collectives.base import Collectives, NoCommunication
from ladderize.runtime.collectives.links import Link
from ladderize.runtime.collectives.observed import ObservedAllReduce, Recording
from ladderize.runtime.graphs import capture
from ladderize.runtime.schedule import Schedule
from ladderize.runtime.shards import Shape

ALONE_ROUNDS, ALONE_REPEAT = 6, 10

_Collectives = TypeVar("_Collectives", bound=Collectives)


@contextlib.contextmanager
def sending_over(model: Any, collectives: _Collectives) -> Iterator[_Collectives]:
    """Inside the block, ``model.collectives`` are these."""
    before, model.collectives = model.collectives, collectives
    try:
        yield collectives
    finally:
        model.collectives = before


# ---- the messages of a pass ----


def sent_sums(layout: Layout) -> int:
    """Sync points at which something is sent."""
    return sum(mode != DROPPED for mode in (*layout.attention_sync, *layout.mlp_sync))


def read_sums(layout: Layout) -> int:
    """Sync points after whose sum a sub-module reads the stream, so that a gradient comes back for it.

    An overlapped sum is there when the next sub-module has computed; if that one's own sum then blocks, the sub-module
    after it reads the stream with both.
    """
    modes = [mode for modes in zip(layout.attention_sync, layout.mlp_sync, strict=True) for mode in modes]
    return sent_sums(layout) - sum(pair == (OVERLAPPED, BLOCKING) for pair in pairwise(modes))


def expected_messages(
    shape: Shape, sums: int, itemsize: int, schedule: Schedule, rows: int, tokens: int
) -> Counter[int]:
    """Bytes -> messages of one forward pass over ``rows`` x ``tokens``, the embedding's among them where ranks share
    it: each part of the schedule sends its own, a layer's in column parts.

    sums: of the layers. itemsize: bytes of a number of the stream.
    """
    sent: Counter[int] = Counter()
    parts = schedule.parts(rows, tokens)
    whole = rows if rows > 1 else tokens
    for part in range(parts):
        own = (whole // parts + (part < whole % parts)) * (tokens if rows > 1 else 1)
        width = own * shape.hidden * itemsize
        sent[width // schedule.columns] += schedule.columns * sums
        sent[width] += not shape.replicate_vocab
    return +sent


def compare_messages(what: str, recording: Recording, expected: Counter[int]) -> None:
    """Raise UserError, which begins with ``what``, unless the messages recorded since the last call are those that are
    due, and all were waited for."""
    seen, recording.all_reduces = recording.all_reduces, []
    done = Counter(one.bytes for one in seen if one.end > 0)
    if done != expected:
        raise UserError(
            f"{what} completed {_counted(done)}, where its layout asks for {_counted(expected)}: this is not the model"
            " that was asked for, so nothing was timed"
        )


def _counted(messages: Counter[int]) -> str:
    sizes = " and ".join(f"{count} of {size} bytes" for size, count in sorted(messages.items())) or "none"
    return f"{messages.total()} all-reduces ({sizes})"


# ---- how long they take alone ----


def synchronize(device: torch.device) -> None:
    """Wait until a GPU has done all that it was told to."""
    if device.type == "cuda":
        torch.cuda.synchronize()


def captured(run: Callable[[], None], device: torch.device) -> Callable[[], None]:
    """``run``, on a GPU as a CUDA graph: launched one by one from the host, small messages take as long as their
    launches. All ranks call it."""
    if device.type != "cuda":
        return run
    graph, _ = capture(run, device, warm_ups=1)
    replay: Callable[[], None] = graph.replay
    return replay


class AloneTimes:
    """Seconds of one collective with nothing beside it, by its name and the size of its message; measured when first
    asked for."""

    def __init__(self, group: Ranks, collectives: Collectives, link: Link | None, dtype: torch.dtype) -> None:
        self.group, self.collectives, self.link, self.dtype = group, collectives, link, dtype
        self.measured: dict[tuple[str, int], float] = {}

    def seconds(self, collective: str, size: int) -> float:
        """collective: all_reduce or all_gather (of ``size`` bytes from each rank). All ranks call it."""
        if (collective, size) not in self.measured:
            self.measured[collective, size] = self._measure(collective, size)
        return self.measured[collective, size]

    def milliseconds(self) -> dict[str, float]:
        """``alone_ms`` of bench.json: all that was asked for so far."""
        return {f"{name} of {size} bytes": seconds * 1e3 for (name, size), seconds in sorted(self.measured.items())}

    def sizes_outside_range(self) -> list[int]:
        """Bytes of the messages that an emulated link's time is only extrapolated for."""
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

        run = captured(back_to_back, self.group.device)
        samples = []
        for _ in range(ALONE_ROUNDS):
            self.group.barrier()
            synchronize(self.group.device)
            begin = time.perf_counter()
            run()
            synchronize(self.group.device)
            samples.append(max(self.group.gather(time.perf_counter() - begin)) / ALONE_REPEAT)
        return statistics.median(samples[1:])


# ---- under how much compute they could run ----


@dataclass(frozen=True)
class PassOperations:
    """Of one pass: the layers' all-reduces, and the seconds of the vocabulary's collectives, which every layout waits
    for."""

    all_reduces: list[Operation]
    vocabulary: float = 0.0


class PassRecorder:
    """Notes what the passes of a model that does not communicate would send, as often as they are run.

    ``recording``: the collectives of the model.
    """

    def __init__(self, silence: Collectives, device: torch.device) -> None:
        def clock() -> float:
            """Seconds, at a moment when the device has done all that it was told to."""
            synchronize(device)
            return time.perf_counter()

        self.recording = Recording(silence, clock)
        self.runs: dict[str, list[list[ObservedAllReduce]]] = {}
        self.gathered: dict[str, list[int]] = {}

    def note(self, name: str, run: Callable[[], Any]) -> Any:
        """``run()``, a pass of this name; returns what it returns."""
        self.recording.all_reduces, self.recording.gathered = [], []
        returned = run()
        self.runs.setdefault(name, []).append(self.recording.all_reduces)
        self.gathered[name] = self.recording.gathered
        return returned

    def operations(self, name: str, alone: AloneTimes, *, embeddings: int = 0) -> PassOperations:
        """Of a pass that was run at least twice: the first run is not warm. All ranks call it.

        embeddings: how many of its all-reduces, the first ones, are the vocabulary's.
        """
        first, *warm = self.runs[name]
        sizes = [seen.bytes for seen in first]
        seconds = [alone.seconds("all_reduce", size) for size in sizes]
        hiding = [covers([(seen.started, seen.wait) for seen in run], seconds) for run in warm]
        vocabulary = sum(alone.seconds("all_gather", size) for size in self.gathered[name]) + sum(seconds[:embeddings])
        operations = map(Operation, sizes, seconds, zip(*hiding, strict=True))
        return PassOperations(list(operations)[embeddings:], vocabulary)
