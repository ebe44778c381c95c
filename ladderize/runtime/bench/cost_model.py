"""What a layout's communication must cost, given how long its compute and its all-reduces take apart.

An overlapped all-reduce hides as much as its own time or the compute until it is waited for, whichever is less; a
blocking one hides nothing. One rule, sub-module by sub-module; layouts and schedules differ only in which operations
have compute to hide under. Where several messages are in flight, one is on the link at a time.

A message in flight takes some of the device for itself (NCCL's kernels hold multiprocessors and memory bandwidth): the
compute beside it runs at the rate 1 - contention. A message of ``a`` seconds and compute of ``c`` then take
max(a, c + contention * a) together.
"""

import statistics
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Operation:
    """One all-reduce: its message, its time alone, and the compute between its start and the wait for it (as often as
    it was measured), in seconds. contention: see above; 0 where it is part of what was measured."""

    bytes: int
    alone: float
    covers: tuple[float, ...]
    contention: float = 0.0

    @property
    def hideable(self) -> float:
        # the mean of the least, not the least of the mean: compute that ends early hides less, and late hides no more
        return statistics.fmean(min((1 - self.contention) * self.alone, cover) for cover in self.covers)


@dataclass(frozen=True)
class Prediction:
    """Seconds of one forward pass: ``total`` = ``compute`` + ``exposed``; ``hideable`` is what the layout lets run
    under compute."""

    compute: float
    communication: float
    hideable: float

    @property
    def exposed(self) -> float:
        return self.communication - self.hideable

    @property
    def total(self) -> float:
        return self.compute + self.exposed


def covers(times: Sequence[tuple[float, float]], alone: Sequence[float]) -> list[float]:
    """The compute that each message can run under, in seconds: less than it takes alone by how long it is waited for.

    times: of each message, when its start was over and when it was waited for, in a run in which messages took no time.
    alone: seconds of each. The run is lived through again with a link that carries one message after the other.
    """
    moments = sorted(
        [(started, 0, number) for number, (started, _) in enumerate(times)]
        + [(wait, 1, number) for number, (_, wait) in enumerate(times)]
    )
    late = 0.0  # how far all waiting so far has put off what follows
    free_at = moments[0][0] if moments else 0.0
    through = [0.0] * len(times)
    found = [wait - started for started, wait in times]
    for moment, is_wait, number in moments:
        now = moment + late
        if not is_wait:
            free_at = through[number] = max(now, free_at) + alone[number]
        elif through[number] > now:
            found[number] = alone[number] - (through[number] - now)
            late += through[number] - now
    return found


def predict(compute: float, operations: Sequence[Operation], unhideable: float = 0.0) -> Prediction:
    """compute: seconds without any communication; unhideable: of collectives that every layout waits for (the
    vocabulary's)."""
    communication = sum(operation.alone for operation in operations) + unhideable
    return Prediction(compute, communication, sum(operation.hideable for operation in operations))
