"""The products of LoRA (arXiv 2106.09685) in one rank's part of a model: y = W x + scaling * B A x.

A projection that is split by outputs (q, k, v; gate, up) has all of A and its own rows of B on each rank; one that is
split by inputs (o, down) its own columns of A and all of B. What such a pair adds is then this rank's outputs, or a
partial sum, like what its projection computes. The halves that every rank has whole get partial gradients.
"""

from collections.abc import Iterator, Sequence
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor


class Product(Protocol):
    """A linear layer as the model calls it (see layers.Linear)."""

    def __call__(self, x: Tensor) -> Tensor: ...
    def products(self, x: Tensor, columns: int) -> Iterator[Tensor]: ...
    @property
    def nbytes(self) -> int: ...


class InputDropout:
    """Dropout of what enters a projection's A, drawn once for one forward pass.

    All ranks of a group draw the same numbers, over the whole width of the input, and use those of their own columns:
    so a result depends neither on the number of ranks nor on which virtual ranks a process computes apart.
    """

    def __init__(self, probability: float, width: int, start: int, stop: int) -> None:
        self.keep, self.width = 1 - probability, width
        self.start, self.stop = start, stop
        self.drawn: Tensor | None = None

    def __call__(self, x: Tensor, start: int) -> Tensor:
        """x: [..., n], the columns ``start`` and on of this rank's part of the input."""
        if self.drawn is None:
            drawn = x.new_empty((*x.shape[:-1], self.width)).bernoulli_(self.keep).div_(self.keep)
            self.drawn = drawn if self.stop - self.start == self.width else drawn[..., self.start : self.stop].clone()
        return x * self.drawn[..., start : start + x.shape[-1]]


class LowRank:
    """What LoRA adds to a product: scaling * B A x, for A [rank, in] and B [out, rank] in the dtype of x."""

    def __init__(
        self, a: Tensor, b: Tensor, scaling: float, dropout: InputDropout | None = None, start: int = 0
    ) -> None:
        self.a, self.b, self.scaling, self.dropout, self.start = a, b, scaling, dropout, start

    def low(self, x: Tensor) -> Tensor:
        kept = x if self.dropout is None else self.dropout(x, self.start)
        return F.linear(kept, self.a) * self.scaling

    def __call__(self, x: Tensor) -> Tensor:
        return F.linear(self.low(x), self.b)

    def products(self, x: Tensor, columns: int) -> Iterator[Tensor]:
        """The same in ``columns`` parts of its outputs, one after the other."""
        low = self.low(x)
        return (F.linear(low, part) for part in self.b.chunk(columns))


class FusedLowRanks:
    """What LoRA adds to several projections of one input, computed as one product; each with its number of outputs, and
    None where it has no LoRA."""

    def __init__(self, parts: Sequence[tuple[LowRank | None, int]]) -> None:
        self.parts = parts

    def __call__(self, x: Tensor) -> Tensor:
        return torch.cat(
            [x.new_zeros((*x.shape[:-1], width)) if part is None else part(x) for part, width in self.parts], -1
        )

    def products(self, x: Tensor, columns: int) -> Iterator[Tensor]:
        return iter(self(x).chunk(columns, -1))


class WithLora:
    """A linear layer and what LoRA adds to it, called as the layer is."""

    __slots__ = ("added", "linear")

    def __init__(self, linear: Product, added: LowRank | FusedLowRanks) -> None:
        self.linear, self.added = linear, added

    def __call__(self, x: Tensor) -> Tensor:
        return self.linear(x) + self.added(x)

    def products(self, x: Tensor, columns: int) -> Iterator[Tensor]:
        for product, added in zip(self.linear.products(x, columns), self.added.products(x, columns), strict=True):
            yield product + added

    @property
    def nbytes(self) -> int:
        return self.linear.nbytes
