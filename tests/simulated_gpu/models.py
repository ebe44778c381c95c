"""Small models for the simulated GPU: one of each kind of layout."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace

import torch

from ladderize.adapt.train.run import open_accelerator, reset_accelerate
from ladderize.adapt.train.training_model import HFTraining, make_student, make_teacher, open_model, trained_tensors
from ladderize.checkpoint.opening import open_checkpoint
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
    layout = Layout.from_layers(LAYERS, **LAYOUTS[name]).to_config()
    sizes = {**SHAPE, "num_hidden_layers": LAYERS, "max_position_embeddings": 600, **(BIASES if name == "spd" else {})}
    model = LadderizedLlamaForCausalLM(LadderizedLlamaConfig(**sizes, **layout))
    randomise(model, seed())
    model.save_pretrained(folder)
    return folder


@contextmanager
def hf_training(folder: Path, dense: Path, device: torch.device, *, everything: bool = True) -> Iterator[HFTraining]:
    """The Hugging Face model in training beside its teacher, in float32, on an Accelerator of the device."""
    reset_accelerate()
    try:
        accelerator = open_accelerator(SimpleNamespace(device=device.type, log_with=()))
        assert accelerator.device.type == device.type
        checkpoint, teacher = open_checkpoint(str(folder)), open_checkpoint(str(dense))
        model = open_model(checkpoint, Layout.from_config(checkpoint.config), device, torch.float32)
        trained = trained_tensors(checkpoint.tensors, range(LAYERS), everything)
        student = make_student(model, torch.float32, trained=trained)
        taught = make_teacher(open_model(teacher, Layout.dense(LAYERS), device, torch.float32), torch.float32, student)
        yield HFTraining(accelerator, student, taught)
    finally:
        reset_accelerate()
