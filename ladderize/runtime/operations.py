"""The operations between a layer's products, by PyTorch: on every device, with gradients where they are wanted."""

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from ladderize.runtime.collectives.differentiable import Stream, whole
from ladderize.runtime.kv_cache import KVCache
from ladderize.runtime.layers import AttentionWeights, Linear, MlpWeights, RMSNorm
from ladderize.runtime.shards import Shape
from ladderize.runtime.step import Step


class Operations:
    """A rank's share of a layer without the products that are sent."""

    name = "torch"  # in benchmarks
    adds_in_norm = False  # whether ``norm`` adds a sum to the stream in the same kernel: then it should be left to it

    def __init__(self, note: str = "") -> None:
        self.note = note  # for the user

    def norm(self, norm: RMSNorm, x: Stream) -> Tensor:
        return norm(whole(x))

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
        """Return o_proj's input in layer ``index``, [batch, tokens, own heads * head_dim]; keys and values are cached.

        x: the residual stream [batch, tokens, hidden].
        shape, virtual: of the virtual rank that is computed, and its number among ``weights.qkv``.
        """
        x, decoder, heads, kv_heads = whole(x), shape.decoder, shape.own_heads, shape.own_kv_heads
        fused = weights.qkv[virtual](weights.norm(x)).float().unflatten(-1, (-1, shape.head_dim))
        query_key, value = fused.split((heads + kv_heads, kv_heads), 2)
        if weights.head_norms is not None:
            query_key = weights.head_norms(query_key)
        if decoder.rope[index]:
            query_key = rotate(query_key, step.rope_factors)
        query, key = query_key.split((heads, kv_heads), 2)
        query, key, value = (projected.transpose(1, 2) for projected in (query, key, value))
        cache.write(index, step.columns, key, value)
        if step.length:
            key, value = cache.read(index, step.length)
        else:
            key, value = key.to(x.dtype), value.to(x.dtype)
        seen = step.seen(decoder.windows[index])
        return attend(query.to(key.dtype), key, value, *seen, scale=decoder.attention_scale).to(x.dtype)

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
        """Return ``attention`` of the virtual ranks side by side. Rank k, of shape shapes[k], reads x + apart[k]."""
        outputs = []
        for number, (shape, partial) in enumerate(zip(shapes, apart, strict=True)):
            first, count = number * shape.own_kv_heads, shape.own_kv_heads
            kept = cache if len(apart) == 1 else cache.kv_heads(first, first + count)
            outputs.append(self.attention(weights, whole(x) + partial, step, kept, index, shape, number))
        return outputs[0] if len(outputs) == 1 else torch.cat(outputs, -1)

    def products_apart(self, linears: list[Linear], x: Tensor) -> Sequence[Tensor]:
        """Return the product of each virtual rank with its own part of x [..., the ranks' inputs side by side]."""
        return [linear(inputs) for linear, inputs in zip(linears, x.chunk(len(linears), -1), strict=True)]

    @staticmethod
    def mlp(weights: MlpWeights, x: Stream, apart: list[Tensor] | None) -> Tensor:
        """Return down_proj's input, [batch, tokens, own inner], of the virtual ranks side by side, as they read."""
        x = whole(x)
        if apart is None:
            return gated(weights.gate_up[0](weights.norm(x)))
        inner = [
            gated(gate_up(weights.norm(x + partial))) for gate_up, partial in zip(weights.gate_up, apart, strict=True)
        ]
        return inner[0] if len(inner) == 1 else torch.cat(inner, -1)


def rotate(x: Tensor, rope_factors: Tensor) -> Tensor:
    """Apply rope: multiply neighbouring pairs of x, as complex numbers, by factors (RoFormer, arXiv 2104.09864)."""
    pairs = x.unflatten(-1, (-1, 2))
    return torch.view_as_real(torch.view_as_complex(pairs) * rope_factors).flatten(-2)


def attend(
    query: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None, causal: bool, *, scale: float | None = None
) -> Tensor:
    """Return grouped-query attention, [batch, tokens, heads * head_dim], for queries [batch, heads, tokens, head_dim].
    The scale of scores is head_dim ** -0.5 where it is None."""
    batch, heads, tokens, dim = query.shape
    groups = keys.shape[1]
    if tokens == 1:
        # the queries of a KV head take the place of tokens: no key is copied, and every SDPA kernel can do it
        folded = query.reshape(batch, groups, heads // groups, dim)
        return F.scaled_dot_product_attention(folded, keys, values, attn_mask=mask, scale=scale).reshape(batch, 1, -1)
    if mask is not None and groups != heads:  # kernels that take a mask know no groups
        keys, values = (t.repeat_interleave(heads // groups, 1) for t in (keys, values))
    output = F.scaled_dot_product_attention(
        query, keys, values, attn_mask=mask, is_causal=causal, scale=scale, enable_gqa=keys.shape[1] != heads
    )
    return output.transpose(1, 2).reshape(batch, tokens, -1)


def gated(gate_up: Tensor) -> Tensor:
    gate, up = gate_up.chunk(2, -1)
    return F.silu(gate) * up
