"""One pass of the model over many texts: rows of tokens in, hidden states out, however long the texts are.

What texts begin with in common is one run of tokens. A row is a tree of tokens, written down depth first. Each token
stands at its own depth and looks at its ancestors only, so one forward pass computes the context of a multiple-choice
question once for all its answers, and the examples in front of several questions once for all of them.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from ladderize.runtime.kv_cache import KVCache, NoCache
from ladderize.runtime.model import TPLlama
from ladderize.runtime.shards import Shape
from ladderize.runtime.step import Step

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


@dataclass
class TextReader:
    """One rank of a model that reads texts without going on with them. All ranks call the same in the same order.

    rope: gives the factors of at least so many positions [positions, head_dim / 2], as ``GrowingRope`` does. budget:
    tokens of a forward pass.
    """

    model: TPLlama
    rope: Callable[[int], Tensor]
    budget: int
    dtype: torch.dtype
    _last: tuple[int, ...] = field(default=(), repr=False)

    @property
    def device(self) -> torch.device:
        return self.rope(1).device

    def read(self, sequences: Sequence[np.ndarray]) -> Iterator[tuple[Tensor, dict[int, np.ndarray]]]:
        """Read token sequences, int64 [n > 0] each, what they begin with in common once.

        Yields, batch by batch, the normed end of the residual stream of all tokens [tokens, hidden], and for each
        sequence of the batch, by its number, where its tokens are in there.
        """
        for batch in row_batches(share_prefixes(sequences, self.budget, joined_cost(self.model.shape)), self.budget):
            length = len(batch[0].tokens) if len(batch) == 1 else padded(len(batch[0].tokens))
            hidden = self._chunked(batch[0]) if length > self.budget else self._at_once(batch, length)
            places = {
                number: index * length + path for index, row in enumerate(batch) for number, path in row.paths.items()
            }
            yield hidden.flatten(0, 1), places

    def _at_once(self, batch: list[TreeRow], length: int) -> Tensor:
        ids = self._table([row.tokens for row in batch], length)
        depths = self._table([row.depths for row in batch], length)
        factors = self.rope(length)[depths].unsqueeze(2)
        if all(row.is_chain for row in batch):
            # padding stands on the right: without a mask no token looks that far
            return self.forward(ids, Step(factors, 0, 0, causal=True))
        seen = torch.from_numpy(np.stack([ancestors(row, length) for row in batch]))
        return self.forward(ids, Step(factors, 0, 0, seen[:, None].to(self.device), depths=depths))

    def _chunked(self, row: TreeRow) -> Tensor:
        """A text that is longer than the budget."""
        ids = self._table([row.tokens], len(row.tokens))
        cache = KVCache.allocate(self.model.shape, 1, ids.shape[1], self.dtype, self.device)
        return torch.cat([hidden for _, hidden in self.pieces(ids, cache, self.budget)], 1)

    def pieces(self, ids: Tensor, cache: KVCache, at_once: int) -> Iterator[tuple[int, Tensor]]:
        """Read ids [rows, tokens] into ``cache``, ``at_once`` tokens of each row at a time. Yields the number of the
        first of these, and their states [rows, at_once, hidden]."""
        tokens = ids.shape[1]
        rope, columns = self.rope(tokens), torch.arange(tokens, device=self.device)
        for first in range(0, tokens, at_once):
            end = min(first + at_once, tokens)
            # padding may stand behind the last position that there is
            factors = rope[columns[first:end].clamp(max=len(rope) - 1)][None, :, None]
            if end - first == tokens:
                step = Step(factors, 0, 0, causal=True)
            else:
                step = Step(factors, first, end, (columns[None, :end] <= columns[first:end, None])[None, None])
            yield first, self.forward(ids[:, first:end], step, cache)

    def forward(self, ids: Tensor, step: Step, cache: KVCache | None = None) -> Tensor:
        """The model's forward; without a cache for what is read once."""
        shape = tuple(ids.shape)
        if shape != self._last:  # a backend that listens for messages of one size ahead would listen for all of them
            self.model.collectives.settle()
            self.model.collectives.tidy()  # texts have many lengths
            self._last = shape
        return self.model.forward(ids, step, cache or NoCache(self.dtype, self.device))

    def _table(self, rows: list[list[int]], length: int) -> Tensor:
        return torch.tensor([row + [0] * (length - len(row)) for row in rows], device=self.device)


def joined_cost(shape: Shape) -> Callable[[int], float]:
    """Multiplications of one layer for a row of so many tokens: its products, and its attention to all of the row."""
    heads = shape.head_dim * shape.heads
    products = shape.hidden * (2 * heads + 2 * shape.head_dim * shape.kv_heads + 3 * shape.inner)
    # with a mask no column is left out, and attention runs at about half the speed of products
    return lambda tokens: tokens * (products + 4 * heads * tokens)
