"""Converted models of every family for vLLM: its own Llama with our layers, which have each family's additions.

Loading, attention, quantisation, LoRA, sampling and speculation stay vLLM's.
"""

import functools
from typing import Any

from torch import Tensor, nn
from vllm.config import VllmConfig
from vllm.model_executor.layers.logits_processor import LogitsProcessor
from vllm.model_executor.models.llama import LlamaForCausalLM, LlamaModel
from vllm.sequence import IntermediateTensors

from ladderize.vllm.layer import LadderizedDecoderLayer
from ladderize.vllm.messages import Messages, Pending
from ladderize.vllm.verify import decoder_of_model, layout_of


class LadderizedModel(LlamaModel):
    """The layers between embedding and last norm."""

    def __init__(self, *, vllm_config: VllmConfig, prefix: str = "") -> None:
        layout = layout_of(vllm_config)
        messages = Messages(f"{prefix}.messages", vllm_config)
        decoder = decoder_of_model(vllm_config)
        layer = functools.partial(LadderizedDecoderLayer, layout, decoder, messages)
        super().__init__(vllm_config=vllm_config, prefix=prefix, layer_type=layer)
        self.messages, self.embedding_scale = messages, decoder.embedding_scale

    def forward(
        self,
        input_ids: Tensor | None,
        positions: Tensor,
        intermediate_tensors: IntermediateTensors | None,
        inputs_embeds: Tensor | None = None,
    ) -> Tensor | tuple[Tensor, list[Tensor]]:
        """Return the normed stream [tokens, hidden], with the streams that a drafter asked for.

        input_ids, positions: [tokens].
        intermediate_tensors: of a pipeline, which verify.py refuses.
        """
        residual = self.embed_input_ids(input_ids) if inputs_embeds is None else inputs_embeds
        residual = residual if self.embedding_scale == 1 else residual * self.embedding_scale
        delta: Tensor | None = None
        pending: Pending | None = None
        ahead: Tensor | None = None
        streams: list[Tensor] = []
        self._maybe_add_hidden_state(streams, 0, residual, None)
        for index, layer in enumerate(self.layers, 1):
            delta, residual, pending, ahead = layer(positions, delta, residual, pending, ahead)
            if index in self.aux_hidden_state_layers:  # the whole stream is read: what is in flight is waited for early
                if pending is not None:
                    total = self.messages.wait(pending, residual)
                    pending = Pending(total, total, arrived=True)
                terms = [term for term in (delta, pending and pending.total) if term is not None]
                streams.append(sum(terms, residual))
        hidden_states, _ = self.norm(delta, residual)
        return (hidden_states, streams) if streams else hidden_states


class LadderizedForCausalLM(LlamaForCausalLM):
    """The architecture that a converted checkpoint names, of every family."""

    def __init__(self, *, vllm_config: VllmConfig, prefix: str = "") -> None:
        super().__init__(vllm_config=vllm_config, prefix=prefix)
        scale = decoder_of_model(vllm_config).logits_scale
        if scale != 1:
            self.logits_processor = LogitsProcessor(self.config.vocab_size, scale=scale)

    def _init_model(self, vllm_config: VllmConfig, prefix: str = "", layer_type: type[nn.Module] | None = None) -> Any:
        return LadderizedModel(vllm_config=vllm_config, prefix=prefix)
