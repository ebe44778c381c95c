"""Which heads work on which rank: what may move, and the paper's two steps, grouping and matching."""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

RESTARTS = 8
MIN_GAIN = 1e-9  # relative; less is rounding

Assignment = list[list[int]]  # the units of each rank


@dataclass(frozen=True)
class Units:
    """What moves as a whole, and where to.

    With at least as many KV heads as ranks a unit is a KV group (a head, without GQA) and may go to any rank: one
    family. With fewer, a KV head is replicated on the ranks that share it: a unit is a query head, and a family, the
    heads of one KV head, fills neighbouring ranks.
    """

    heads: list[list[int]]  # of each unit
    families: list[list[int]]  # units; all of one size
    ranks: int

    @classmethod
    def of(cls, heads: int, kv_heads: int, ranks: int) -> "Units":
        groups = [list(range(first, first + heads // kv_heads)) for first in range(0, heads, heads // kv_heads)]
        if kv_heads % ranks == 0:
            return cls(groups, [list(range(kv_heads))], ranks)
        return cls([[head] for head in range(heads)], groups, ranks)

    @property
    def ranks_per_family(self) -> int:
        return self.ranks // len(self.families)

    @property
    def per_rank(self) -> int:
        return len(self.heads) // self.ranks

    @property
    def freedom(self) -> str:
        """What there is to choose, in words."""
        if self.ranks == 1:
            return "one rank: nothing can change"
        if self.per_rank > 1:
            return "which groups of heads share a rank can change, and which rank that is"
        group = "KV group" if len(self.families) == 1 else "group of query heads"
        return f"one {group} per rank: only the assignment of groups to ranks can change"

    def identity(self) -> Assignment:
        """The order as it is."""
        units = [unit for family in self.families for unit in family]
        return [units[first : first + self.per_rank] for first in range(0, len(units), self.per_rank)]

    def order(self, assignment: Assignment) -> tuple[int, ...]:
        """The head order that puts each rank's heads where it looks for them."""
        return tuple(head for members in assignment for unit in sorted(members) for head in self.heads[unit])


def spread(distance: np.ndarray, groups: int, *, seed: int = 0) -> list[list[int]]:
    """Split units into ``groups`` of equal size so that the sum of pairwise distances within groups is large.

    distance: [units, units], symmetric. A local search that exchanges the best pair until none helps, from the order as
    it is and from ``RESTARTS`` random ones; never worse than the order as it is.
    """
    size = len(distance) // groups
    start = np.repeat(np.arange(groups), size)
    rng = np.random.default_rng(seed)
    found = [
        _exchange(distance, labels, groups) for labels in [start, *(rng.permutation(start) for _ in range(RESTARTS))]
    ]
    best = max(found, key=lambda labels: _within(distance, labels))
    return [np.flatnonzero(best == group).tolist() for group in range(groups)]


def _within(distance: np.ndarray, labels: np.ndarray) -> float:
    return float((distance * (labels[:, None] == labels)).sum() / 2)


def _exchange(distance: np.ndarray, labels: np.ndarray, groups: int) -> np.ndarray:
    labels = labels.copy()
    while True:
        to_group = distance @ (
            labels[:, None] == np.arange(groups)
        )  # [units, groups]: distance of a unit to all of a group
        own, other = to_group[np.arange(len(labels)), labels], to_group[:, labels]
        gain = other + other.T - own[:, None] - own - 2 * distance  # of exchanging a and b
        gain[labels[:, None] == labels] = 0.0
        a, b = np.unravel_index(np.argmax(gain), gain.shape)
        if gain[a, b] <= MIN_GAIN * max(1.0, float(np.abs(distance).sum())):
            return labels
        labels[a], labels[b] = labels[b], labels[a]


def match(units: Units, groups: Sequence[Sequence[Sequence[int]]], values: np.ndarray) -> Assignment:
    """Give every group a rank so that the sum of ``values`` is the largest possible, families staying on neighbouring
    ranks.

    groups: of each family. values: [groups in order, ranks].
    """
    from scipy.optimize import linear_sum_assignment  # here, so that the rest runs where there is no scipy

    count, width = len(groups), units.ranks_per_family
    inner = {}
    gains = np.zeros((count, count))
    for family, place in itertools.product(range(count), range(count)):
        part = values[family * width : (family + 1) * width, place * width : (place + 1) * width]
        rows, columns = linear_sum_assignment(part, maximize=True)
        inner[family, place] = columns
        gains[family, place] = part[rows, columns].sum()
    assignment: Assignment = [[] for _ in range(units.ranks)]
    for family, place in zip(*linear_sum_assignment(gains, maximize=True), strict=True):
        for group, column in zip(groups[family], inner[family, place], strict=True):
            assignment[place * width + column] = list(group)
    return assignment
