"""What the ranks of the tests of training gradients do; functions here are pickled by name and run in other
processes."""

import contextlib
import gc
import weakref
from dataclasses import dataclass, field
from pathlib import Path
from unittest import mock

import torch

from ladderize.adapt.options import Objective
from ladderize.checkpoint.opening import read_checkpoint
from ladderize.layout import Layout
from ladderize.runtime import kv_cache
from ladderize.runtime.collectives import differentiable
from ladderize.runtime.collectives.choose import choose
from ladderize.runtime.loader import CheckpointSource
from ladderize.runtime.schedule import SEQUENTIAL, Schedule
from ladderize.runtime.shards import Shape
from ladderize.runtime.training import linear
from ladderize.runtime.training.batch import Batch
from ladderize.runtime.training.model import TPTraining
from ladderize.runtime.training.weights import build_weights
from tests.groups import Counting

CPU = torch.device("cpu")


@dataclass(frozen=True)
class Case:
    """A step of training. micros: micro-batches of input_ids, position_ids and targets. teacher: a checkpoint's
    folder."""

    folder: Path
    trained: frozenset[str]
    micros: tuple[dict[str, torch.Tensor], ...]
    schedule: Schedule = SEQUENTIAL
    recompute: bool = False
    teacher: Path | None = None
    objective: Objective = field(default_factory=Objective)
    compute: torch.dtype = torch.float32


@contextlib.contextmanager
def noted(*places):
    """References to the objects that classes of the package make within the block."""
    references = []

    def noting(original):
        def make(*arguments):
            made = original(*arguments)
            references.append(weakref.ref(made))
            return made

        return make

    with contextlib.ExitStack() as patches:
        for module, name in places:
            patches.enter_context(mock.patch.object(module, name, noting(getattr(module, name))))
        yield references


def build(case, group, collectives):
    checkpoint = read_checkpoint(case.folder)
    layout = Layout.from_config(checkpoint.config)
    shape = Shape.from_config(checkpoint.config, tp_size=group.size, rank=group.rank)
    weights = build_weights(
        lambda dtype: CheckpointSource(checkpoint, dtype, CPU).read, checkpoint.config, shape, layout,
        trained=case.trained, compute=case.compute,
    )  # fmt: skip
    how = {"schedule": case.schedule, "gradient_checkpointing": case.recompute}
    return TPTraining(weights, checkpoint.config, layout, collectives, **how).train()


def step(case, group, collectives):
    """Losses of the micro-batches and the whole gradients of everything trained, in files' names."""
    model = build(case, group, collectives)
    teacher = None
    if case.teacher is not None:
        teacher = build(Case(case.teacher, frozenset(), (), case.schedule, compute=case.compute), group, collectives)
    losses, validation = [], []
    with noted((differentiable, "_Link"), (linear, "WeightUse"), (kv_cache, "PartsCache")) as made:
        for tensors in case.micros:
            micro = Batch.of(tensors, CPU)
            scores = None
            if teacher is not None:
                with torch.no_grad():
                    scores = teacher.scored_logits(micro)
            sums = model(micro, teacher_logits=scores)
            case.objective.total(*sums).backward()
            losses.append(sums.detach())
            with torch.no_grad():
                validation.append(model(micro, teacher_logits=scores))
            del sums, scores
    alive = sum(reference() is not None for reference in made)
    model.weights.sum_partial_gradients(group)

    def gradient(parameter):
        assert parameter.grad is not None  # zeros where nothing counts: DDP waits for every parameter
        return parameter.grad

    return {
        "losses": torch.stack(losses),
        "validation": torch.stack(validation),
        "gradients": {name: piece.whole(gradient, group).clone() for name, piece in model.weights.pieces().items()},
        "made": len(made),
        "alive": alive,
    }


def gradients(group, folder, jobs, in_flight):
    """Run cases of folder/cases.pt, on each backend of ``jobs`` those of its names; rank 0 writes what ``step``
    returned for each, and how many messages were not waited for.

    Through files: tensors that are given to a process by hand each take an open file.
    """
    cases = torch.load(folder / "cases.pt", weights_only=False)
    found = {}
    gc.disable()  # what is left of a step is then left by the code, and not by a cycle that is collected some day
    for backend, names in jobs.items():
        collectives, _ = choose(backend, group, max_bytes=1 << 18, in_flight=in_flight)
        results = found[group.size, backend] = {}
        for name in names:
            counting = Counting(collectives)
            results[name] = result = step(cases[name], group, counting)
            assert all(torch.equal(other, result["losses"]) for other in group.gather(result["losses"]))
            result["open"] = counting.started - counting.waited
        collectives.settle()
    gc.enable()
    if group.is_main:
        torch.save(found, folder / f"{group.size}.pt")
