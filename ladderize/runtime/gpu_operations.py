"""The operations between a layer's products by the kernels of native/triton_kernels.py: on a GPU, without gradients."""

from collections.abc import Sequence

import torch
from torch import Tensor

from ladderize.families.base import GELU
from ladderize.runtime.collectives.differentiable import Stream, Unadded, whole
from ladderize.runtime.kv_cache import KVCache
from ladderize.runtime.layers import JoinedLinears, Linear, RMSNorm, Sublayer
from ladderize.runtime.native import triton_kernels
from ladderize.runtime.operations import Apart, Operations, attend
from ladderize.runtime.step import Step


class GpuOperations(Operations):
    """Results are those of ``Operations``, up to rounding. ``programs``: as many as the GPU is busy with."""

    name = "triton"
    adds_in_norm = True

    def __init__(self, programs: int) -> None:
        super().__init__()
        self.programs = programs

    def norm(self, norm: RMSNorm | None, x: Stream) -> Tensor:
        if norm is None:
            return whole(x)
        if isinstance(x, Unadded) and len(x.summands) == 2:
            stream, added = x.summands
            total, normed = triton_kernels.add_rms_norm(stream, added, norm.weight, norm.eps)
            x.summands = [total]
            return normed
        return triton_kernels.rms_norm(whole(x), norm.weight, norm.eps)

    def mlp(self, weights: Sublayer, x: Stream, apart: Apart) -> Tensor:
        if weights.shape.decoder.activation == GELU:
            return super().mlp(weights, x, apart)
        return abreast(triton_kernels.swiglu(self.products_together(weights, x, apart)))

    def products_together(self, weights: Sublayer, x: Stream, apart: Apart) -> Tensor:
        """Return what the first projection of each virtual rank makes of what it reads: [ranks, ..., out]."""
        norm = weights.norm
        if apart is None or norm is None:
            return weights.column_parallel[0](self.norm(norm, x))[None]
        normed = triton_kernels.add_rms_norm(whole(x), stacked(apart), norm.weight, norm.eps)[1]
        return together(weights.column_parallel, normed)

    def products_apart(self, linears: list[Linear], x: Tensor) -> Sequence[Tensor]:
        return together(linears, x.unflatten(-1, (len(linears), -1)).movedim(-2, 0)).unbind(0)

    def attention(self, weights: Sublayer, x: Stream, apart: Apart, step: Step, cache: KVCache) -> Tensor:
        shape, decoder, index, norms = weights.shape, weights.shape.decoder, weights.layer, weights.head_norms
        qkv = self.products_together(weights, x, apart)
        ranks, tokens = len(qkv), qkv.shape[2]
        if ranks > 1:  # the queries of all, then their keys, then their values
            sizes = [count * shape.head_dim for count in (shape.own_heads, shape.own_kv_heads, shape.own_kv_heads)]
            qkv = torch.cat([abreast(projected) for projected in qkv.split(sizes, -1)], -1)[None]
        if ranks > 1 and norms is not None:
            of_kind = norms.split((shape.own_heads, shape.own_kv_heads))
            norms = torch.cat([weight.repeat(ranks, 1) for weight in of_kind])
        cache = cache.kv_heads(0, ranks * shape.own_kv_heads)
        query = triton_kernels.rotate_and_store(
            qkv[0],
            step.rotation(decoder, index),
            norms,
            shape.eps,
            cache.keys[index],
            cache.values[index],
            step.columns,
            ranks * shape.own_heads,
        )
        keys, values = cache.read(index, step.length or tokens)  # a prompt's own are the first
        mask, causal = step.seen(decoder.windows[index])
        scale = shape.head_dim**-0.5 if decoder.attention_scale is None else decoder.attention_scale
        if tokens == 1 and step.length:
            return triton_kernels.attend_one(query, keys, values, mask, scale, self.programs)
        return attend(query, keys, values, mask, causal, scale=scale)


def together(linears: list[Linear], x: Tensor) -> Tensor:
    """Return the product of each virtual rank, [ranks, ..., out], with its own x [ranks, ..., in]."""
    if isinstance(linears, JoinedLinears):
        return linears.together(x)
    return stacked([linear(read) for linear, read in zip(linears, x, strict=True)])


def stacked(tensors: Sequence[Tensor]) -> Tensor:
    """Return the parts of virtual ranks as [ranks, ...]; that of one is not copied."""
    return tensors[0][None] if len(tensors) == 1 else torch.stack([*tensors])


def abreast(x: Tensor) -> Tensor:
    """Return [..., ranks * width], contiguous, of [ranks, ..., width]."""
    return x.movedim(0, -2).flatten(-2)
