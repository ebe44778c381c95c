"""A Mistral whose sync points are blocking, overlapped (Ladder Residual) or dropped (Sync-Point Drop)."""

from transformers.modeling_layers import (
    GenericForQuestionAnswering,
    GenericForSequenceClassification,
    GenericForTokenClassification,
)
from transformers.models.mistral.modeling_mistral import (
    MistralAttention,
    MistralDecoderLayer,
    MistralForCausalLM,
    MistralModel,
    MistralPreTrainedModel,
)

from .configuration_ladderized_mistral import LadderizedMistralConfig
from .modeling_ladderized import (
    HeadsOnlyAttention,
    LadderizedDecoderLayer,
    LadderizedForCausalLM,
    LadderizedModel,
    make_known,
)


class HeadsOnlyMistralAttention(HeadsOnlyAttention, MistralAttention):
    @property
    def sliding_window(self):
        return self.config.sliding_window


class LadderizedMistralDecoderLayer(LadderizedDecoderLayer, MistralDecoderLayer):
    heads_only = HeadsOnlyMistralAttention


class LadderizedMistralPreTrainedModel(MistralPreTrainedModel):
    config_class = LadderizedMistralConfig
    config: LadderizedMistralConfig
    _no_split_modules = ["LadderizedMistralDecoderLayer"]


class LadderizedMistralModel(LadderizedModel, LadderizedMistralPreTrainedModel, MistralModel):
    layer_class = LadderizedMistralDecoderLayer


class LadderizedMistralForCausalLM(LadderizedForCausalLM, LadderizedMistralPreTrainedModel, MistralForCausalLM):
    model_class = LadderizedMistralModel


class LadderizedMistralForSequenceClassification(
    GenericForSequenceClassification, LadderizedMistralPreTrainedModel
): ...


class LadderizedMistralForTokenClassification(GenericForTokenClassification, LadderizedMistralPreTrainedModel): ...


class LadderizedMistralForQuestionAnswering(GenericForQuestionAnswering, LadderizedMistralPreTrainedModel): ...


make_known(LadderizedMistralConfig, LadderizedMistralModel, LadderizedMistralForCausalLM)
