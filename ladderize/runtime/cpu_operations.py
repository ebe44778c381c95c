"""What a layer computes between its products by the kernels of native/kernels.cpp: on a CPU, without gradients."""

from ctypes import byref

import torch
from torch import Tensor

from ladderize.runtime.kv_cache import KVCache
from ladderize.runtime.layers import AttentionWeights, MlpWeights, RMSNorm
from ladderize.runtime.native.build import NotCompiledError
from ladderize.runtime.native.library import BLOCK, LANES, TYPES, Cache, Heads, Seen, address, kernels
from ladderize.runtime.operations import CompiledOperations, Operations, attend
from ladderize.runtime.shards import Shape
from ladderize.runtime.step import Step


class CpuOperations(Operations):
    """The same numbers as ``Operations``, up to rounding, in float32 and bfloat16. Raises NotCompiledError."""

    name = "compiled"

    def __init__(self) -> None:
        super().__init__()
        own = kernels()
        self._rms_norm, self._gated = own.ladderize_rms_norm, own.ladderize_gated
        self._rotate, self._attend = own.ladderize_rotate, own.ladderize_attend
        self.threads = torch.get_num_threads()

    def norm(self, norm: RMSNorm, x: Tensor) -> Tensor:
        x = x.contiguous()
        out, width = torch.empty_like(x), x.shape[-1]
        pointers = x.data_ptr(), norm.weight.data_ptr(), out.data_ptr()
        self._rms_norm(TYPES[x.dtype], *pointers, x.numel() // width, width, norm.eps, self.threads)
        return out

    def mlp(self, weights: MlpWeights, x: Tensor, carry: list[Tensor] | None) -> Tensor:
        inputs = [x] if carry is None else [x + own for own in carry]
        products = [
            gate_up(self.norm(weights.norm, read))
            for gate_up, read in zip(weights.gate_up, inputs, strict=carry is not None)
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
        self, weights: AttentionWeights, x: Tensor, step: Step, cache: KVCache, index: int, shape: Shape
    ) -> Tensor:
        decoder, (batch, tokens, _) = shape.decoder, x.shape
        heads, kv_heads, dim, norms = shape.own_heads, shape.own_kv_heads, shape.head_dim, weights.head_norms
        qkv = weights.qkv(self.norm(weights.norm, x))
        rope = step.rope_factors.contiguous() if decoder.rope[index] else None
        rope_row = 0 if rope is None or rope.shape[0] == 1 else tokens * dim
        query = torch.empty(batch, tokens, heads, dim)
        place, kept = _layer_of(cache, index, step.columns), True
        if place is None:
            keys, values = (torch.empty(batch, kv_heads, tokens, dim) for _ in range(2))
            place, kept = _layer(keys, values), False
        kind, size = TYPES[x.dtype], byref(Heads(batch, tokens, heads, kv_heads, dim))
        self._rotate(
            *(kind, size, qkv.data_ptr()),
            *((None, 0.0) if norms is None else (norms.weight.data_ptr(), norms.eps)),
            *(address(rope), rope_row, query.data_ptr(), byref(place), self.threads),
        )
        if not kept:
            cache.write(index, step.columns, keys, values)
            if step.length:
                keys, values = (part.float() for part in cache.read(index, step.length))
                place = _layer(keys, values)
        mask, causal = step.seen(decoder.windows[index])
        length, scale = step.length or tokens, decoder.attention_scale or dim**-0.5
        if tokens > 1 and dim % LANES:
            if kept:
                keys, values = cache.read(index, length)
            return attend(query.transpose(1, 2), keys, values, mask, causal, scale=scale).to(x.dtype)
        out = x.new_empty(batch, tokens, heads * dim)
        blocks = 0 if tokens == 1 else -(-length // BLOCK)
        room = torch.empty(self.threads, blocks * BLOCK * dim)
        self._attend(
            *(kind, size, query.data_ptr(), byref(place), byref(_seen(mask, causal)), length, scale),
            *(out.data_ptr(), room.data_ptr(), self.threads),
        )
        return out


def choose_operations(device: torch.device, dtype: torch.dtype, *, compile: bool = False) -> Operations:
    """compile: through torch.compile, as was asked for. Else on a CPU by the kernels that are compiled for it, where
    they can be; if not, the result's note says why."""
    if compile:
        return CompiledOperations()
    if device.type != "cpu" or dtype not in TYPES:
        return Operations()
    try:
        return CpuOperations()
    except NotCompiledError as error:
        return Operations(f"slower than it could be: {error}")


def _layer(keys: Tensor, values: Tensor) -> Cache:
    """keys, values: [batch, heads, columns, head_dim]."""
    return Cache(keys.data_ptr(), values.data_ptr(), *keys.stride()[:2])


def _layer_of(cache: KVCache, layer: int, columns: int | Tensor) -> Cache | None:
    """Where the kernels find layer ``layer`` of a cache and the columns of a pass; None where they cannot."""
    memory = cache.memory()
    if memory is None or memory[0].dtype != torch.float32:
        return None
    keys, values, rows = memory
    place = _layer(keys[layer], values[layer])
    place.rows = address(rows)
    if isinstance(columns, int):
        place.column = columns
    elif columns.ndim == 2 and columns.shape[1] == 1 and columns.is_contiguous():
        place.columns = columns.data_ptr()
    else:
        return None
    return place


def _seen(mask: Tensor | None, causal: bool) -> Seen:
    """mask: [batch or 1, 1, tokens, columns]."""
    if mask is None:
        return Seen(None, 0, 0, causal)
    row, _, token, column = mask.stride()
    assert column == 1, "a mask's columns lie side by side"
    return Seen(mask.data_ptr(), row if mask.shape[0] > 1 else 0, token if mask.shape[2] > 1 else 0, False)
