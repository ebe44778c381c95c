"""All-reduces that may run under compute: one small interface, whose backends are the other files of this folder."""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from ladderize.runtime.collectives.links import SLICED_BYTES


class Handle:
    """An all-reduce in flight. Its sum can be waited for once; a second wait raises RuntimeError. ``adds``: ``finish``
    takes what is to be added to the sum."""

    __slots__ = ("_adds", "_finish")

    def __init__(self, finish: Callable[..., Tensor], *, adds: bool = False) -> None:
        self._finish: Callable[..., Tensor] | None = finish
        self._adds = adds

    def wait(self, residual: Tensor | None = None) -> Tensor:
        """Wait for the sum, and return it, rounded, plus ``residual``; None: the sum alone."""
        finish, self._finish = self._finish, None
        if finish is None:
            raise RuntimeError("this all-reduce has been waited for already")
        if self._adds:
            return finish(residual)
        total = finish()
        return total if residual is None else residual + total


class Collectives:
    """The messages of a tensor-parallel forward. This class serves a group of one, where every sum is complete.

    Messages given to ``all_reduce`` and ``all_reduce_async`` belong to the backend from then on: they may be reduced in
    place. All ranks issue the same collectives in the same order; handles are waited in that order too.

    copies: True if a message is the caller's again as soon as it has been sent, and its sum has memory of its own.
    """

    name = "single"
    copies = False

    def __init__(self, ranks: int = 1) -> None:
        self.ranks = ranks
        self.make_split: Callable[[int], Split] | None = None
        self.splits: dict[int, Split] = {}

    def split(self, size: int) -> "Split":
        """Return the collectives of this rank's group of ``size`` neighbours, and those across such groups. All ranks
        call it. They are made the first time by ``make_split``, and end with this backend."""
        if size not in self.splits:
            assert self.make_split is not None
            self.splits[size] = self.make_split(size)
        return self.splits[size]

    def all_reduce_async(self, x: Tensor) -> Handle:
        """Start to sum ``x`` over the ranks, and return the handle of the sum."""
        return Handle(lambda: x)

    def all_reduce_blocking(self, x: Tensor) -> Handle:
        """Sum ``x``, whose sum is waited for before anything else is computed: nothing need run beside it."""
        return self.all_reduce_async(x)

    def all_reduce(self, x: Tensor) -> Tensor:
        """Return the sum of every rank's ``x``."""
        return self.all_reduce_blocking(x).wait()

    def all_gather(self, x: Tensor) -> Tensor:
        """Return every rank's ``x`` [..., n] side by side: [..., ranks * n]. Ranks that are not there have this one's,
        and the message takes as long as an all-reduce of the result."""
        return x if self.ranks == 1 else self.all_reduce(torch.cat([x] * self.ranks, -1))

    def settle(self) -> None:
        """Finish all communication of this backend, also receives that were posted ahead of their message. All ranks
        call it, at the end, and where the next messages are of another kind, with no handle left to wait for."""
        for collectives in self.parts:
            collectives.settle()

    @property
    def parts(self) -> "list[Collectives]":
        """The collectives that end with these, such as those that were made by ``split``."""
        return [collectives for split in self.splits.values() for collectives in split]


class Split(NamedTuple):
    """The collectives of a group of neighbours, and those that sum over groups what each group's ranks hold alike."""

    within: Collectives
    across: Collectives


class AcrossGroups(Collectives):
    """The sum over groups of a message that all ranks of a group hold alike.

    Each rank sends its own slice of a long message, so that the group's message crosses the link once; the group then
    gathers the slices. Short ones go whole, from every rank.

    peers: the collectives of the ranks at ``position`` in every group.
    """

    def __init__(self, within: Collectives, peers: Collectives, position: int) -> None:
        super().__init__(peers.ranks)
        self.name, self.within, self.peers, self.position = peers.name, within, peers, position

    def all_reduce_async(self, x: Tensor) -> Handle:
        if x.nbytes < SLICED_BYTES or x.shape[-1] % self.within.ranks:
            return self.peers.all_reduce_async(x)
        handle = self.peers.all_reduce_async(x.chunk(self.within.ranks, -1)[self.position].contiguous())
        return Handle(lambda: self.within.all_gather(handle.wait()))

    @property
    def parts(self) -> list[Collectives]:
        return [self.peers]


class NoCommunication(Collectives):
    """Collectives that do nothing and take no time: the upper bound for any overlap. Results are wrong by design."""

    name = "none"

    def split(self, size: int) -> Split:
        return Split(NoCommunication(size), NoCommunication(self.ranks // size))
