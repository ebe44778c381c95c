"""The layers of a Hugging Face model in training whose sub-modules' outputs are compared with a teacher's."""

from typing import Any

from ladderize.convert.remote_code.modeling_ladderized_llama import LadderizedLlamaDecoderLayer, base_linear
from ladderize.runtime.training.outputs import SubModuleOutputs


class CollectingLayer(LadderizedLlamaDecoderLayer):
    """The same layer, which also hands on what its sub-modules add to the stream.

    They leave ``forward`` as its results: so they are kept once where a layer is computed again for its backward pass
    (activation checkpointing), and FSDP2 knows that gradients come through them.
    """

    def __call__(self, *args: Any, sub_module_outputs: SubModuleOutputs | None = None, **kwargs: Any) -> Any:
        state, attention, mlp = super().__call__(*args, **kwargs)
        own = None if sub_module_outputs is None else sub_module_outputs.of(self.self_attn.layer_idx)
        if own is not None:
            own.attention(attention)
            own.mlp(mlp)
        return state

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        state, attention, mlp = self.with_outputs(*args, **kwargs)
        if self.attention_sync == "dropped" and (bias := base_linear(self.self_attn.o_proj).bias) is not None:
            attention = attention + bias
        return state, attention, mlp
