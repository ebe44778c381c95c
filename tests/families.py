"""A small model of each family that is no Llama, with everything that the family has."""

import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from tests.helpers import FAMILIES, SHAPE, randomise


def make_family_model(family: str, **more: object) -> PreTrainedModel:
    """A random model of the family's own class in transformers."""
    config = AutoConfig.for_model(family, **{**SHAPE, **FAMILIES[family], **more})
    model = AutoModelForCausalLM.from_config(config).eval()
    randomise(model, int(torch.randint(1 << 30, ())))
    return model
