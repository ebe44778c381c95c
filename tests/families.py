"""A small model of each family that is no Llama, with everything that the family has."""

import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from tests.helpers import SHAPE, randomise

# windows are shorter than the tests' prompts; layers with and without them, or without rope, take turns
FAMILIES = {
    "mistral": {"sliding_window": 6, "head_dim": 8},
    "qwen2": {"use_sliding_window": True, "sliding_window": 5, "max_window_layers": 2},
    "qwen3": {
        "use_sliding_window": True,
        "sliding_window": 7,
        "layer_types": ["full_attention", "sliding_attention"] * 2,
        "head_dim": 8,
        "attention_bias": True,
    },
    "granite": {
        "embedding_multiplier": 3.0,
        "attention_multiplier": 0.2,
        "residual_multiplier": 0.4,
        "logits_scaling": 2.5,
        "attention_bias": True,
        "mlp_bias": True,
        "tie_word_embeddings": True,
    },
    "smollm3": {"use_sliding_window": True, "sliding_window": 5, "no_rope_layers": [1, 0, 1, 0]},
}


def make_family_model(family: str, **more: object) -> PreTrainedModel:
    """A random model of the family's own class in transformers."""
    config = AutoConfig.for_model(family, **{**SHAPE, **FAMILIES[family], **more})
    model = AutoModelForCausalLM.from_config(config).eval()
    randomise(model, int(torch.randint(1 << 30, ())))
    return model
