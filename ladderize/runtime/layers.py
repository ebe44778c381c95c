"""One rank's part of a Llama's tensors, and the linear layers over it.

Row-parallel layers (o, down) return a *partial sum*, which the caller reduces: the bias belongs to no rank."""

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from torch import Tensor

from ladderize.runtime.native.library import TYPES, Packed, kernels
from ladderize.runtime.shards import Shape

LINE = 64  # bytes: of a processor's caches


class Linear:
    """The product y = x W^T + b with an inference-only weight [out, in]; ``pack``: as the kernels of a CPU multiply it,
    where this process has them."""

    __slots__ = ("bias", "packed", "weight")

    def __init__(self, weight: Tensor, bias: Tensor | None = None, *, pack: bool = False) -> None:
        library = kernels() if pack and weight.device.type == "cpu" and weight.dtype in TYPES else ""
        width = 0 if isinstance(library, str) else library.ladderize_width()
        self.weight, self.bias, self.packed = weight, bias, None
        if width:
            self.weight = pack_weight(weight, width)
            self.packed = Packed(self.weight.data_ptr(), *weight.shape)

    def __call__(self, x: Tensor) -> Tensor:
        if self.packed is None:
            return F.linear(x, self.weight, self.bias)
        return F.linear(x, unpack_weight(self.weight, self.packed.outputs, self.packed.depth), self.bias)


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


def pack_weight(weight: Tensor, width: int) -> Tensor:
    """Return a weight [outputs, depth] as native/products.h reads it: [blocks, words, numbers]. A word is a pair of
    bfloat16, or a float, and those of ``width`` outputs lie side by side. Zeros fill the last block and line."""
    missing = -weight.shape[1] % (LINE // weight.itemsize), -weight.shape[0] % width
    filled = F.pad(weight, (0, missing[0], 0, missing[1])) if any(missing) else weight.contiguous()
    wide = filled.view(torch.int32)
    return wide.view(-1, width, wide.shape[1]).transpose(1, 2).contiguous().view(weight.dtype)


def unpack_weight(packed: Tensor, outputs: int, depth: int) -> Tensor:
    """Return the weight [outputs, depth] that pack_weight was given."""
    wide = packed.view(torch.int32).transpose(1, 2).contiguous()
    return wide.view(-1, wide.shape[2]).view(packed.dtype)[:outputs, :depth]


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
