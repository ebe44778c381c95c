"""What one rank owns of a Llama's tensors, and the linear layers over it.

Column-parallel layers (q, k, v; gate, up) compute a slice of their outputs; row-parallel ones (o, down) read a slice of their
inputs and return a *partial sum*: whoever calls them decides when to reduce it, so their bias belongs to no rank and is
kept apart. Heads and intermediate rows are split in contiguous blocks, rank by rank; KV heads are replicated where there are
more ranks than KV heads (DESIGN section 2; Megatron-LM, arXiv 1909.08053).
"""

import functools
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ladderize.convert.llama import head_dim, kv_head_count
from ladderize.layout import DROPPED, Layout, LayoutError, check_split


@dataclass(frozen=True)
class Slice:
    """Indices ``start`` to ``stop`` of dimension ``dim`` of a checkpoint's tensor; ``dim`` None: all of it.

    rows: the length to pad dimension 0 to with zeros, for a vocabulary that the ranks do not divide.
    """

    name: str
    dim: int | None = None
    start: int = 0
    stop: int = 0
    rows: int | None = None


@dataclass(frozen=True)
class Shape:
    """The sizes of a Llama and of one rank's part of it. Every size is a count; ``tp_size`` processes share the model."""

    vocab: int
    hidden: int
    inner: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    eps: float
    tied: bool
    tp_size: int
    rank: int
    attention_bias: bool = False
    mlp_bias: bool = False
    replicate_vocab: bool = False

    @classmethod
    def from_config(cls, config: Mapping[str, Any], *, tp_size: int, rank: int, replicate_vocab: bool = False) -> "Shape":
        check_split(config, tp_size, name="--tp-size")
        return cls(
            config["vocab_size"], config["hidden_size"], config["intermediate_size"], config["num_hidden_layers"],
            config["num_attention_heads"], kv_head_count(config), head_dim(config), config.get("rms_norm_eps", 1e-6),
            bool(config.get("tie_word_embeddings")), tp_size, rank, bool(config.get("attention_bias")), bool(config.get("mlp_bias")),
            replicate_vocab or tp_size == 1,
        )  # fmt: skip

    @property
    def own_heads(self) -> int:
        return self.heads // self.tp_size

    @property
    def own_kv_heads(self) -> int:
        return max(1, self.kv_heads // self.tp_size)

    @property
    def own_inner(self) -> int:
        return self.inner // self.tp_size

    @property
    def own_vocab(self) -> int:
        """Rows of the embedding and the LM head, padding included."""
        return self.vocab if self.replicate_vocab else -(-self.vocab // self.tp_size)

    @property
    def vocab_start(self) -> int:
        return 0 if self.replicate_vocab else self.rank * self.own_vocab

    def query_rows(self) -> tuple[int, int]:
        width = self.own_heads * self.head_dim
        return self.rank * width, (self.rank + 1) * width

    def kv_rows(self) -> tuple[int, int]:
        first = self.rank * self.kv_heads // self.tp_size
        return first * self.head_dim, (first + self.own_kv_heads) * self.head_dim

    def inner_rows(self) -> tuple[int, int]:
        return self.rank * self.own_inner, (self.rank + 1) * self.own_inner

    def vocab_slice(self, name: str) -> Slice:
        start = min(self.vocab_start, self.vocab)
        return Slice(name, 0, start, min(self.vocab_start + self.own_vocab, self.vocab), rows=self.own_vocab)


def check_tp_size(config: Mapping[str, Any], layout: Layout, tp_size: int, *, name: str = "--tp-size") -> None:
    """Raise LayoutError unless ``tp_size`` processes can run this model with this layout."""
    check_split(config, tp_size, name=name)
    if layout.sync_tp_size is not None and layout.sync_tp_size % tp_size:
        fitting = [n for n in range(1, layout.sync_tp_size + 1) if layout.sync_tp_size % n == 0]
        raise LayoutError(
            f"{name} {tp_size} does not divide the {layout.sync_tp_size} virtual ranks (sync_tp_size) that this layout's dropped sync "
            f"points were made for; this model runs on {', '.join(map(str, fitting))}"
        )


def virtual_ranks(layout: Layout, layer: int, tp_size: int) -> int:
    """How many virtual ranks one process computes apart in ``layer``; 1 where nothing is dropped, since sums then do not care."""
    if layout.attention_sync[layer] != DROPPED:
        return 1
    assert layout.sync_tp_size is not None
    return layout.sync_tp_size // tp_size


class Linear:
    """y = x W^T + b for an inference-only weight [out, in]. ``pack``: store it in oneDNN's blocked layout (CPU).

    A packed bfloat16 product of one token reads memory about 1.5 times as fast as F.linear, which reorders as it goes; a packed
    float32 one gains a fifth on prompts (benchmarks/decode_cpu.py measures both).
    """

    __slots__ = ("bias", "out_features", "packed", "weight")

    def __init__(self, weight: Tensor, bias: Tensor | None = None, *, pack: bool = False) -> None:
        self.out_features = weight.shape[0]
        self.packed = pack and can_pack(weight)
        self.weight = torch.ops.mkldnn._reorder_linear_weight(weight.contiguous(), None) if self.packed else weight
        self.bias = bias

    def __call__(self, x: Tensor) -> Tensor:
        if self.packed:
            return torch.ops.mkldnn._linear_pointwise.default(x, self.weight, self.bias, "none", [], "")
        return F.linear(x, self.weight, self.bias)

    @property
    def nbytes(self) -> int:
        return self.weight.numel() * self.weight.element_size() + (0 if self.bias is None else self.bias.nbytes)


class RMSNorm:
    """x / sqrt(mean(x^2) + eps) * weight over the last dimension, in float32 inside and rounded once.

    On a CPU through layer_norm of [x, -x], whose mean is 0 and whose variance is the mean of x^2: three kernels instead of the
    nine that torch composes its rms_norm of there.
    """

    __slots__ = ("doubled", "eps", "weight")

    def __init__(self, weight: Tensor, eps: float) -> None:
        self.weight, self.eps = weight, eps
        self.doubled = torch.cat((weight, weight)) if weight.device.type == "cpu" else None

    def __call__(self, x: Tensor) -> Tensor:
        if self.doubled is None:
            return F.rms_norm(x, self.weight.shape, self.weight, self.eps)
        return F.layer_norm(torch.cat((x, -x), -1), self.doubled.shape, self.doubled, None, self.eps)[..., : x.shape[-1]]


def can_pack(weight: Tensor) -> bool:
    return weight.device.type == "cpu" and weight.dtype in _packable()


@functools.cache
def _packable() -> tuple[torch.dtype, ...]:
    """What oneDNN multiplies natively here: emulated, its packed products are slower than plain ones."""
    mkldnn = torch.ops.mkldnn
    names = ("_is_mkldnn_bf16_supported", "_reorder_linear_weight", "_linear_pointwise")
    if not torch.backends.mkldnn.is_available() or not all(hasattr(mkldnn, name) for name in names):
        return ()
    return (torch.float32, torch.bfloat16) if mkldnn._is_mkldnn_bf16_supported() else (torch.float32,)


@dataclass
class LayerWeights:
    """One rank's part of a layer. ``o`` and ``gate_up`` have one entry for each virtual rank that is computed apart."""

    input_norm: RMSNorm
    qkv: Linear
    o: list[Linear]
    o_bias: Tensor | None
    post_norm: RMSNorm
    gate_up: list[Linear]
    down: Linear
    down_bias: Tensor | None


@dataclass
class Weights:
    """One rank's part of a Llama. embed: [own_vocab, hidden]; head: [own_vocab, hidden] as a Linear."""

    embed: Tensor
    layers: list[LayerWeights]
    norm: RMSNorm
    head: Linear

    @property
    def resident_bytes(self) -> int:
        """Bytes that this rank holds."""
        shared = not self.head.packed and self.head.weight.data_ptr() == self.embed.data_ptr()
        return self.nbytes + (0 if shared else self.embed.nbytes)

    @property
    def nbytes(self) -> int:
        """Bytes of distinct tensors that decoding one token reads (of the embedding: its rows only, so not counted unless tied)."""
        total = self.norm.weight.nbytes + self.head.nbytes
        for layer in self.layers:
            total += layer.input_norm.weight.nbytes + layer.post_norm.weight.nbytes + layer.qkv.nbytes + layer.down.nbytes
            total += sum(linear.nbytes for linear in (*layer.o, *layer.gate_up))
            total += sum(bias.nbytes for bias in (layer.o_bias, layer.down_bias) if bias is not None)
        return total
