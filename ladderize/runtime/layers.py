"""One rank's part of a Llama's tensors, and the linear layers over it.

Row-parallel layers (o, down) return a *partial sum*, which the caller reduces: the bias belongs to no rank."""

import ctypes
import functools
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from torch import Tensor

from ladderize.runtime.native.library import Packed
from ladderize.runtime.shards import Shape


class Linear:
    """The product y = x W^T + b with an inference-only weight [out, in]; ``pack``: in oneDNN's blocked layout (CPU). A
    packed bfloat16 product of one token reads memory about 1.5 times as fast as F.linear, which reorders as it goes; a
    packed float32 one gains a fifth on prompts (benchmarks/decode_cpu.py measures both).

    packed: where oneDNN has put the weight's numbers, if our own kernels can read them."""

    __slots__ = ("bias", "is_packed", "packed", "weight")

    def __init__(self, weight: Tensor, bias: Tensor | None = None, *, pack: bool = False) -> None:
        self.is_packed = pack and weight.device.type == "cpu" and weight.dtype in packable_dtypes()
        self.weight = torch.ops.mkldnn._reorder_linear_weight(weight.contiguous(), None) if self.is_packed else weight
        self.packed = packed_numbers(weight, self.weight) if self.is_packed else None
        self.bias = bias

    def __call__(self, x: Tensor) -> Tensor:
        if self.is_packed:
            return torch.ops.mkldnn._linear_pointwise.default(x, self.weight, self.bias, "none", [], "")
        return F.linear(x, self.weight, self.bias)


class JoinedLinears(list[Linear]):
    """The linear layers of several virtual ranks, whose weights lie side by side: one kernel computes all products.
    ``weight``, ``bias``: of all, [ranks, out, in] and [ranks, out]."""

    def __init__(self, linears: Sequence[Linear]) -> None:
        super().__init__(linears)
        biases = [linear.bias for linear in linears if linear.bias is not None]
        self.weight = torch.stack([linear.weight for linear in linears])
        self.bias = torch.stack(biases) if biases else None
        for rank, linear in enumerate(linears):  # they hold no copy
            linear.weight, linear.bias = self.weight[rank], None if self.bias is None else self.bias[rank]

    def together(self, x: Tensor) -> Tensor:
        """Return each rank's product, [ranks, ..., out], with its own x [ranks, ..., in]."""
        rows, weight = x.flatten(1, -2), self.weight.transpose(1, 2)
        made = torch.bmm(rows, weight) if self.bias is None else torch.baddbmm(self.bias[:, None], rows, weight)
        return made.unflatten(1, x.shape[1:-1])


class RMSNorm:
    """The norm x / sqrt(mean(x^2) + eps) * weight over the last dimension, in float32 inside and rounded once. On a CPU
    it is layer_norm of [x, -x], whose mean is 0 and whose variance is the mean of x^2. That takes three kernels, where
    torch's rms_norm takes nine. A float32 weight beside x in 16 bits is read with x in float32: of a family that adds 1
    to it, and in training, where torch's kernels for 16 bits sum its gradient with an error of some percent."""

    __slots__ = ("doubled", "eps", "weight")

    def __init__(self, weight: Tensor, eps: float) -> None:
        self.weight, self.eps = weight, eps
        self.doubled = torch.cat((weight, weight)) if weight.device.type == "cpu" else None

    def __call__(self, x: Tensor) -> Tensor:
        if self.weight.dtype != x.dtype:
            return F.rms_norm(x.float(), self.weight.shape, self.weight, self.eps).to(x.dtype)
        if self.doubled is None:
            return F.rms_norm(x, self.weight.shape, self.weight, self.eps)
        return F.layer_norm(torch.cat((x, -x), -1), self.doubled.shape, self.doubled, None, self.eps)[
            ..., : x.shape[-1]
        ]


@functools.cache
def packable_dtypes() -> tuple[torch.dtype, ...]:
    """Return the dtypes that oneDNN multiplies natively here; emulated, packed products are slower than plain ones."""
    if not torch.backends.mkldnn.is_available():
        return ()
    is_native = torch.ops.mkldnn._is_mkldnn_bf16_supported()
    return (torch.float32, torch.bfloat16) if is_native else (torch.float32,)


def packed_numbers(weight: Tensor, packed: Tensor) -> Packed | None:
    """Return where oneDNN has put the numbers of ``weight`` [outputs, depth]; None for an order that native/products.h
    does not know. oneDNN chooses it, and does not tell: so the first block is compared with the weight."""
    (outputs, depth), width = weight.shape, packed_width(weight.dtype)
    if width is None or not is_packed_by(width, weight, packed):
        return None
    return Packed(torch.ops.mkldnn.data_ptr(packed), outputs, depth, width)


@functools.cache
def packed_width(dtype: torch.dtype) -> int | None:
    """Return how many outputs lie side by side in a weight that oneDNN packs on this CPU, found by random numbers."""
    weight = torch.randn(128, 128, generator=torch.Generator().manual_seed(0)).to(dtype)
    packed = torch.ops.mkldnn._reorder_linear_weight(weight, None)
    return next((width for width in (64, 32) if is_packed_by(width, weight, packed)), None)


def is_packed_by(width: int, weight: Tensor, packed: Tensor) -> bool:
    """Return whether ``packed`` has the size, and its first block the order, that native/products.h describes."""
    (outputs, depth), itemsize, pair = weight.shape, weight.itemsize, 4 // weight.itemsize
    size = width * depth * itemsize
    if depth % pair or torch.ops.mkldnn._nbytes(packed) != -(-outputs // width) * size:
        return False
    memory = (ctypes.c_char * size).from_address(torch.ops.mkldnn.data_ptr(packed))
    rows = F.pad(weight[:width], (0, 0, 0, max(0, width - outputs)))
    expected = rows.view(width, depth // pair, pair).transpose(0, 1).flatten()
    return torch.equal(torch.frombuffer(memory, dtype=weight.dtype), expected)


@dataclass
class Sublayer:
    """One rank's part of an attention or an MLP; projections have an entry for each virtual rank computed apart.

    norm, norm_behind: of what it reads, and of the sum that it adds to the stream.
    column_parallel: of q, k and v, or of gate and up, side by side.
    row_parallel, bias: o_proj's or down_proj's.
    shape: of one of the virtual ranks of ``column_parallel``.
    q_norm, k_norm: [head_dim], in the order of the heads' rows (``loader.pair_rope_rows``).
    head_norms: both for each head of that rank, float32 [heads + KV heads, head_dim].
    """

    layer: int
    shape: Shape
    norm: RMSNorm | None
    column_parallel: list[Linear]
    row_parallel: list[Linear]
    bias: Tensor | None
    q_norm: Tensor | None = None
    k_norm: Tensor | None = None
    norm_behind: RMSNorm | None = None
    head_norms: Tensor | None = field(default=None, init=False)

    def __post_init__(self) -> None:
        if self.q_norm is not None and self.k_norm is not None:
            norms = (self.q_norm, self.shape.own_heads), (self.k_norm, self.shape.own_kv_heads)
            self.head_norms = torch.cat([weight.float().expand(count, -1) for weight, count in norms])


@dataclass
class Weights:
    """One rank's part of a Llama; embedding and head are [own_vocab, hidden]."""

    embed: Tensor
    sublayers: list[Sublayer]  # attention and MLP in turn
    norm: RMSNorm
    head: Linear

    def rows(self, ids: Tensor) -> Tensor:
        return F.embedding(ids, self.embed)

    def take_sublayer(self, number: int) -> Sublayer:
        return self.sublayers[number]

    def take_head(self) -> Linear:
        return self.head
