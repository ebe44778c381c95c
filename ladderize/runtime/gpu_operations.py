"""The operations between a layer's products by the kernels of native/triton_kernels.py: on a GPU, without gradients."""

from collections.abc import Sequence

import torch
from torch import Tensor

from ladderize.runtime.collectives.differentiable import Stream, Unadded, whole
from ladderize.runtime.kv_cache import KVCache
from ladderize.runtime.layers import AttentionWeights, HeadNorms, JoinedLinears, Linear, MlpWeights, RMSNorm
from ladderize.runtime.native import triton_kernels
from ladderize.runtime.operations import Operations, attend
from ladderize.runtime.shards import Shape
from ladderize.runtime.step import Step


class GpuOperations(Operations):
    """Results are those of ``Operations``, up to rounding. ``programs``: as many as the GPU is busy with."""

    name = "triton"
    adds_in_norm = True

    def __init__(self, programs: int) -> None:
        super().__init__()
        self.programs = programs

    def norm(self, norm: RMSNorm, x: Stream) -> Tensor:
        if isinstance(x, Unadded) and x.summands is not None:
            return x.add_by(lambda stream, added: triton_kernels.add_rms_norm(stream, added, norm.weight, norm.eps))
        return triton_kernels.rms_norm(whole(x), norm.weight, norm.eps)

    def mlp(self, weights: MlpWeights, x: Stream, apart: list[Tensor] | None) -> Tensor:  # type: ignore[override]
        norm = weights.norm
        if apart is None:
            return triton_kernels.swiglu(weights.gate_up[0](self.norm(norm, x)))
        inner = triton_kernels.swiglu(together(weights.gate_up, self.norms_apart(norm, x, apart)))
        return abreast(inner)

    def attention(
        self,
        weights: AttentionWeights,
        x: Stream,
        step: Step,
        cache: KVCache,
        index: int,
        shape: Shape,
        virtual: int = 0,
    ) -> Tensor:
        if not cache.is_static:
            return super().attention(weights, x, step, cache, index, shape, virtual)
        qkv = weights.qkv[virtual](self.norm(weights.norm, x))
        return self.attend_projected(weights.head_norms, qkv, step, cache, index, shape, 1)

    def attention_apart(
        self,
        weights: AttentionWeights,
        x: Stream,
        apart: Sequence[Tensor],
        step: Step,
        cache: KVCache,
        index: int,
        shapes: Sequence[Shape],
    ) -> Tensor:
        if not cache.is_static:
            return super().attention_apart(weights, x, apart, step, cache, index, shapes)
        shape, ranks = shapes[0], len(apart)
        qkv = together(weights.qkv, self.norms_apart(weights.norm, x, apart))
        if ranks > 1:  # the queries of all, then their keys, then their values
            sizes = [count * shape.head_dim for count in (shape.own_heads, shape.own_kv_heads, shape.own_kv_heads)]
            qkv = torch.cat([abreast(projected) for projected in qkv.split(sizes, -1)], -1)[None]
        return self.attend_projected(weights.head_norms, qkv[0], step, cache, index, shape, ranks)

    def products_apart(self, linears: list[Linear], x: Tensor) -> Sequence[Tensor]:
        return together(linears, x.unflatten(-1, (len(linears), -1)).movedim(-2, 0)).unbind(0)

    @staticmethod
    def norms_apart(norm: RMSNorm, x: Stream, apart: Sequence[Tensor]) -> Tensor:
        return triton_kernels.add_rms_norm(whole(x), stacked(apart), norm.weight, norm.eps)[1]

    def attend_projected(
        self, norms: HeadNorms | None, qkv: Tensor, step: Step, cache: KVCache, index: int, shape: Shape, ranks: int
    ) -> Tensor:
        """Return the attention of virtual ranks side by side, [batch, tokens, heads of all * head_dim], for qkv [batch,
        tokens, (heads + 2 * KV heads of all) * head_dim]. shape: of one of the ``ranks``."""
        decoder, tokens = shape.decoder, qkv.shape[1]
        query = triton_kernels.rotate_and_store(
            qkv,
            step.rope_factors if decoder.rope[index] else None,
            None if norms is None else norms.weight_of(ranks),
            0.0 if norms is None else norms.eps,
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
