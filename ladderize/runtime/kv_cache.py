"""A static KV cache: allocated once, written in place, column by column of the batch."""

from dataclasses import dataclass

import torch
from torch import Tensor

from ladderize.runtime.parallel import Shape


@dataclass
class KVCache:
    """keys, values: [layers, batch, own KV heads, columns, head_dim]. A column is one position of every row of the batch."""

    keys: Tensor
    values: Tensor

    @classmethod
    def allocate(cls, shape: Shape, batch: int, columns: int, dtype: torch.dtype, device: torch.device) -> "KVCache":
        size = (shape.layers, batch, shape.own_kv_heads, columns, shape.head_dim)
        # zeros, not empty: a masked column of garbage could hold NaN, and 0 * NaN is NaN
        return cls(torch.zeros(size, dtype=dtype, device=device), torch.zeros(size, dtype=dtype, device=device))

    @property
    def columns(self) -> int:
        return self.keys.shape[3]

    @property
    def nbytes(self) -> int:
        return self.keys.nbytes + self.values.nbytes

    def write(self, layer: int, where: int | Tensor, keys: Tensor, values: Tensor, length: int) -> tuple[Tensor, Tensor]:
        """Store keys and values [batch, heads, tokens, head_dim] from column ``where`` on; returns the first ``length`` columns.

        where: an int, or a tensor [tokens] of columns (no host sync, capturable in a CUDA graph).
        """
        all_keys, all_values = self.keys[layer], self.values[layer]
        if isinstance(where, int):
            stop = where + keys.shape[2]
            all_keys[:, :, where:stop] = keys
            all_values[:, :, where:stop] = values
        else:
            all_keys.index_copy_(2, where, keys)
            all_values.index_copy_(2, where, values)
        return all_keys[:, :, :length], all_values[:, :, :length]
