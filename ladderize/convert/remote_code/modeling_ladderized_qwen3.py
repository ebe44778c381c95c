"""A Qwen3 whose sync points are blocking, overlapped (Ladder Residual) or dropped (Sync-Point Drop)."""

from transformers.modeling_layers import (
    GenericForQuestionAnswering,
    GenericForSequenceClassification,
    GenericForTokenClassification,
)
from transformers.models.qwen3.modeling_qwen3 import (
    Qwen3Attention,
    Qwen3DecoderLayer,
    Qwen3ForCausalLM,
    Qwen3Model,
    Qwen3PreTrainedModel,
)

from .configuration_ladderized_qwen3 import LadderizedQwen3Config
from .modeling_ladderized import (
    HeadsOnlyAttention,
    LadderizedDecoderLayer,
    LadderizedForCausalLM,
    LadderizedModel,
    make_known,
)


class HeadsOnlyQwen3Attention(HeadsOnlyAttention, Qwen3Attention): ...


class LadderizedQwen3DecoderLayer(LadderizedDecoderLayer, Qwen3DecoderLayer):
    heads_only = HeadsOnlyQwen3Attention


class LadderizedQwen3PreTrainedModel(Qwen3PreTrainedModel):
    config_class = LadderizedQwen3Config
    config: LadderizedQwen3Config
    _no_split_modules = ["LadderizedQwen3DecoderLayer"]


class LadderizedQwen3Model(LadderizedModel, LadderizedQwen3PreTrainedModel, Qwen3Model):
    layer_class = LadderizedQwen3DecoderLayer


class LadderizedQwen3ForCausalLM(LadderizedForCausalLM, LadderizedQwen3PreTrainedModel, Qwen3ForCausalLM):
    model_class = LadderizedQwen3Model


class LadderizedQwen3ForSequenceClassification(GenericForSequenceClassification, LadderizedQwen3PreTrainedModel): ...


class LadderizedQwen3ForTokenClassification(GenericForTokenClassification, LadderizedQwen3PreTrainedModel): ...


class LadderizedQwen3ForQuestionAnswering(GenericForQuestionAnswering, LadderizedQwen3PreTrainedModel): ...


make_known(LadderizedQwen3Config, LadderizedQwen3Model, LadderizedQwen3ForCausalLM)
