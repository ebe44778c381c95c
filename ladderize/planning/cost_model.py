"""The cost of one rank's part of a model by formula: seconds of communication, and bytes of memory. No torch here.

Communication is predicted from how long compute and all-reduces take apart. An overlapped all-reduce hides as much as
its own time or the compute until it is waited for, whichever is less; a blocking one hides nothing. One rule,
sub-module by sub-module; layouts and schedules differ only in which operations have compute to hide under. Where
several messages are in flight, one is on the link at a time.

A message in flight takes some of the device for itself (NCCL's kernels hold multiprocessors and memory bandwidth): the
compute beside it runs at the rate 1 - contention. A message of ``a`` seconds and compute of ``c`` then take
max(a, c + contention * a) together.
"""

import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from ladderize.runtime.shards import Shape


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


def predict(compute: float, operations: Sequence[Operation], unhideable: float = 0.0) -> Prediction:
    """compute: seconds without any communication; unhideable: of collectives that every layout waits for (the
    vocabulary's)."""
    communication = sum(operation.alone for operation in operations) + unhideable
    return Prediction(compute, communication, sum(operation.hideable for operation in operations))


# A token id in a Python list: its place there, and most often an object of its own.
TOKEN_ID_BYTES = 36


@dataclass(frozen=True)
class MemoryNeed:
    """Bytes of one rank at its fullest. ``prefill``: token ids, activations of one layer, logits."""

    weights: int
    kv_cache: int
    prefill: int

    @property
    def total(self) -> int:
        return self.weights + self.kv_cache + self.prefill


def prefill_bytes(shape: Shape, batch: int, prompt_len: int, width: int) -> int:
    """At the least, beside the weights and the cache: token ids, the activations of one layer, logits."""
    heads = shape.own_heads + 2 * shape.own_kv_heads
    token = width * (3 * shape.hidden + 3 * shape.own_inner) + 4 * heads * shape.head_dim
    return batch * (prompt_len * (token + TOKEN_ID_BYTES) + width * shape.vocab)
