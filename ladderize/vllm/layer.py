"""A layer of a converted model in vLLM, of any family. Its projections, attention and norms are vLLM's own.

vLLM adds the last sub-module's output to the residual stream inside the next norm. So the state between sub-modules is
``(delta, residual, pending)``: a sum that is still to be added or None, the stream, and the message in flight or None.
"""

import functools
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from vllm.config import VllmConfig
from vllm.model_executor.layers.layernorm import RMSNorm
from vllm.model_executor.layers.linear import UnquantizedLinearMethod
from vllm.model_executor.models.llama import LlamaAttention, LlamaDecoderLayer
from vllm.model_executor.models.utils import extract_layer_index

from ladderize.families.base import Decoder
from ladderize.layout import BLOCKING, DROPPED, OVERLAPPED, Layout
from ladderize.runtime.shards import virtual_ranks
from ladderize.vllm.messages import Messages


class KeptWeight(UnquantizedLinearMethod):
    """A method that keeps a weight as a plain tensor, to be sliced. On CPUs vLLM would pack it for whole products."""

    def process_weights_after_loading(self, layer: nn.Module) -> None:
        weight: Any = layer.weight
        layer.weight = nn.Parameter(weight.data, requires_grad=False)


# ---- virtual ranks: the k-th of a process owns the k-th contiguous part of its heads and intermediate rows ----


def row_parallel(count: int, projection: Any, inputs: Tensor) -> Tensor:
    """Return each virtual rank's product of its part of ``inputs`` [tokens, in], without bias: [count, tokens, out]."""
    parts = inputs.unflatten(1, (count, -1)).transpose(0, 1)
    return torch.bmm(parts, projection.weight.unflatten(1, (count, -1)).permute(1, 2, 0))


def column_parallel(count: int, projection: Any, inputs: Tensor) -> Tensor:
    """Return each virtual rank's gate and up, side by side: [count, tokens, 2 * intermediate / count].

    projection: vLLM's merged gate_up_proj.
    inputs: each virtual rank's own, [count, tokens, hidden].
    """
    parts = []
    biases = (None, None) if projection.bias is None else projection.bias.chunk(2)
    for weight, bias in zip(projection.weight.chunk(2), biases, strict=True):
        part = torch.bmm(inputs, weight.unflatten(0, (count, -1)).transpose(1, 2))
        parts.append(part if bias is None else part + bias.view(count, 1, -1))
    return torch.cat(parts, -1)


class Pending(NamedTuple):
    """A message [tokens, hidden] in flight.

    value: the partial that was sent, or the sum if it has ``arrived``.
    """

    value: Tensor
    arrived: bool = False


def total_of(messages: Messages, pending: Pending, made: Tensor) -> Tensor:
    """Return the sum of a message, and wait for it if it has not arrived.

    made: a result that was computed since the message was sent.
    """
    return pending.value if pending.arrived else messages.wait(pending.value, made)


class FamilyAttention(LlamaAttention):
    """vLLM's attention of a Llama with the additions of ``decoder``: norms of heads, layers without rope, a scale of
    scores.

    vLLM itself finds the windows in the config.

    heads_only: leave out o_proj; the layer multiplies by its slices.
    """

    def __init__(
        self, decoder: Decoder, heads_only: bool, *, bias: bool, bias_o_proj: bool, prefix: str, **arguments: Any
    ) -> None:
        self.decoder, self.heads_only, self.rotates = decoder, heads_only, decoder.rope[extract_layer_index(prefix)]
        super().__init__(bias=decoder.qkv_bias, bias_o_proj=decoder.o_bias, prefix=prefix, **arguments)
        if decoder.head_norms:
            eps = arguments["config"].rms_norm_eps
            self.q_norm, self.k_norm = RMSNorm(self.head_dim, eps=eps), RMSNorm(self.head_dim, eps=eps)

    @property
    def scaling(self) -> float:
        """The scale of scores, which vLLM's constructor reads."""
        scale = self.decoder.attention_scale
        return self.head_dim**-0.5 if scale is None else scale

    @scaling.setter
    def scaling(self, value: float) -> None:
        """Ignore the scale that vLLM's constructor sets: it is a Llama's, and not every family's."""

    def forward(self, positions: Tensor, hidden_states: Tensor) -> Tensor:
        qkv, _ = self.qkv_proj(hidden_states)
        q, k, v = qkv.split([self.q_size, self.kv_size, self.kv_size], dim=-1)
        if self.decoder.head_norms:
            q = self.q_norm(q.view(*q.shape[:-1], -1, self.head_dim)).view(q.shape)
            k = self.k_norm(k.view(*k.shape[:-1], -1, self.head_dim)).view(k.shape)
        if self.rotates:
            q, k = self.rotary_emb(positions, q, k)
        heads = self.attn(q, k, v)
        return heads if self.heads_only else self.o_proj(heads)[0]


class LadderizedDecoderLayer(LlamaDecoderLayer):
    """One layer with the sync points that ``layout`` gives it. A wholly blocking one runs vLLM's own forward."""

    def __init__(
        self, layout: Layout, decoder: Decoder, messages: Messages, vllm_config: VllmConfig, prefix: str = ""
    ) -> None:
        layer = extract_layer_index(prefix)
        attention, mlp = layout.attention_sync[layer], layout.mlp_sync[layer]
        virtual = virtual_ranks(layout, layer, vllm_config.parallel_config.tensor_parallel_size).o
        attention_class: Any = functools.partial(FamilyAttention, decoder, virtual > 1)
        super().__init__(vllm_config, prefix, attn_layer_type=attention_class)
        self.messages, self.scale = messages, decoder.residual_scale
        self.attention_sync, self.mlp_sync = attention, mlp
        # vLLM's projection sums by itself only where nothing must come before the sum: a message in flight is waited
        # for first, and a dropped partial is added to the MLP's.
        free = attention == BLOCKING and not messages.emulated
        self.attention_sums = free and layout.entering(layer) == BLOCKING
        self.mlp_sums = free and mlp == BLOCKING
        self.stock = self.attention_sums and self.mlp_sums and self.scale == 1
        self.self_attn.o_proj.reduce_results = self.attention_sums
        self.mlp.down_proj.reduce_results = self.mlp_sums
        # the bias belongs to no rank: where no sum follows, this layer adds it to the stream
        self.self_attn.o_proj.skip_bias_add = attention == DROPPED
        self.virtual = virtual
        if virtual > 1:  # then verify.py refuses quantised weights and adapters
            self.self_attn.o_proj.quant_method = self.mlp.gate_up_proj.quant_method = KeptWeight()

    def forward(
        self, positions: Tensor, delta: Tensor | None, residual: Tensor, pending: Pending | None
    ) -> tuple[Tensor | None, Tensor, Pending | None]:
        """Return the new (delta, residual, pending).

        positions: [tokens].
        delta, residual: [tokens, hidden].
        """
        if self.stock:
            first = (residual, None) if delta is None else (delta, residual)
            return *super().forward(positions, *first), None
        x, residual = read(self.input_layernorm, delta, residual)
        made = self.self_attn(positions=positions, hidden_states=x)
        made = self.scaled(made) if self.virtual == 1 else made
        if self.attention_sync == DROPPED:
            partial, residual = self.dropped(made, residual, pending)
            return self.sync(self.mlp_sync, self.mlp_sums, partial, residual, None)
        delta, residual, pending = self.sync(self.attention_sync, self.attention_sums, made, residual, pending)
        x, residual = read(self.post_attention_layernorm, delta, residual)
        return self.sync(self.mlp_sync, self.mlp_sums, self.scaled(self.mlp(x)), residual, pending)

    def scaled(self, added: Tensor) -> Tensor:
        """Return a part that is added to the stream, times the family's factor."""
        return added if self.scale == 1 else added * self.scale

    def sync(
        self, mode: str, summed: bool, partial: Tensor, residual: Tensor, pending: Pending | None
    ) -> tuple[Tensor | None, Tensor, Pending | None]:
        """Run a sync point: wait for the message in flight, then sum ``partial`` or send it. Return (delta, residual,
        pending).

        summed: True if ``partial`` is a sum already.
        """
        total = None if pending is None else total_of(self.messages, pending, partial)
        if mode == OVERLAPPED:
            self.messages.start(partial, residual)
            return total, residual, Pending(partial)
        delta = partial if summed else self.messages.all_reduce(partial)
        return delta if total is None else delta + total, residual, None

    def dropped(self, made: Tensor, residual: Tensor, pending: Pending | None) -> tuple[Tensor, Tensor]:
        """Return the partial of the MLP's sync point in SPD's block, and the stream with o_proj's bias.

        Each rank's MLP reads the stream and its own partial of attention, which is then added to the MLP's.

        made: attention's partial [tokens, hidden], scaled, or with several virtual ranks the output of its heads.
        """
        o_proj, norm, mlp = self.self_attn.o_proj, self.post_attention_layernorm, self.mlp
        carry = made if self.virtual == 1 else self.scaled(row_parallel(self.virtual, o_proj, made))
        if pending is not None:
            residual = residual + total_of(self.messages, pending, carry)
        if (bias := getattr(o_proj, "base_layer", o_proj).bias) is not None:  # vLLM's LoRA wraps projections
            residual = residual + self.scaled(bias)
        if self.virtual == 1:
            return self.scaled(mlp(norm(residual + carry))) + carry, residual
        x = norm((residual + carry).flatten(0, 1)).view_as(carry)
        rows = mlp.act_fn(column_parallel(self.virtual, mlp.gate_up_proj, x))
        # down_proj reads the virtual ranks' parts side by side, so its product is their sum
        return self.scaled(mlp.down_proj(rows.transpose(0, 1).flatten(1))[0]) + carry.sum(0), residual


def read(norm: RMSNorm, delta: Tensor | None, residual: Tensor) -> tuple[Tensor, Tensor]:
    """Return the normed stream, which a sub-module reads, and the stream, both with ``delta`` added."""
    return (norm(residual), residual) if delta is None else norm(delta, residual)
