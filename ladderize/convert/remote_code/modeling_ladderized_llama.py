"""A Llama whose sync points are blocking, overlapped (Ladder Residual) or dropped (Sync-Point Drop)."""

from transformers.modeling_layers import (
    GenericForQuestionAnswering,
    GenericForSequenceClassification,
    GenericForTokenClassification,
)
from transformers.models.llama.modeling_llama import (
    LlamaAttention,
    LlamaDecoderLayer,
    LlamaForCausalLM,
    LlamaModel,
    LlamaPreTrainedModel,
)

from .configuration_ladderized_llama import LadderizedLlamaConfig
from .modeling_ladderized import (
    HeadsOnlyAttention,
    LadderizedDecoderLayer,
    LadderizedForCausalLM,
    LadderizedModel,
    make_known,
)


class HeadsOnlyLlamaAttention(HeadsOnlyAttention, LlamaAttention): ...


class LadderizedLlamaDecoderLayer(LadderizedDecoderLayer, LlamaDecoderLayer):
    heads_only = HeadsOnlyLlamaAttention


class LadderizedLlamaPreTrainedModel(LlamaPreTrainedModel):
    config_class = LadderizedLlamaConfig
    config: LadderizedLlamaConfig
    _no_split_modules = ["LadderizedLlamaDecoderLayer"]


class LadderizedLlamaModel(LadderizedModel, LadderizedLlamaPreTrainedModel, LlamaModel):
    layer_class = LadderizedLlamaDecoderLayer


class LadderizedLlamaForCausalLM(LadderizedForCausalLM, LadderizedLlamaPreTrainedModel, LlamaForCausalLM):
    model_class = LadderizedLlamaModel


class LadderizedLlamaForSequenceClassification(GenericForSequenceClassification, LadderizedLlamaPreTrainedModel): ...


class LadderizedLlamaForTokenClassification(GenericForTokenClassification, LadderizedLlamaPreTrainedModel): ...


class LadderizedLlamaForQuestionAnswering(GenericForQuestionAnswering, LadderizedLlamaPreTrainedModel): ...


make_known(LadderizedLlamaConfig, LadderizedLlamaModel, LadderizedLlamaForCausalLM)
