"""A layer's operations by the kernels of native/kernels.cpp: on a CPU, without gradients."""

import ctypes
from ctypes import byref

import torch
from torch import Tensor

from ladderize.families.base import GELU
from ladderize.runtime.collectives.differentiable import Stream, whole
from ladderize.runtime.kv_cache import KVCache, NoCache
from ladderize.runtime.layers import Linear, RMSNorm, Sublayer
from ladderize.runtime.native.library import TYPES, Cache, Heads, Packed, address
from ladderize.runtime.operations import Operations, attend
from ladderize.runtime.step import Step


class CpuOperations(Operations):
    """Results are those of ``Operations``, up to rounding, in float32 and bfloat16. ``library``: of ``kernels``."""

    name = "compiled"

    def __init__(self, library: ctypes.CDLL) -> None:
        super().__init__()
        self._rms_norm, self._gated = library.ladderize_rms_norm, library.ladderize_gated
        self._rotate, self._attend = library.ladderize_rotate, library.ladderize_attend
        self._attend_prompt, self._product = library.ladderize_attend_prompt, library.ladderize_product
        self._width = library.ladderize_width()
        self.threads = torch.get_num_threads()

    def product(self, linear: Linear, x: Tensor) -> Tensor:
        return linear(x) if linear.packed is None else self._multiplied(linear, linear.packed, x, gated=False)

    def gated_product(self, linear: Linear, x: Tensor, activation: str) -> Tensor:
        packed = linear.packed
        if packed is None or activation == GELU or packed.outputs % (2 * self._width):  # up begins within a block
            return super().gated_product(linear, x, activation)
        return self._multiplied(linear, packed, x, gated=True)

    def _multiplied(self, linear: Linear, packed: Packed, x: Tensor, *, gated: bool) -> Tensor:
        if x.dtype != linear.weight.dtype or x.shape[-1] != packed.depth:
            raise ValueError(
                f"x of {x.dtype} {tuple(x.shape)} for a weight of {linear.weight.dtype}, depth {packed.depth}"
            )
        x, rows = x.contiguous(), x.shape[:-1].numel()
        out = x.new_empty(*x.shape[:-1], packed.outputs // 2 if gated else packed.outputs)
        factors = x.data_ptr(), rows, byref(packed), address(linear.bias)
        if rows and self._product(TYPES[x.dtype], *factors, gated, out.data_ptr(), self.threads):
            raise MemoryError(f"no memory to multiply {rows} rows")
        return out

    def norm(self, norm: RMSNorm | None, x: Stream) -> Tensor:
        x = whole(x).contiguous()
        if norm is None or norm.weight.dtype != x.dtype:
            return super().norm(norm, x)
        out, width = torch.empty_like(x), x.shape[-1]
        pointers = x.data_ptr(), norm.weight.data_ptr(), out.data_ptr()
        self._rms_norm(TYPES[x.dtype], *pointers, x.numel() // width, width, norm.eps, self.threads)
        return out

    def gated(self, gate_up: Tensor, activation: str) -> Tensor:
        if activation == GELU:
            return super().gated(gate_up, activation)
        inner = gate_up.shape[-1] // 2
        out = gate_up.new_empty(*gate_up.shape[:-1], inner)
        rows, pointers = out.numel() // inner, (gate_up.data_ptr(), out.data_ptr())
        self._gated(TYPES[out.dtype], *pointers, rows, inner, self.threads)
        return out

    def attend_projected(self, weights: Sublayer, qkv: Tensor, step: Step, cache: KVCache) -> Tensor:
        if isinstance(cache, NoCache) or not isinstance(step.columns, int) or cache.keys.dtype != qkv.dtype:
            return super().attend_projected(weights, qkv, step, cache)
        shape, decoder, index = weights.shape, weights.shape.decoder, weights.layer
        batch, tokens, _ = qkv.shape
        heads, kv_heads, dim = shape.own_heads, shape.own_kv_heads, shape.head_dim
        rotation = step.rotation(decoder, index)
        rope = None if rotation is None else rotation.contiguous()
        if rope is not None and (rope.shape[0] not in (1, batch) or rope.shape[1:] != (tokens, 1, dim // 2)):
            raise ValueError(f"rope factors {tuple(rope.shape)} of {batch} x {tokens} tokens with heads of {dim}")
        rope_row = 0 if rope is None or rope.shape[0] == 1 else tokens * dim
        query = qkv.new_empty(batch, tokens, heads, dim)
        keys, values = cache.keys[index], cache.values[index]  # of a head its columns side by side
        strides_and_sizes = *keys.stride()[:2], step.columns, keys.shape[0], keys.shape[2]
        layer = Cache(keys.data_ptr(), values.data_ptr(), *strides_and_sizes)
        kind, size = TYPES[qkv.dtype], byref(Heads(batch, tokens, heads, kv_heads, dim))
        failed = self._rotate(
            *(kind, size, qkv.data_ptr()),
            *(address(weights.head_norms), shape.eps),
            *(address(rope), rope_row, query.data_ptr(), byref(layer), self.threads),
        )
        if failed:
            raise IndexError(f"the KV cache has no such rows or columns: {batch} rows, columns {step.columns}")
        mask, causal = step.seen(decoder.windows[index])
        length = step.length or tokens
        scale = dim**-0.5 if decoder.attention_scale is None else decoder.attention_scale
        out = qkv.new_empty(batch, tokens, heads * dim)
        if tokens > 1:
            pointers = query.data_ptr(), byref(layer), scale, out.data_ptr()
            is_plain = causal and mask is None and length == tokens
            if is_plain and self._attend_prompt(kind, size, *pointers, self.threads) == 0:
                return out
            return attend(query.transpose(1, 2), *cache.read(index, length), mask, causal, scale=scale)
        failed = self._attend(
            *(kind, size, query.data_ptr(), byref(layer), *_seen(mask, batch, length), length, scale),
            *(out.data_ptr(), self.threads),
        )
        if failed:
            raise IndexError(f"the KV cache has no {length} columns")
        return out


def _seen(mask: Tensor | None, rows: int, length: int) -> tuple[int | None, int]:
    """Return the address of a mask, bool [rows or 1, 1, 1, length], and the bytes from one row's to the next."""
    if mask is None:
        return None, 0
    fits = mask.shape[0] in (1, rows) and mask.shape[1:] == (1, 1, length) and mask.stride(3) == 1
    if mask.dtype != torch.bool or not fits:
        raise ValueError(f"a mask of {mask.dtype} {tuple(mask.shape)} for {rows} tokens that look at {length} columns")
    return mask.data_ptr(), mask.stride(0) if mask.shape[0] > 1 else 0
