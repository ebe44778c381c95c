"""What one rank of a model holds in memory, from its shape. Imports no torch."""

from dataclasses import dataclass

from ladderize.runtime.shards import Shape

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


def weight_bytes(shape: Shape, width: int, *, packed: bool) -> int:
    """One rank's weights at ``width`` bytes each. packed: the LM head is a copy even of a tied embedding."""
    attention = (2 * shape.own_heads + 2 * shape.own_kv_heads) * shape.head_dim * shape.hidden
    layer = attention + 3 * shape.own_inner * shape.hidden + 2 * shape.hidden
    tables = 1 if shape.tied and not packed else 2
    return width * (shape.layers * layer + tables * shape.own_vocab * shape.hidden)


def cache_bytes(shape: Shape, batch: int, columns: int, width: int) -> int:
    """One rank's keys and values of ``batch`` texts of ``columns`` tokens, at ``width`` bytes each."""
    return 2 * shape.layers * batch * shape.own_kv_heads * columns * shape.head_dim * width


def prefill_bytes(shape: Shape, batch: int, prompt_len: int, width: int) -> int:
    """At the least, beside the weights and the cache: token ids, the activations of one layer, logits."""
    heads = shape.own_heads + 2 * shape.own_kv_heads
    token = width * (3 * shape.hidden + 3 * shape.own_inner) + 4 * heads * shape.head_dim
    return batch * (prompt_len * (token + TOKEN_ID_BYTES) + width * shape.vocab)
