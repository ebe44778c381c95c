"""Small models for the simulated GPU: one of each kind of layout."""

from pathlib import Path

import torch

from ladderize.convert.remote_code.configuration_ladderized import LadderizedLlamaConfig
from ladderize.convert.remote_code.modeling_ladderized import LadderizedLlamaForCausalLM
from ladderize.layout import Layout
from tests.helpers import BIASES, SHAPE, randomise

RANKS = 2  # of the groups that are simulated
LAYERS = 2
LAYOUTS = {
    "dense": {},
    "ladder": {"ladder": range(LAYERS)},
    "spd": {"spd": range(LAYERS), "sync_tp_size": 4},
    "both": {"ladder": range(LAYERS), "spd": range(LAYERS), "sync_tp_size": 2},
    "delayed": {"delayed": range(LAYERS), "spd": [1], "sync_tp_size": 8},
}


def seed() -> int:
    return int(torch.randint(1 << 30, ()))


def save_model(name: str, folder: Path) -> Path:
    """A random model of one of LAYOUTS; returns its folder."""
    extra = BIASES if name == "spd" else {}
    sizes = {**SHAPE, "num_hidden_layers": LAYERS, "max_position_embeddings": 600, **extra}
    model = LadderizedLlamaForCausalLM(
        LadderizedLlamaConfig(**sizes, **Layout.from_layers(LAYERS, **LAYOUTS[name]).to_config())
    )
    randomise(model, seed())
    model.save_pretrained(folder)
    return folder
