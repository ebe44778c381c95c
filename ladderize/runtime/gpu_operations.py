"""The operations between a layer's products by the kernels of native/triton_kernels.py: on a GPU, without gradients."""

import torch
from torch import Tensor

from ladderize.runtime.collectives.stream import Stream, Unadded, whole
from ladderize.runtime.kv_cache import KVCache
from ladderize.runtime.layers import AttentionWeights, MlpWeights, RMSNorm
from ladderize.runtime.native import triton_kernels
from ladderize.runtime.operations import Operations, attend
from ladderize.runtime.shards import Shape
from ladderize.runtime.step import Step


class GpuOperations(Operations):
    """Operations by our own GPU kernels. Results are those of ``Operations``, up to rounding.

    programs: as many as the GPU is busy with.
    """

    name = "triton"
    adds_in_norm = True

    def __init__(self, programs: int) -> None:
        super().__init__()
        self.programs = programs

    @classmethod
    def for_device(cls, device: torch.device) -> "GpuOperations":
        """Return the operations for a GPU, with two programs for each of its multiprocessors."""
        return cls(2 * torch.cuda.get_device_properties(device).multi_processor_count)

    def norm(self, norm: RMSNorm, x: Stream) -> Tensor:
        if isinstance(x, Unadded) and x.parts is not None:
            return x.add_by(lambda stream, added: triton_kernels.add_rms_norm(stream, added, norm.weight, norm.eps))
        return triton_kernels.rms_norm(whole(x), norm.weight, norm.eps)

    def mlp(self, weights: MlpWeights, x: Stream, apart: list[Tensor] | None) -> Tensor:  # type: ignore[override]
        norm = weights.norm
        if apart is None:
            return triton_kernels.swiglu(weights.gate_up[0](self.norm(norm, x)))
        inner = []
        for gate_up, own in zip(weights.gate_up, apart, strict=True):
            _, normed = triton_kernels.add_rms_norm(whole(x), own, norm.weight, norm.eps)
            inner.append(triton_kernels.swiglu(gate_up(normed)))
        return inner[0] if len(inner) == 1 else torch.cat(inner, -1)

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
        if cache.memory() is None:
            return super().attention(weights, x, step, cache, index, shape, virtual)
        decoder, norms, normed = shape.decoder, weights.head_norms, self.norm(weights.norm, x)
        tokens = normed.shape[1]
        query = triton_kernels.rotate_and_store(
            weights.qkv[virtual](normed),
            step.rope_factors if decoder.rope[index] else None,
            None if norms is None else norms.weight,
            0.0 if norms is None else norms.eps,
            cache.keys[index],
            cache.values[index],
            step.columns,
            shape.own_heads,
        )
        keys, values = cache.read(index, step.length or tokens)  # a prompt's own are the first
        mask, causal = step.seen(decoder.windows[index])
        scale = shape.head_dim**-0.5 if decoder.attention_scale is None else decoder.attention_scale
        if tokens == 1 and step.length:
            return triton_kernels.attend_one(query, keys, values, mask, scale, self.programs)
        return attend(query, keys, values, mask, causal, scale=scale)
