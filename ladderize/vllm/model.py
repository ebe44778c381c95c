"""Converted models of every family for vLLM: its own Llama with our layers. Loading, projections, attention, norms,
quantisation, LoRA, sampling and speculation stay vLLM's.

vLLM adds the last sub-module's output to the residual stream inside the next norm. So the state between sub-modules is
``(delta, residual, pending, ahead)``: a sum that is still to be added, the stream, the message in flight, and what this
rank, or each of its virtual ranks, reads beside the stream; all but the stream may be None.
"""

import copy
import functools
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from vllm.config import VllmConfig
from vllm.model_executor.layers.activation import GeluAndMul
from vllm.model_executor.layers.layernorm import GemmaRMSNorm, RMSNorm
from vllm.model_executor.layers.linear import UnquantizedLinearMethod
from vllm.model_executor.layers.logits_processor import LogitsProcessor
from vllm.model_executor.layers.rotary_embedding import get_rope
from vllm.model_executor.models.llama import LlamaAttention, LlamaDecoderLayer, LlamaForCausalLM, LlamaModel
from vllm.model_executor.models.utils import extract_layer_index
from vllm.sequence import IntermediateTensors

from ladderize.families.base import GELU, LLAMAS_NORMS, SILU, Decoder
from ladderize.layout import APART, BLOCKING, DROPPED, HIDING, Layout
from ladderize.runtime.shards import virtual_ranks
from ladderize.vllm.messages import Messages, Pending
from ladderize.vllm.verify import decoder_of_model, layout_of


class KeptWeight(UnquantizedLinearMethod):
    """A method that keeps a weight as a plain tensor, to be sliced. On CPUs vLLM would pack it for whole products."""

    def process_weights_after_loading(self, layer: nn.Module) -> None:
        weight: Any = layer.weight
        layer.weight = nn.Parameter(weight.data, requires_grad=False)


# virtual ranks: the k-th of a process owns the k-th contiguous part of its heads and intermediate rows


def row_parallel(count: int, projection: Any, inputs: Tensor) -> Tensor:
    """Return each virtual rank's product of its part of ``inputs`` [tokens, in], without bias: [count, tokens, out]."""
    slices = inputs.unflatten(1, (count, -1)).transpose(0, 1)
    return torch.bmm(slices, projection.weight.unflatten(1, (count, -1)).permute(1, 2, 0))


def column_parallel(projection: Any, sizes: Sequence[int], inputs: Tensor) -> list[Tensor]:
    """Return each virtual rank's part of the projections that vLLM merged into one: [count, tokens, size / count] each,
    with inputs of their own [count, tokens, hidden]. sizes: of the projections' outputs on this process."""
    count, products = len(inputs), []
    biases = [None] * len(sizes) if projection.bias is None else projection.bias.split(sizes)
    for weight, bias in zip(projection.weight.split(sizes), biases, strict=True):
        product = torch.bmm(inputs, weight.unflatten(0, (count, -1)).transpose(1, 2))
        products.append(product if bias is None else product + bias.view(count, 1, -1))
    return products


def beside_each_other(outputs: Tensor) -> Tensor:
    """Return the virtual ranks' parts [count, tokens, width] as [tokens, count * width]."""
    return outputs.transpose(0, 1).flatten(1)


# what families have beside a Llama


def make_norm(decoder: Decoder, size: int, config: Any) -> Any:
    kind = GemmaRMSNorm if decoder.norm_offset else RMSNorm  # the offset of Gemma's is 1
    return kind(size, eps=config.rms_norm_eps)


def behind(norm: Any, total: Tensor) -> Tensor:
    """Return what a sum adds to the stream: normed, where a norm comes behind it."""
    return total if norm is None else norm(total)


def config_of_layer(config: Any, rope: str | None) -> Any:
    """Return the config of which vLLM makes a Llama's layer: with one rotation, and an activation that it has."""
    config = copy.copy(config)
    config.rope_parameters = config.rope_parameters.get(rope, config.rope_parameters)
    config.hidden_act = SILU
    return config


class FamilyAttention(LlamaAttention):
    """vLLM's attention with the additions of ``decoder``: norms of heads, layers without rope, a scale of scores. The
    input may be apart for each virtual rank, [count, tokens, hidden]. heads_only: leave out o_proj; the layer
    multiplies by its slices."""

    def __init__(
        self, decoder: Decoder, heads_only: bool, *, bias: bool, bias_o_proj: bool, prefix: str, **arguments: Any
    ) -> None:
        self.decoder, self.heads_only, self.rotates = decoder, heads_only, decoder.rope[extract_layer_index(prefix)]
        super().__init__(bias=decoder.qkv_bias, bias_o_proj=decoder.o_bias, prefix=prefix, **arguments)
        if decoder.head_norms:
            self.q_norm = make_norm(decoder, self.head_dim, arguments["config"])
            self.k_norm = make_norm(decoder, self.head_dim, arguments["config"])

    def _init_rotary_emb(self, config: Any, quant_config: Any) -> None:
        self.rotary_emb = get_rope(
            self.head_dim,
            max_position=self.max_position_embeddings,
            rope_parameters=config.rope_parameters,
            is_neox_style=not self.decoder.interleaved,
        )

    @property
    def scaling(self) -> float:
        scale = self.decoder.attention_scale
        return self.head_dim**-0.5 if scale is None else scale

    @scaling.setter
    def scaling(self, value: float) -> None:
        """Ignore the scale that vLLM's constructor sets, which is a Llama's; it reads the family's."""

    def forward(self, positions: Tensor, hidden_states: Tensor) -> Tensor:
        sizes = [self.q_size, self.kv_size, self.kv_size]
        if hidden_states.ndim == 3:
            q, k, v = map(beside_each_other, column_parallel(self.qkv_proj, sizes, hidden_states))
        else:
            q, k, v = self.qkv_proj(hidden_states)[0].split(sizes, dim=-1)
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
        virtual = virtual_ranks(layout, layer, vllm_config.parallel_config.tensor_parallel_size)
        attention_class: Any = functools.partial(FamilyAttention, decoder, virtual.o > 1)
        config = config_of_layer(vllm_config.model_config.hf_config, decoder.rope[layer])
        super().__init__(vllm_config, prefix, config, attn_layer_type=attention_class)
        if decoder.activation == GELU:
            self.mlp.act_fn = GeluAndMul(approximate="tanh")
        for name in filter(None, LLAMAS_NORMS):  # those of the family take their place
            delattr(self, name)
        for name in filter(None, decoder.norms):
            setattr(self, name, make_norm(decoder, config.hidden_size, config))
        self.messages, self.scale, self.norms = messages, decoder.residual_scale, decoder.norms
        self.attention_sync, self.mlp_sync, self.virtual = attention, mlp, virtual
        # vLLM's projection sums by itself only where nothing must come before the sum: a message in flight is waited
        # for first, and a dropped partial is added to the MLP's.
        free = attention == BLOCKING and not messages.emulated
        self.attention_sums = free and layout.entering(layer) == BLOCKING
        self.mlp_sums = free and mlp == BLOCKING
        self.stock = self.attention_sums and self.mlp_sums and self.scale == 1 and not decoder.norms_sums
        own_attention, own_mlp = self.self_attn, self.mlp
        own_attention.o_proj.reduce_results = self.attention_sums
        own_mlp.down_proj.reduce_results = self.mlp_sums
        # the bias belongs to no rank: where a partial is read before it is summed, this layer adds it to the stream
        own_attention.o_proj.skip_bias_add = attention in APART
        own_mlp.down_proj.skip_bias_add = mlp in APART
        # verify.py refuses quantised weights and adapters where weights are sliced
        cut: list[Any] = [own_attention.qkv_proj, own_attention.o_proj, own_mlp.gate_up_proj, own_mlp.down_proj]
        for projection, count in zip(cut, virtual, strict=True):
            if count > 1:
                projection.quant_method = KeptWeight()

    def forward(
        self, positions: Tensor, delta: Tensor | None, residual: Tensor, pending: Pending | None, ahead: Tensor | None
    ) -> tuple[Tensor | None, Tensor, Pending | None, Tensor | None]:
        """Return the new (delta, residual, pending, ahead).

        positions: [tokens].
        delta, residual: [tokens, hidden].
        ahead: [tokens, hidden], or of several virtual ranks [count, tokens, hidden].
        """
        if self.stock:
            first = (residual, None) if delta is None else (delta, residual)
            return *super().forward(positions, *first), None, None
        o_proj, down_proj, several = self.self_attn.o_proj, self.mlp.down_proj, self.virtual
        norms: list[Any] = [name and getattr(self, name) for name in self.norms]
        before_attention, behind_attention, before_mlp, behind_mlp = norms
        x, residual = read(before_attention, delta, residual, ahead)
        made = self.self_attn(positions=positions, hidden_states=x)
        partial = self.scaled(made if several.o == 1 else row_parallel(several.o, o_proj, made))
        mode = self.attention_sync
        delta, residual, pending, ahead = self.sync(
            mode, self.attention_sums, partial, residual, pending, o_proj, behind_attention
        )
        x, residual = read(before_mlp, delta, residual, ahead)
        made = self.mlp(x) if max(several.gate_up, several.down) == 1 else self.sliced_mlp(x)
        partial = self.scaled(made)
        if mode == DROPPED and ahead is not None:  # attention's partial is summed with the MLP's
            partial = partial + (ahead if ahead.ndim == partial.ndim else ahead.sum(0))
        return self.sync(self.mlp_sync, self.mlp_sums, partial, residual, pending, down_proj, behind_mlp)

    def scaled(self, added: Tensor) -> Tensor:
        return added if self.scale == 1 else added * self.scale

    def sliced_mlp(self, x: Tensor) -> Tensor:
        """Return the MLP's product with several virtual ranks in this process, and without down_proj's bias if it is
        delayed. x and the product: [tokens, hidden], or where the ranks' are apart [count, tokens, hidden]."""
        mlp, projection = self.mlp, self.mlp.gate_up_proj
        if x.ndim == 3:
            sizes = [projection.weight.shape[0] // 2] * 2
            rows = beside_each_other(mlp.act_fn(torch.cat(column_parallel(projection, sizes, x), -1)))
        else:
            rows = mlp.act_fn(projection(x)[0])
        if self.virtual.down > 1:
            return row_parallel(self.virtual.down, mlp.down_proj, rows)
        product: Tensor = mlp.down_proj(rows)[0]  # it reads the virtual ranks' parts side by side: their sum
        return product

    def sync(
        self,
        mode: str,
        summed: bool,
        partial: Tensor,
        residual: Tensor,
        pending: Pending | None,
        projection: Any,
        norm: Any,
    ) -> tuple[Tensor | None, Tensor, Pending | None, Tensor | None]:
        """Run a sync point: wait for the message in flight, then sum ``partial`` (unless it is ``summed``), send it or
        keep it. norm: the one behind the sum, or None. Return (delta, residual, pending, ahead)."""
        bias = getattr(projection, "base_layer", projection).bias  # vLLM's LoRA wraps projections
        if mode in APART and bias is not None:
            residual = residual + self.scaled(bias)
        message = None
        if mode in HIDING:
            message = self.messages.prepare(partial if partial.ndim == 2 else partial.sum(0), norm)
        total = None if pending is None else self.messages.wait(pending, partial)
        if message is not None:  # right behind the wait: one cut of vLLM's graph
            self.messages.start(message, residual)
        if pending is not None and total is not None:
            total = behind(pending.norm, total)
        if message is not None:
            return total, residual, message, partial if mode in APART else None
        if mode == DROPPED:
            return total, residual, None, partial
        delta = behind(norm, partial if summed else self.messages.all_reduce(partial))
        return delta if total is None else delta + total, residual, None, None


def read(norm: Any, delta: Tensor | None, residual: Tensor, ahead: Tensor | None) -> tuple[Tensor, Tensor]:
    """Return what a sub-module reads, the normed stream with ``ahead``, and the stream; both with ``delta`` added.
    norm: None where a family has none before its sub-modules."""
    if ahead is None and norm is not None:
        return (norm(residual), residual) if delta is None else norm(delta, residual)
    residual = residual if delta is None else residual + delta
    if ahead is None:
        return residual, residual
    streams = residual + ahead
    return norm(streams.flatten(0, -2)).view_as(streams), residual


class LadderizedModel(LlamaModel):
    def __init__(self, *, vllm_config: VllmConfig, prefix: str = "") -> None:
        layout = layout_of(vllm_config)
        messages = Messages(f"{prefix}.messages", vllm_config)
        decoder = decoder_of_model(vllm_config)
        layer = functools.partial(LadderizedDecoderLayer, layout, decoder, messages)
        super().__init__(vllm_config=vllm_config, prefix=prefix, layer_type=layer)
        self.norm = make_norm(decoder, self.config.hidden_size, self.config)
        self.messages, self.embedding_scale, self.scales_rows = messages, decoder.embedding_scale, decoder.rounds_scale
        if decoder.rounds_scale:
            self.embedding_scale = torch.tensor(decoder.embedding_scale, dtype=vllm_config.model_config.dtype).item()

    def embed_input_ids(self, input_ids: Tensor | None) -> Tensor:
        """Return the rows of the embedding, times a factor that is rounded: embeddings that somebody hands in have it,
        too."""
        rows: Tensor = super().embed_input_ids(input_ids)
        return rows * self.embedding_scale if self.scales_rows else rows

    def forward(
        self,
        input_ids: Tensor | None,
        positions: Tensor,
        intermediate_tensors: IntermediateTensors | None,
        inputs_embeds: Tensor | None = None,
    ) -> Tensor | tuple[Tensor, list[Tensor]]:
        """Return the normed stream [tokens, hidden], with the streams that a drafter asked for. verify.py refuses
        pipelines, whose are ``intermediate_tensors``."""
        residual = self.embed_input_ids(input_ids) if inputs_embeds is None else inputs_embeds
        if self.embedding_scale != 1 and not self.scales_rows:
            residual = residual * self.embedding_scale
        delta: Tensor | None = None
        pending: Pending | None = None
        ahead: Tensor | None = None
        streams: list[Tensor] = []
        self._maybe_add_hidden_state(streams, 0, residual, None)
        for index, layer in enumerate(self.layers, 1):
            delta, residual, pending, ahead = layer(positions, delta, residual, pending, ahead)
            if index in self.aux_hidden_state_layers:  # the whole stream is read: what is in flight is waited for early
                if pending is not None:
                    total = behind(pending.norm, self.messages.wait(pending, residual))
                    pending = Pending(total, total, arrived=True)
                terms = [term for term in (delta, pending and pending.total) if term is not None]
                streams.append(sum(terms, residual))
        hidden_states, _ = self.norm(delta, residual)
        return (hidden_states, streams) if streams else hidden_states


class LadderizedForCausalLM(LlamaForCausalLM):
    """The architecture that a converted checkpoint names, of every family."""

    def __init__(self, *, vllm_config: VllmConfig, prefix: str = "") -> None:
        super().__init__(vllm_config=vllm_config, prefix=prefix)
        decoder = decoder_of_model(vllm_config)
        if decoder.logits_scale != 1:
            self.logits_processor = LogitsProcessor(self.config.vocab_size, scale=decoder.logits_scale)
        # an adapter's matrices are those of whole projections, as on disk
        fused = {name.rpartition(".")[2]: [name.rpartition(".")[2]] for name in decoder.fused}
        self.packed_modules_mapping = LlamaForCausalLM.packed_modules_mapping | fused

    def _init_model(self, vllm_config: VllmConfig, prefix: str = "", layer_type: type[nn.Module] | None = None) -> Any:
        return LadderizedModel(vllm_config=vllm_config, prefix=prefix)
