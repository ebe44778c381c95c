"""The operations between a layer's products, by PyTorch: on every device, with gradients where they are wanted."""

from collections.abc import Iterator, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from ladderize.families.base import GELU
from ladderize.runtime.collectives.differentiable import Stream, whole
from ladderize.runtime.kv_cache import KVCache
from ladderize.runtime.layers import Linear, RMSNorm, Sublayer
from ladderize.runtime.step import Step

Apart = list[Tensor] | None


class Operations:
    """A rank's share of a layer without the products that are sent."""

    name = "torch"  # in benchmarks
    adds_in_norm = False  # whether ``norm`` adds a sum to the stream in the same kernel: then it should be left to it

    def __init__(self, note: str = "") -> None:
        self.note = note  # for the user

    def norm(self, norm: RMSNorm | None, x: Stream) -> Tensor:
        return whole(x) if norm is None else norm(whole(x))

    def product(self, linear: Linear, x: Tensor) -> Tensor:
        return linear(x)

    def attention(self, weights: Sublayer, x: Stream, apart: Apart, step: Step, cache: KVCache) -> Tensor:
        """Return o_proj's input, [batch, tokens, own heads * head_dim], of the virtual ranks side by side; keys and
        values are cached. x: the residual stream [batch, tokens, hidden]. apart: what each virtual rank reads beside x;
        None: all read x alike."""
        kv_heads, outputs = weights.shape.own_kv_heads, []
        for rank, (linear, read) in enumerate(self.inputs(weights, x, apart)):
            kept = cache.kv_heads(rank * kv_heads, (rank + 1) * kv_heads)
            outputs.append(self.attend_projected(weights, self.product(linear, read), step, kept))
        return outputs[0] if len(outputs) == 1 else torch.cat(outputs, -1)

    def inputs(self, weights: Sublayer, x: Stream, apart: Apart) -> Iterator[tuple[Linear, Tensor]]:
        """Yield each virtual rank's first projection with the normed stream that it reads."""
        x = whole(x)
        reads = [x] if apart is None else [x + partial for partial in apart]
        for linear, read in zip(weights.column_parallel, reads, strict=apart is not None):
            yield linear, self.norm(weights.norm, read)

    def attend_projected(self, weights: Sublayer, qkv: Tensor, step: Step, cache: KVCache) -> Tensor:
        """Return the attention of one virtual rank for qkv [batch, tokens, (heads + 2 * KV heads) * head_dim]."""
        shape, dtype = weights.shape, qkv.dtype
        decoder, heads, kv_heads = shape.decoder, shape.own_heads, shape.own_kv_heads
        query_key, value = qkv.float().unflatten(-1, (-1, shape.head_dim)).split((heads + kv_heads, kv_heads), 2)
        if weights.head_norms is not None:
            query_key = norm_heads(query_key, weights.head_norms, shape.eps)
        factors = step.rotation(decoder, weights.layer)
        if factors is not None:
            query_key = rotate(query_key, factors)
        query, key = query_key.split((heads, kv_heads), 2)
        query, key, value = (projected.transpose(1, 2) for projected in (query, key, value))
        cache.write(weights.layer, step.columns, key, value)
        if step.length:
            key, value = cache.read(weights.layer, step.length)
        else:
            key, value = key.to(dtype), value.to(dtype)
        seen = step.seen(decoder.windows[weights.layer])
        return attend(query.to(key.dtype), key, value, *seen, scale=decoder.attention_scale).to(dtype)

    def products_apart(self, linears: list[Linear], x: Tensor) -> Sequence[Tensor]:
        """Return the product of each virtual rank with its own part of x [..., the ranks' inputs side by side]."""
        return [self.product(linear, inputs) for linear, inputs in zip(linears, x.chunk(len(linears), -1), strict=True)]

    def mlp(self, weights: Sublayer, x: Stream, apart: Apart) -> Tensor:
        """Return down_proj's input, [batch, tokens, own inner], of the virtual ranks side by side, as ``attention``."""
        activation = weights.shape.decoder.activation
        inner = [self.gated_product(linear, read, activation) for linear, read in self.inputs(weights, x, apart)]
        return inner[0] if len(inner) == 1 else torch.cat(inner, -1)

    def gated_product(self, linear: Linear, x: Tensor, activation: str) -> Tensor:
        """Return activation(gate) * up of x [..., in], where gate's weight and up's are one, [2 * inner, in]."""
        return self.gated(self.product(linear, x), activation)

    def gated(self, gate_up: Tensor, activation: str) -> Tensor:
        """Return activation(gate) * up, [..., inner], of both side by side, [..., 2 * inner]."""
        gate, up = gate_up.chunk(2, -1)
        return (F.gelu(gate, approximate="tanh") if activation == GELU else F.silu(gate)) * up


def norm_heads(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Return the RMSNorm of each head, float32 [..., heads, head_dim]; ``weight``: [heads, head_dim]."""
    size = x.shape[-1]
    if x.device.type != "cpu":
        return F.rms_norm(x, (size,), None, eps) * weight
    return F.layer_norm(torch.cat((x, -x), -1), (2 * size,), eps=eps)[..., :size] * weight  # as in RMSNorm


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
