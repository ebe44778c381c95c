"""A Granite whose sync points are blocking, overlapped (Ladder Residual) or dropped (Sync-Point Drop)."""

from transformers.modeling_layers import (
    GenericForQuestionAnswering,
    GenericForSequenceClassification,
    GenericForTokenClassification,
)
from transformers.models.granite.modeling_granite import (
    GraniteAttention,
    GraniteDecoderLayer,
    GraniteForCausalLM,
    GraniteModel,
    GranitePreTrainedModel,
)

from .configuration_ladderized_granite import LadderizedGraniteConfig
from .modeling_ladderized import (
    HeadsOnlyAttention,
    LadderizedDecoderLayer,
    LadderizedForCausalLM,
    LadderizedModel,
    make_known,
)


class HeadsOnlyGraniteAttention(HeadsOnlyAttention, GraniteAttention): ...


class LadderizedGraniteDecoderLayer(LadderizedDecoderLayer, GraniteDecoderLayer):
    heads_only = HeadsOnlyGraniteAttention


class LadderizedGranitePreTrainedModel(GranitePreTrainedModel):
    config_class = LadderizedGraniteConfig
    config: LadderizedGraniteConfig
    _no_split_modules = ["LadderizedGraniteDecoderLayer"]


class LadderizedGraniteModel(LadderizedModel, LadderizedGranitePreTrainedModel, GraniteModel):
    layer_class = LadderizedGraniteDecoderLayer


class LadderizedGraniteForCausalLM(LadderizedForCausalLM, LadderizedGranitePreTrainedModel, GraniteForCausalLM):
    model_class = LadderizedGraniteModel


class LadderizedGraniteForSequenceClassification(
    GenericForSequenceClassification, LadderizedGranitePreTrainedModel
): ...


class LadderizedGraniteForTokenClassification(GenericForTokenClassification, LadderizedGranitePreTrainedModel): ...


class LadderizedGraniteForQuestionAnswering(GenericForQuestionAnswering, LadderizedGranitePreTrainedModel): ...


make_known(LadderizedGraniteConfig, LadderizedGraniteModel, LadderizedGraniteForCausalLM)
