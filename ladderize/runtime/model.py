"""The one tensor-parallel Llama, for every layout: DESIGN section 2 as its forward.

Between layers the state is the residual stream, equal on all ranks, and perhaps one all-reduce in flight. Each
sub-module returns this rank's partial sum; the layout says whether its sum is waited for at once (blocking), after the
next sub-module (overlapped, Ladder Residual, arXiv 2501.06589) or left out until the next sync point (dropped, SPD,
arXiv 2502.20727).
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ladderize.layout import BLOCKING, DROPPED, Layout
from ladderize.runtime.collectives.base import Collectives, Handle
from ladderize.runtime.kv_cache import KVCache
from ladderize.runtime.layers import LayerWeights, Weights
from ladderize.runtime.shards import Shape


@dataclass(frozen=True)
class Step:
    """Where the tokens of one forward pass stand.

    rope_factors: complex [batch or 1, tokens, 1, head_dim / 2]. columns: the first cache column of the tokens, or a
    tensor of their columns: [tokens], or [batch, tokens] where rows differ. length: the columns of the cache that
    attention sees; 0: a prompt, which sees itself alone. mask: bool [batch or 1, 1, tokens, columns in view], True
    where a token may look; None: everything, or with ``causal`` everything up to itself.
    """

    rope_factors: Tensor
    columns: int | Tensor
    length: int
    mask: Tensor | None = None
    causal: bool = False


class TPLlama:
    """One rank of a Llama with a layout. Inference only; the sums go through ``collectives``.

    compile: run the sub-modules between the collectives through torch.compile.
    """

    def __init__(
        self, shape: Shape, layout: Layout, weights: Weights, collectives: Collectives, *, compile: bool = False
    ) -> None:
        self.shape, self.layout, self.weights, self.collectives = shape, layout, weights, collectives
        self.project: Callable[..., Any] = compiled(project) if compile else project
        self.mlp: Callable[..., Any] = compiled(mlp) if compile else mlp

    def forward(self, ids: Tensor, step: Step, cache: KVCache) -> Tensor:
        """ids: [batch, tokens]. Returns the normed end of the residual stream [batch, tokens, hidden], equal on all
        ranks."""
        residual = self.embed(ids)
        pending: Handle | None = None
        pending_bias: Tensor | None = None
        for index, layer in enumerate(self.weights.layers):
            attention_sync, mlp_sync = self.layout.attention_sync[index], self.layout.mlp_sync[index]

            partials = self.attention(index, layer, residual, step, cache)
            if pending is not None:  # after the compute: that is the overlap
                residual = add_bias(residual + pending.wait(), pending_bias)
                pending = None
            carry = None
            if attention_sync == DROPPED:
                carry, residual = partials, add_bias(residual, layer.o_bias)
            elif attention_sync == BLOCKING:
                residual = add_bias(residual + self.collectives.all_reduce(partials[0]), layer.o_bias)
            else:
                pending, pending_bias = self.collectives.all_reduce_async(partials[0]), layer.o_bias

            partial = self.mlp(layer, residual, carry)
            if pending is not None:
                residual = add_bias(residual + pending.wait(), pending_bias)
                pending = None
            if mlp_sync == BLOCKING:
                residual = add_bias(residual + self.collectives.all_reduce(partial), layer.down_bias)
            else:
                pending, pending_bias = self.collectives.all_reduce_async(partial), layer.down_bias
        return self.weights.norm(residual)  # the last MLP sync is blocking: nothing is pending

    def attention(self, index: int, layer: LayerWeights, x: Tensor, step: Step, cache: KVCache) -> list[Tensor]:
        """The partial sums of attention, without o_proj's bias: one, or one for each virtual rank that is computed
        apart."""
        query, key, value = self.project(layer, x, step.rope_factors, self.shape)
        cache.write(index, step.columns, key, value)
        if step.length:
            key, value = cache.read(index, step.length)
        else:
            key, value = key.to(x.dtype), value.to(x.dtype)
        heads = attend(query.to(key.dtype), key, value, step.mask, step.causal).to(x.dtype)
        if len(layer.o) == 1:
            return [layer.o[0](heads)]
        return [o(part) for o, part in zip(layer.o, heads.chunk(len(layer.o), -1), strict=True)]

    def embed(self, ids: Tensor) -> Tensor:
        """[batch, tokens] -> [batch, tokens, hidden]; each rank looks up its own part of the vocabulary."""
        table = self.weights.embed
        if self.shape.replicate_vocab:
            return F.embedding(ids, table)
        own = ids - self.shape.vocab_start
        inside = (own >= 0) & (own < self.shape.own_vocab)
        rows = F.embedding(own.clamp(0, self.shape.own_vocab - 1), table)
        return self.collectives.all_reduce(rows * inside.unsqueeze(-1))

    def logits(self, hidden: Tensor) -> Tensor:
        """[..., hidden] -> [..., vocab], equal on all ranks."""
        own = self.weights.head(hidden)
        if self.shape.replicate_vocab:
            return own
        return self.collectives.all_gather(own)[..., : self.shape.vocab]


def compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    """torch.compile for each shape anew, as often as there are shapes; what it cannot compile is an error, not a slower
    run."""
    torch._dynamo.config.recompile_limit = max(torch._dynamo.config.recompile_limit, 256)
    torch._dynamo.config.fail_on_recompile_limit_hit = True
    return torch.compile(function, dynamic=False)


def add_bias(x: Tensor, bias: Tensor | None) -> Tensor:
    return x if bias is None else x + bias


def project(layer: LayerWeights, x: Tensor, rope_factors: Tensor, shape: Shape) -> tuple[Tensor, Tensor, Tensor]:
    """Queries, keys and values [batch, own heads, tokens, head_dim], float32, of the residual stream [batch, tokens,
    hidden]."""
    fused = layer.qkv(layer.input_norm(x)).float().unflatten(-1, (-1, shape.head_dim))
    query_key, value = fused.split((shape.own_heads + shape.own_kv_heads, shape.own_kv_heads), 2)
    query, key = rotate(query_key, rope_factors).split((shape.own_heads, shape.own_kv_heads), 2)
    return query.transpose(1, 2), key.transpose(1, 2), value.transpose(1, 2)


def rotate(x: Tensor, rope_factors: Tensor) -> Tensor:
    """Rope: neighbouring pairs of x [batch, tokens, heads, head_dim] as complex numbers, times ``rope_factors``
    (RoFormer, arXiv 2104.09864)."""
    pairs = x.unflatten(-1, (-1, 2))
    if torch.compiler.is_compiling():  # inductor generates no code for complex numbers
        (a, b), (cos, sin) = pairs.unbind(-1), torch.view_as_real(rope_factors).unbind(-1)
        return torch.stack((a * cos - b * sin, a * sin + b * cos), -1).flatten(-2)
    return torch.view_as_real(torch.view_as_complex(pairs) * rope_factors).flatten(-2)


def attend(query: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None, causal: bool) -> Tensor:
    """Grouped-query attention. query: [batch, heads, tokens, head_dim]; returns [batch, tokens, heads * head_dim]."""
    batch, heads, tokens, dim = query.shape
    groups = keys.shape[1]
    if tokens == 1:
        # the queries of a KV head take the place of tokens: no key is copied, and every SDPA kernel can do it
        folded = query.reshape(batch, groups, heads // groups, dim)
        return F.scaled_dot_product_attention(folded, keys, values, attn_mask=mask).reshape(batch, 1, -1)
    if mask is not None and groups != heads:  # kernels that take a mask know no groups
        keys, values = (t.repeat_interleave(heads // groups, 1) for t in (keys, values))
    output = F.scaled_dot_product_attention(
        query, keys, values, attn_mask=mask, is_causal=causal, enable_gqa=keys.shape[1] != heads
    )
    return output.transpose(1, 2).reshape(batch, tokens, -1)


def mlp(layer: LayerWeights, residual: Tensor, carry: list[Tensor] | None) -> Tensor:
    """The partial sum of the MLP, without down_proj's bias, plus what this rank carries (SPD section 4.1: X' = X + AR(Z
    + P)).

    Each virtual rank k of this process reads residual + carry[k]; the one product with down_proj adds them all up.
    """
    if carry is None:
        return layer.down(gated(layer.gate_up[0](layer.post_norm(residual))))
    inner = [gated(gate_up(layer.post_norm(residual + own))) for gate_up, own in zip(layer.gate_up, carry, strict=True)]
    partial = layer.down(inner[0] if len(inner) == 1 else torch.cat(inner, -1))
    for own in carry:
        partial = partial + own
    return partial


def gated(gate_up: Tensor) -> Tensor:
    gate, up = gate_up.chunk(2, -1)
    return F.silu(gate) * up
