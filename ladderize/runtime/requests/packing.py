"""Many token sequences to few rows of a batch: what sequences begin with in common is one run of tokens.

A row is a tree of tokens, written down depth first. Each token stands at its own depth and looks at its ancestors
only, so one forward pass computes the context of a multiple-choice question once for all its answers, and the examples
in front of several questions once for all of them.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np

ALIGNMENT = 8  # rows are padded to a multiple of this, so that batches have few different shapes


@dataclass
class TreeRow:
    """tokens: ids, parents first. depths: the position of each. segments: (first token, end, ancestors of the first) of
    each run without a branch. paths: sequence number -> where its tokens stand in the row."""

    tokens: list[int] = field(default_factory=list)
    depths: list[int] = field(default_factory=list)
    segments: list[tuple[int, int, np.ndarray]] = field(default_factory=list)
    paths: dict[int, np.ndarray] = field(default_factory=dict)

    def add(self, number: int, ids: np.ndarray, path: np.ndarray) -> np.ndarray:
        """Append sequence ``number``, which begins with the tokens of ``path``; returns its own path."""
        first, shared = len(self.tokens), len(path)
        self.tokens += ids[shared:].tolist()
        self.depths += range(shared, len(ids))
        if shared == first:  # everything so far is in front of it
            self.segments = [(0, len(self.tokens), path[:0])]
        elif len(self.tokens) > first:
            self.segments.append((first, len(self.tokens), path))
        own = np.concatenate([path, np.arange(first, len(self.tokens))])
        self.paths[number] = own
        return own

    @property
    def is_chain(self) -> bool:
        """Whether no token has two successors: then it is an ordinary text."""
        return len(self.segments) == 1


def share_prefixes(sequences: Sequence[np.ndarray], limit: int, joined_cost: Callable[[int], float]) -> list[TreeRow]:
    """Rows that hold every sequence, int64 [n > 0] each, the longest row first.

    limit: tokens of a row with more than one sequence. joined_cost: what a row of so many tokens costs to compute;
    a sequence joins a row where that is cheaper than a row of its own.
    """
    rows: list[TreeRow] = []
    row, path, last = TreeRow(), np.empty(0, np.int64), np.empty(0, np.int64)
    for number in sorted(range(len(sequences)), key=lambda i: sequences[i].astype(">u4").tobytes()):
        ids = sequences[number]
        shared = common_prefix(last, ids)
        before, after = len(row.tokens), len(row.tokens) + len(ids) - shared
        alone = joined_cost(before) + joined_cost(len(ids))
        if not rows or after > max(limit, before) or joined_cost(after) > alone:
            row, shared = TreeRow(), 0
            rows.append(row)
        path = row.add(number, ids, path[:shared])
        last = ids
    return sorted(rows, key=lambda row: -len(row.tokens))


def common_prefix(a: np.ndarray, b: np.ndarray) -> int:
    """How many tokens two sequences begin with in common."""
    length = min(len(a), len(b))
    different = np.flatnonzero(a[:length] != b[:length])
    return int(different[0]) if len(different) else length


def row_batches(rows: Sequence[TreeRow], budget: int) -> list[list[TreeRow]]:
    """Rows, the longest first, in batches of at most ``budget`` tokens with padding, or of one longer row."""
    found: list[list[TreeRow]] = []
    for row in rows:
        if found and (len(found[-1]) + 1) * padded(len(found[-1][0].tokens)) <= budget:
            found[-1].append(row)
        else:
            found.append([row])
    return found


def padded(length: int) -> int:
    return -(-length // ALIGNMENT) * ALIGNMENT


def ancestors(row: TreeRow, length: int) -> np.ndarray:
    """bool [length, length]: True where a token of the row may look; padding sees itself alone."""
    seen = np.eye(length, dtype=bool)
    for first, end, path in row.segments:
        seen[first:end, path] = True
        seen[first:end, first:end] = np.tri(end - first, dtype=bool)
    return seen
