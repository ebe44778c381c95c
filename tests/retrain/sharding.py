"""What the ranks of test_sharding.py do; functions here are pickled by name."""

import torch
from torch.distributed.fsdp import FSDPModule

from ladderize.adapt.retrain.engine import whole
from ladderize.adapt.retrain.hf_model import HFEngine, ModelSetup, build_student, build_teacher
from ladderize.checkpoint.reading import read_checkpoint
from ladderize.layout import Layout


def losses_and_gradients(group, folder, tensors):
    """Of one step over ``tensors`` of each rank, with everything trained: sharded, by FSDP2's groups, and not. Rank 0
    writes them down."""
    checkpoint, found = read_checkpoint(folder / "student"), []
    for mesh in (group.mesh(), None):
        setup = ModelSetup(group.device, mesh=mesh)
        student = build_student(
            checkpoint, Layout.from_config(checkpoint.config), setup, trained=frozenset(checkpoint.tensors)
        )
        teacher = build_teacher(read_checkpoint(folder / "dense"), setup, student)
        how = {"compute": torch.float32, "sharded": mesh is not None, "weight_decay": 0.0}
        engine = HFEngine(student, group, teacher=teacher, **how)
        with engine.accumulating(last=True):
            losses = engine.losses(engine.to_device(tensors[group.rank]))
            losses.sum().backward()
        gradients = {name: whole(piece.parameters[0].grad) for name, piece in engine.pieces.items()}
        groups = [name for name, module in student.named_modules() if isinstance(module, FSDPModule)]
        found.append((group.gather(losses.tolist()), gradients, groups))
    if group.is_main:
        torch.save(found, folder / "found.pt")
