"""The operations between a layer's products by the kernels of native/kernels.cpp: on a CPU, without gradients."""

import ctypes
from ctypes import byref

import torch
from torch import Tensor

from ladderize.runtime.collectives.differentiable import Stream, whole
from ladderize.runtime.kv_cache import KVCache
from ladderize.runtime.layers import AttentionWeights, MlpWeights, RMSNorm
from ladderize.runtime.native.library import TYPES, Cache, Heads, address
from ladderize.runtime.operations import Operations, attend
from ladderize.runtime.shards import Shape
from ladderize.runtime.step import Step


class CpuOperations(Operations):
    """Results are those of ``Operations``, up to rounding, in float32 and bfloat16. ``library``: of ``kernels``."""

    name = "compiled"

    def __init__(self, library: ctypes.CDLL) -> None:
        super().__init__()
        self._rms_norm, self._gated = library.ladderize_rms_norm, library.ladderize_gated
        self._rotate, self._attend = library.ladderize_rotate, library.ladderize_attend
        self.threads = torch.get_num_threads()

    def norm(self, norm: RMSNorm, x: Stream) -> Tensor:
        x = whole(x).contiguous()
        out, width = torch.empty_like(x), x.shape[-1]
        pointers = x.data_ptr(), norm.weight.data_ptr(), out.data_ptr()
        self._rms_norm(TYPES[x.dtype], *pointers, x.numel() // width, width, norm.eps, self.threads)
        return out

    def mlp(self, weights: MlpWeights, x: Stream, apart: list[Tensor] | None) -> Tensor:  # type: ignore[override]
        x = whole(x)
        inputs = [x] if apart is None else [x + partial for partial in apart]
        products = [
            gate_up(self.norm(weights.norm, read))
            for gate_up, read in zip(weights.gate_up, inputs, strict=apart is not None)
        ]
        inner, kind = products[0].shape[-1] // 2, TYPES[x.dtype]
        stride = inner * len(products)
        out = x.new_empty(*x.shape[:-1], stride)
        rows, start = out.numel() // stride, out.data_ptr()
        for number, product in enumerate(products):
            to = start + number * inner * x.element_size()
            self._gated(kind, product.data_ptr(), to, rows, inner, stride, self.threads)
        return out

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
        x, decoder = whole(x), shape.decoder
        batch, tokens, _ = x.shape
        heads, kv_heads, dim, norms = shape.own_heads, shape.own_kv_heads, shape.head_dim, weights.head_norms
        qkv = weights.qkv[virtual](self.norm(weights.norm, x))
        rope = step.rope_factors.contiguous() if decoder.rope[index] else None
        if rope is not None and (rope.shape[0] not in (1, batch) or rope.shape[1:] != (tokens, 1, dim // 2)):
            raise ValueError(f"rope factors {tuple(rope.shape)} of {batch} x {tokens} tokens with heads of {dim}")
        rope_row = 0 if rope is None or rope.shape[0] == 1 else tokens * dim
        query = x.new_empty(batch, tokens, heads, dim)
        kept = cache.is_static and cache.keys.dtype == x.dtype and isinstance(step.columns, int)
        if kept:
            layer = _layer(cache.keys[index], cache.values[index], int(step.columns))
        else:
            keys, values = (x.new_empty(batch, kv_heads, tokens, dim) for _ in range(2))
            layer = _layer(keys, values)
        kind, size = TYPES[x.dtype], byref(Heads(batch, tokens, heads, kv_heads, dim))
        failed = self._rotate(
            *(kind, size, qkv.data_ptr()),
            *((None, 0.0) if norms is None else (norms.weight.data_ptr(), norms.eps)),
            *(address(rope), rope_row, query.data_ptr(), byref(layer), self.threads),
        )
        if failed:
            raise IndexError(f"the KV cache has no such rows or columns: {batch} rows, columns {step.columns}")
        length = step.length or tokens
        if not kept:
            cache.write(index, step.columns, keys, values)
        if kept or step.length:
            keys, values = (tensor.to(x.dtype) for tensor in cache.read(index, length))
        mask, causal = step.seen(decoder.windows[index])
        scale = dim**-0.5 if decoder.attention_scale is None else decoder.attention_scale
        if tokens > 1:
            return attend(query.transpose(1, 2), keys, values, mask, causal, scale=scale)
        out = x.new_empty(batch, 1, heads * dim)
        layer = _layer(keys, values)
        failed = self._attend(
            *(kind, size, query.data_ptr(), byref(layer), *_seen(mask, batch, length), length, scale),
            *(out.data_ptr(), self.threads),
        )
        if failed:
            raise IndexError(f"the KV cache has no {length} columns")
        return out


def _layer(keys: Tensor, values: Tensor, column: int = 0) -> Cache:
    """Return keys and values [batch, heads, columns, head_dim], a head's columns side by side, for the kernels. column:
    the first one of a pass's tokens."""
    return Cache(keys.data_ptr(), values.data_ptr(), *keys.stride()[:2], column, keys.shape[0], keys.shape[2])


def _seen(mask: Tensor | None, rows: int, length: int) -> tuple[int | None, int]:
    """Return the address of a mask, bool [rows or 1, 1, 1, length], and the bytes from one row's to the next."""
    if mask is None:
        return None, 0
    fits = mask.shape[0] in (1, rows) and mask.shape[1:] == (1, 1, length) and mask.stride(3) == 1
    if mask.dtype != torch.bool or not fits:
        raise ValueError(f"a mask of {mask.dtype} {tuple(mask.shape)} for {rows} tokens that look at {length} columns")
    return mask.data_ptr(), mask.stride(0) if mask.shape[0] > 1 else 0
