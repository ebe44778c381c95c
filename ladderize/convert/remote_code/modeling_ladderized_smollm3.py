"""A SmolLM3 whose sync points are blocking, overlapped (Ladder Residual) or dropped (Sync-Point Drop)."""

from transformers.modeling_layers import (
    GenericForQuestionAnswering,
    GenericForSequenceClassification,
    GenericForTokenClassification,
)
from transformers.models.smollm3.modeling_smollm3 import (
    SmolLM3Attention,
    SmolLM3DecoderLayer,
    SmolLM3ForCausalLM,
    SmolLM3Model,
    SmolLM3PreTrainedModel,
)

from .configuration_ladderized_smollm3 import LadderizedSmolLM3Config
from .modeling_ladderized import (
    HeadsOnlyAttention,
    LadderizedDecoderLayer,
    LadderizedForCausalLM,
    LadderizedModel,
    make_known,
)


class HeadsOnlySmolLM3Attention(HeadsOnlyAttention, SmolLM3Attention): ...


class LadderizedSmolLM3DecoderLayer(LadderizedDecoderLayer, SmolLM3DecoderLayer):
    heads_only = HeadsOnlySmolLM3Attention


class LadderizedSmolLM3PreTrainedModel(SmolLM3PreTrainedModel):
    config_class = LadderizedSmolLM3Config
    config: LadderizedSmolLM3Config
    _no_split_modules = ["LadderizedSmolLM3DecoderLayer"]


class LadderizedSmolLM3Model(LadderizedModel, LadderizedSmolLM3PreTrainedModel, SmolLM3Model):
    layer_class = LadderizedSmolLM3DecoderLayer


class LadderizedSmolLM3ForCausalLM(LadderizedForCausalLM, LadderizedSmolLM3PreTrainedModel, SmolLM3ForCausalLM):
    model_class = LadderizedSmolLM3Model


class LadderizedSmolLM3ForSequenceClassification(
    GenericForSequenceClassification, LadderizedSmolLM3PreTrainedModel
): ...


class LadderizedSmolLM3ForTokenClassification(GenericForTokenClassification, LadderizedSmolLM3PreTrainedModel): ...


class LadderizedSmolLM3ForQuestionAnswering(GenericForQuestionAnswering, LadderizedSmolLM3PreTrainedModel): ...


make_known(LadderizedSmolLM3Config, LadderizedSmolLM3Model, LadderizedSmolLM3ForCausalLM)
