"""What a layout's communication must cost, given how long its compute and its all-reduces take apart.

An overlapped all-reduce hides as much as its own time or the compute until it is waited for, whichever is less; a
blocking one hides nothing. One rule, sub-module by sub-module; layouts differ only in which operations have compute to
hide under.
"""

import statistics
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Operation:
    """One all-reduce: its message, its time alone, and the compute between its start and the wait for it (as often as
    it was measured), in seconds."""

    bytes: int
    alone: float
    covers: tuple[float, ...]

    @property
    def hideable(self) -> float:
        # the mean of the least, not the least of the mean: compute that ends early hides less, and late hides no more
        return statistics.fmean(min(self.alone, cover) for cover in self.covers)


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


def predict(compute: float, operations: Sequence[Operation], unhideable: float = 0.0) -> Prediction:
    """compute: seconds without any communication; unhideable: of collectives that every layout waits for (the
    vocabulary's)."""
    communication = sum(operation.alone for operation in operations) + unhideable
    return Prediction(compute, communication, sum(operation.hideable for operation in operations))
