"""Converted models of every family for vLLM: its own Llama with our layers, which have each family's additions.

Loading, attention, quantisation, LoRA, sampling and speculation stay vLLM's.
"""

import functools
from itertools import islice
from typing import Any

from torch import Tensor, nn
from vllm.config import VllmConfig
from vllm.distributed import get_pp_group
from vllm.model_executor.layers.logits_processor import LogitsProcessor
from vllm.model_executor.models.llama import LlamaForCausalLM, LlamaModel
from vllm.model_executor.models.utils import make_empty_intermediate_tensors_factory
from vllm.sequence import IntermediateTensors

from ladderize.layout import BLOCKING, OVERLAPPED, Layout
from ladderize.vllm.layer import LadderizedDecoderLayer, Pending, total_of
from ladderize.vllm.messages import Messages
from ladderize.vllm.verify import decoder_of_model, layout_of


class LadderizedModel(LlamaModel):
    """The layers between embedding and last norm, or those of this stage of a pipeline."""

    def __init__(self, *, vllm_config: VllmConfig, prefix: str = "") -> None:
        layout = layout_of(vllm_config)
        messages = Messages(f"{prefix}.messages", vllm_config)
        decoder = decoder_of_model(vllm_config)
        layer = functools.partial(LadderizedDecoderLayer, layout, decoder, messages)
        super().__init__(vllm_config=vllm_config, prefix=prefix, layer_type=layer)
        self.messages, self.embedding_scale = messages, decoder.embedding_scale
        self.entering = handed_on(layout, self.start_layer)
        self.make_empty_intermediate_tensors = make_empty_intermediate_tensors_factory(
            self.entering, self.config.hidden_size
        )

    def forward(
        self,
        input_ids: Tensor | None,
        positions: Tensor,
        intermediate_tensors: IntermediateTensors | None,
        inputs_embeds: Tensor | None = None,
    ) -> Tensor | IntermediateTensors | tuple[Tensor, list[Tensor]]:
        """Return the normed stream [tokens, hidden], with the streams that a drafter asked for, or the next stage's
        input.

        The latter is for a pipeline.

        input_ids, positions: [tokens].
        """
        pending: Pending | None = None
        if get_pp_group().is_first_rank:
            delta, residual = None, self.embed_input_ids(input_ids) if inputs_embeds is None else inputs_embeds
            residual = residual if self.embedding_scale == 1 else residual * self.embedding_scale
        else:
            assert intermediate_tensors is not None
            residual = intermediate_tensors["residual"]
            delta = intermediate_tensors["hidden_states"] if "hidden_states" in self.entering else None
            pending = Pending(intermediate_tensors["pending"], True) if "pending" in self.entering else None
        remote = self.collect_remote_aux_hidden_states(intermediate_tensors)
        streams: list[Tensor] = []
        if get_pp_group().is_first_rank:
            self._maybe_add_hidden_state(streams, self.start_layer, residual, None)
        for index, layer in enumerate(islice(self.layers, self.start_layer, self.end_layer), self.start_layer + 1):
            delta, residual, pending = layer(positions, delta, residual, pending)
            if index in self.aux_hidden_state_layers:
                pending = self.arrived(pending, residual)
                parts = [part for part in (delta, pending and pending.value) if part is not None]
                streams.append(sum(parts, residual))
        if not get_pp_group().is_last_rank:
            pending = self.arrived(pending, residual)
            handed = {"residual": residual, "hidden_states": delta, "pending": pending and pending.value}
            return IntermediateTensors(
                {name: tensor for name, tensor in handed.items() if tensor is not None}
                | self.pack_local_aux_hidden_states(streams)
            )
        hidden_states, _ = self.norm(delta, residual)
        streams = remote + streams
        return (hidden_states, streams) if streams else hidden_states

    def arrived(self, pending: Pending | None, made: Tensor) -> Pending | None:
        """Wait for ``pending`` early, where the whole stream is read; return it with its sum."""
        return pending and Pending(total_of(self.messages, pending, made), True)


def handed_on(layout: Layout, layer: int) -> list[str]:
    """Return the names of the tensors for the pipeline's stage that begins with ``layer``.

    They are the stream, the sum that is still to be added to it, and the sum that ``layer``'s attention must not see
    yet.
    """
    before = layer - 1
    if layer == 0 or layout.mlp_sync[before] == BLOCKING:
        return ["residual", "hidden_states"]
    earlier = layout.attention_sync[before] == OVERLAPPED  # its sum arrived while the MLP computed
    return ["residual", *(["hidden_states"] if earlier else []), "pending"]


class LadderizedForCausalLM(LlamaForCausalLM):
    """The architecture that a converted checkpoint names, of every family."""

    def __init__(self, *, vllm_config: VllmConfig, prefix: str = "") -> None:
        super().__init__(vllm_config=vllm_config, prefix=prefix)
        scale = decoder_of_model(vllm_config).logits_scale
        if scale != 1 and get_pp_group().is_last_rank:
            self.logits_processor = LogitsProcessor(self.config.vocab_size, scale=scale)

    def _init_model(self, vllm_config: VllmConfig, prefix: str = "", layer_type: type[nn.Module] | None = None) -> Any:
        return LadderizedModel(vllm_config=vllm_config, prefix=prefix)
