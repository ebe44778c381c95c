"""One pass of the model over many texts: rows of tokens in, hidden states out, however long the texts are."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from ladderize.runtime.kv_cache import KVCache, NoCache
from ladderize.runtime.model import Step, TPLlama
from ladderize.runtime.requests.packing import TreeRow, ancestors, padded, row_batches, share_prefixes
from ladderize.runtime.shards import Shape


@dataclass
class TextReader:
    """One rank of a model that reads texts without going on with them. All ranks call the same in the same order.

    rope: factors of every position [positions, head_dim / 2], of ``rope_table``. budget: tokens of a forward pass.
    """

    model: TPLlama
    rope: Tensor
    budget: int
    dtype: torch.dtype
    _last: tuple[int, ...] = field(default=(), repr=False)

    @property
    def device(self) -> torch.device:
        return self.rope.device

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
        mask = None
        if not all(row.is_chain for row in batch):
            seen = torch.from_numpy(np.stack([ancestors(row, length) for row in batch]))
            mask = seen[:, None].to(self.device)
        # padding stands on the right: without a mask no token looks that far
        return self.forward(ids, Step(self.rope[depths].unsqueeze(2), 0, 0, mask, causal=mask is None))

    def _chunked(self, row: TreeRow) -> Tensor:
        """A text that is longer than the budget, piece by piece, with a cache for what was read."""
        ids = self._table([row.tokens], len(row.tokens))
        cache = KVCache.allocate(self.model.shape, 1, ids.shape[1], self.dtype, self.device)
        columns = torch.arange(ids.shape[1], device=self.device)
        parts = []
        for first in range(0, ids.shape[1], self.budget):
            end = min(first + self.budget, ids.shape[1])
            mask = (columns[None, :end] <= columns[first:end, None])[None, None]
            step = Step(self.rope[None, first:end, None], first, end, mask)
            parts.append(self.forward(ids[:, first:end], step, cache))
        return torch.cat(parts, 1)

    def forward(self, ids: Tensor, step: Step, cache: KVCache | None = None) -> Tensor:
        """The model's forward; without a cache for what is read once."""
        shape = tuple(ids.shape)
        if shape != self._last:  # a backend that listens for messages of one size ahead would listen for all of them
            self.model.collectives.settle()
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
