"""What the ranks of test_sharding.py do; functions here are pickled by name."""

import contextlib
from dataclasses import replace
from unittest import mock

import torch
from ladderize.adapt.retrain.engine import whole
from ladderize.adapt.retrain.hf_model import HFEngine, ModelSetup, build_student, build_teacher
from ladderize.adapt.retrain.tensor_parallel import TPEngine, TPRanks
from torch.distributed.fsdp import FSDPModule
from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPParamGroup

from ladderize.checkpoint.opening import read_checkpoint
from ladderize.layout import Layout
from ladderize.runtime.collectives.base import Collectives
from ladderize.runtime.loader import CheckpointSource
from ladderize.runtime.schedule import Schedule
from ladderize.runtime.shards import Shape
from ladderize.runtime.training.linear import WeightGradient
from ladderize.runtime.training.model import TPTraining
from ladderize.runtime.training.weights import build_weights


def hf_engine(folder, group, mesh, compute):
    checkpoint, setup = read_checkpoint(folder / "student"), ModelSetup(group.device, compute, mesh=mesh)
    student = build_student(
        checkpoint, Layout.from_config(checkpoint.config), setup, trained=frozenset(checkpoint.tensors)
    )
    teacher = build_teacher(read_checkpoint(folder / "dense"), setup, student)
    how = {"compute": compute, "sharded": mesh is not None, "weight_decay": 0.0}
    return HFEngine(student, group, teacher=teacher, **how)


def tp_engine(folder, group, mesh, compute):
    """Of tensor-parallel groups of one rank."""

    def model(name):
        checkpoint, shared = read_checkpoint(folder / name), Collectives()
        layout, shape = Layout.from_config(checkpoint.config), Shape.from_config(checkpoint.config, tp_size=1, rank=0)
        trained = frozenset(checkpoint.tensors) if name == "student" else frozenset()
        weights = build_weights(
            lambda dtype: CheckpointSource(checkpoint, dtype, group.device),
            checkpoint.config,
            shape,
            layout,
            trained=trained,
            compute=compute,
        )
        again = compute != torch.float32  # in one of the cases
        return TPTraining(
            weights, checkpoint.config, layout, shared, schedule=Schedule("domino"), gradient_checkpointing=again
        )

    places = TPRanks(group, replace(group, rank=0, size=1), group)
    how = {"compute": compute, "weight_decay": 0.0, "mesh": mesh, "teacher": model("dense").eval()}
    return TPEngine(model("student").train(), places, Collectives(), **how)


ENGINES = {"hf": hf_engine, "tp": tp_engine}


def losses_and_gradients(group, folder, engine, compute, tensors):
    """Of one step over ``tensors`` of each rank, with everything trained: sharded, by FSDP2's groups, and not. Rank 0
    writes them down, and which weights' gradients were computed and whose were summed, in order."""
    found = []
    for mesh in (group.mesh(), None):
        made, events = ENGINES[engine](folder, group, mesh, compute), []
        with noting(made.student, events), made.accumulating(last=True):
            losses = made.losses(made.to_device(tensors[group.rank]))
            losses.sum().backward()
        gradients = {name: piece.local(lambda own: whole(own.grad)) for name, piece in made.pieces.items()}
        groups = [name for name, module in made.student.named_modules() if isinstance(module, FSDPModule)]
        found.append({"losses": losses.tolist(), "gradients": gradients, "groups": groups, "events": events})
    if group.is_main:
        torch.save(found, folder / "found.pt")


@contextlib.contextmanager
def noting(student, events):
    names = {module: name for name, module in student.named_modules()}

    def add(self, *given, original=WeightGradient.add):
        total = original(self, *given)
        if total is not None:
            events.append("computed")
        return total

    def post_backward(self, *given, original=FSDPParamGroup.post_backward):
        events.append(names[self.modules[0]])
        return original(self, *given)

    with (
        mock.patch.object(WeightGradient, "add", add),
        mock.patch.object(FSDPParamGroup, "post_backward", post_backward),
    ):
        yield
