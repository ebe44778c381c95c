"""A Qwen2 whose sync points are blocking, overlapped (Ladder Residual) or dropped (Sync-Point Drop)."""

from transformers.modeling_layers import (
    GenericForQuestionAnswering,
    GenericForSequenceClassification,
    GenericForTokenClassification,
)
from transformers.models.qwen2.modeling_qwen2 import (
    Qwen2Attention,
    Qwen2DecoderLayer,
    Qwen2ForCausalLM,
    Qwen2Model,
    Qwen2PreTrainedModel,
)

from .configuration_ladderized_qwen2 import LadderizedQwen2Config
from .modeling_ladderized import (
    HeadsOnlyAttention,
    LadderizedDecoderLayer,
    LadderizedForCausalLM,
    LadderizedModel,
    make_known,
)


class HeadsOnlyQwen2Attention(HeadsOnlyAttention, Qwen2Attention): ...


class LadderizedQwen2DecoderLayer(LadderizedDecoderLayer, Qwen2DecoderLayer):
    heads_only = HeadsOnlyQwen2Attention


class LadderizedQwen2PreTrainedModel(Qwen2PreTrainedModel):
    config_class = LadderizedQwen2Config
    config: LadderizedQwen2Config
    _no_split_modules = ["LadderizedQwen2DecoderLayer"]


class LadderizedQwen2Model(LadderizedModel, LadderizedQwen2PreTrainedModel, Qwen2Model):
    layer_class = LadderizedQwen2DecoderLayer


class LadderizedQwen2ForCausalLM(LadderizedForCausalLM, LadderizedQwen2PreTrainedModel, Qwen2ForCausalLM):
    model_class = LadderizedQwen2Model


class LadderizedQwen2ForSequenceClassification(GenericForSequenceClassification, LadderizedQwen2PreTrainedModel): ...


class LadderizedQwen2ForTokenClassification(GenericForTokenClassification, LadderizedQwen2PreTrainedModel): ...


class LadderizedQwen2ForQuestionAnswering(GenericForQuestionAnswering, LadderizedQwen2PreTrainedModel): ...


make_known(LadderizedQwen2Config, LadderizedQwen2Model, LadderizedQwen2ForCausalLM)
