"""A static KV cache: allocated once, written in place, column by column of the batch.

On a CPU it is float32: attention over bfloat16 keys takes 2 to 7 times as long there."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ladderize.memory import check_room
from ladderize.runtime.shards import Shape


@dataclass
class KVCache:
    """Keys and values of all layers, [layers, batch, own KV heads, columns, head_dim]. A column is a position of every
    row of the batch."""

    keys: Tensor
    values: Tensor

    @classmethod
    def allocate(
        cls,
        shape: Shape,
        batch: int,
        columns: int,
        dtype: torch.dtype,
        device: torch.device,
        kv_heads: int | None = None,
        again: "Sequence[KVCache]" = (),
        processes: int = 1,
    ) -> "KVCache":
        """Return an empty cache, or one of the same size in ``again``; UserError where there is not enough memory.

        kv_heads: of ``shards.cached_heads``; None: the rank's own.
        processes: of this machine that allocate as much.
        """
        dtype = torch.float32 if device.type == "cpu" else dtype
        size = shape.layers, batch, kv_heads or shape.own_kv_heads, columns, shape.head_dim
        for kept in again:
            if kept.keys.shape == size and kept.keys.dtype == dtype:
                return kept
        name = f"a KV cache for {batch:,} texts of {columns:,} tokens"
        advice = "generate fewer texts at a time, or shorter ones"
        check_room(2 * math.prod(size) * dtype.itemsize, device, name, advice, processes=processes)
        # zeros, not empty: a masked column of garbage could hold NaN, and 0 * NaN is NaN
        return cls(torch.zeros(size, dtype=dtype, device=device), torch.zeros(size, dtype=dtype, device=device))

    @property
    def columns(self) -> int:
        return self.keys.shape[3]

    def write(self, layer: int, columns: int | Tensor, keys: Tensor, values: Tensor) -> None:
        """Store keys and values [batch, heads, tokens, head_dim] from column ``columns`` on, or in a tensor of columns,
        [tokens], which a CUDA graph can capture."""
        for kept, new in ((self.keys[layer], keys), (self.values[layer], values)):
            if isinstance(columns, int):
                kept[:, :, columns : columns + new.shape[2]] = new
            else:
                kept.index_copy_(2, columns, new.to(kept.dtype))

    def read(self, layer: int, length: int) -> tuple[Tensor, Tensor]:
        """Return the first ``length`` columns of keys and values."""
        return self.keys[layer, :, :, :length], self.values[layer, :, :, :length]

    def batch_rows(self, begin: int, end: int) -> "KVCache":
        return KVCache(self.keys[:, begin:end], self.values[:, begin:end])

    def kv_heads(self, begin: int, end: int) -> "KVCache":
        if end - begin == self.keys.shape[2]:
            return self
        return KVCache(self.keys[:, :, begin:end], self.values[:, :, begin:end])

    def for_parts(self) -> "KVCache":
        """Return a cache for the parts of one row, which see the keys and values of earlier ones."""
        return self


class NoCache(KVCache):
    """A cache that keeps nothing, for texts that are read in one pass."""

    def __init__(self, dtype: torch.dtype, device: torch.device) -> None:
        nothing = torch.empty(0, 0, 0, 0, 0, dtype=dtype, device=device)
        super().__init__(nothing, nothing)

    def write(self, layer: int, columns: int | Tensor, keys: Tensor, values: Tensor) -> None:
        pass

    def batch_rows(self, begin: int, end: int) -> KVCache:
        return self

    def kv_heads(self, begin: int, end: int) -> KVCache:
        return self

    def for_parts(self) -> KVCache:
        return PartsCache(self.keys.dtype, self.keys.device)


class PartsCache(NoCache):
    """A cache of the parts of one row in training: the tensors themselves, which may have gradients. A part that is
    computed again (activation checkpointing) replaces its own entry."""

    def __init__(self, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__(dtype, device)
        self.slices: dict[int, dict[int, tuple[Tensor, Tensor]]] = {}
        self.by_heads: dict[int, PartsCache] = {}

    def kv_heads(self, begin: int, end: int) -> KVCache:
        return self.by_heads.setdefault(begin, PartsCache(self.keys.dtype, self.keys.device))

    def write(self, layer: int, columns: int | Tensor, keys: Tensor, values: Tensor) -> None:
        assert isinstance(columns, int)
        dtype = self.keys.dtype
        self.slices.setdefault(layer, {})[columns] = (keys.to(dtype), values.to(dtype))

    def read(self, layer: int, length: int) -> tuple[Tensor, Tensor]:
        stored = self.slices[layer]
        keys, values = zip(*(stored[first] for first in sorted(stored) if first < length), strict=True)
        return torch.cat(keys, 2), torch.cat(values, 2)
