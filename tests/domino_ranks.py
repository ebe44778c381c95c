"""What the ranks of the tests of training gradients do; functions here are pickled by name and run in other
processes."""

import contextlib
import gc
import weakref
from dataclasses import dataclass, field
from pathlib import Path

import torch

from ladderize.adapt.data.packing import PADDING_TARGET
from ladderize.adapt.train.options import Objective
from ladderize.checkpoint.opening import read_checkpoint
from ladderize.layout import Layout
from ladderize.runtime import kv_cache
from ladderize.runtime.collectives import differentiable
from ladderize.runtime.collectives.base import Collectives, Handle
from ladderize.runtime.collectives.choose import choose
from ladderize.runtime.loader import CheckpointSource
from ladderize.runtime.schedule import SEQUENTIAL, Schedule
from ladderize.runtime.shards import Shape
from ladderize.runtime.training import linear
from ladderize.runtime.training.batch import Batch
from ladderize.runtime.training.model import TPTraining
from ladderize.runtime.training.outputs import SubModuleOutputs
from ladderize.runtime.training.weights import build_weights

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

    def outputs(self, micro):
        """Takes what the teacher's sub-modules add, where the objective compares it."""
        if not self.objective.hidden_weight:
            return None
        layers = Layout.from_config(read_checkpoint(self.folder).config).converted_layers
        return SubModuleOutputs(layers, micro.targets != PADDING_TARGET)


class Watched(Collectives):
    """Another backend that notes in ``events`` what happens: (what, size of the part of the batch, which message)."""

    def __init__(self, inner):
        super().__init__(inner.ranks)
        self.inner, self.events, self.open = inner, [], {}

    def all_reduce_async(self, x):
        number, part = len(self.open), x.shape[:2].numel()
        self.open[number] = True
        self.events.append(("start", part, number))
        handle = self.inner.all_reduce_async(x)

        def finish():
            assert self.open[number]
            self.open[number] = False
            self.events.append(("wait", part, number))
            return handle.wait()

        return Handle(finish)

    def all_gather(self, x):
        return self.inner.all_gather(x)


class Lives:
    """The objects that classes of the package make within the block; which of them are alive after it."""

    def __init__(self, *places):
        self.places, self.made = places, []

    def __enter__(self):
        self.originals = [getattr(module, name) for module, name in self.places]
        for (module, name), original in zip(self.places, self.originals, strict=True):
            setattr(module, name, self.noting(original))
        return self

    def noting(self, original):
        def make(*arguments):
            made = original(*arguments)
            self.made.append(weakref.ref(made))
            return made

        return make

    def __exit__(self, *error):
        for (module, name), original in zip(self.places, self.originals, strict=True):
            setattr(module, name, original)

    def alive(self):
        return sum(reference() is not None for reference in self.made)


@contextlib.contextmanager
def noted_products(events):
    """Notes the products with trained weights: of inputs, in both passes, and of the weights' gradients."""
    forward, backward, weights = linear._Product.forward, linear._Product.backward, linear.WeightGradient.add

    def noted_forward(ctx, use, x, *more):
        events.append(("product", x.shape[:-1].numel(), None))
        return forward(ctx, use, x, *more)

    def noted_backward(ctx, *grads):
        events.append(("product", grads[0].shape[:-1].numel(), None))
        return backward(ctx, *grads)

    def noted_weights(self, parts, parameter):
        events.append(("weight", parts[0][1].shape[:-1].numel() if parts else 0, None))
        return weights(self, parts, parameter)

    linear._Product.forward, linear._Product.backward = staticmethod(noted_forward), staticmethod(noted_backward)
    linear.WeightGradient.add = noted_weights
    yield
    linear._Product.forward, linear._Product.backward = staticmethod(forward), staticmethod(backward)
    linear.WeightGradient.add = weights


def build(case, group, collectives):
    checkpoint = read_checkpoint(case.folder)
    layout = Layout.from_config(checkpoint.config)
    shape = Shape.from_config(checkpoint.config, tp_size=group.size, rank=group.rank)
    weights = build_weights(
        lambda dtype: CheckpointSource(checkpoint, dtype, CPU).read, checkpoint.config, shape, layout,
        trained=case.trained, compute=case.compute,
    )  # fmt: skip
    return TPTraining(
        weights, checkpoint.config, layout, collectives, schedule=case.schedule, gradient_checkpointing=case.recompute
    ).train()


def step(case, group, collectives):
    """Losses of the micro-batches and the whole gradients of everything trained, in files' names."""
    model = build(case, group, collectives)
    teacher = None
    if case.teacher is not None:
        teacher = build(Case(case.teacher, frozenset(), (), case.schedule, compute=case.compute), group, collectives)
    losses, validation = [], []
    lives = Lives((differentiable, "_Link"), (linear, "WeightUse"), (kv_cache, "PartsCache"))
    with noted_products(collectives.events), lives:
        for tensors in case.micros:
            micro = Batch.of(tensors, CPU)
            scores, outputs = None, case.outputs(micro)
            if teacher is not None:
                with torch.no_grad():
                    scores = teacher.scored_logits(micro, outputs)
            sums = model(micro, teacher_logits=scores, teacher_outputs=outputs)
            collectives.events.append(("backward", 0, None))
            case.objective.total(*sums).backward()
            losses.append(sums.detach())
            collectives.events.append(("validation", 0, None))
            with torch.no_grad():
                validation.append(model(micro, teacher_logits=scores, teacher_outputs=outputs))
            del sums, scores, outputs
    alive = lives.alive()
    model.weights.sum_partial_gradients(group)

    def gradient(parameter):
        assert parameter.grad is not None  # zeros where nothing counts: DDP waits for every parameter
        return parameter.grad

    return {
        "losses": torch.stack(losses),
        "validation": torch.stack(validation),
        "gradients": {name: piece.whole(gradient, group).clone() for name, piece in model.weights.pieces().items()},
        "made": len(lives.made),
        "alive": alive,
    }


def gradients(group, folder, jobs, in_flight):
    """Run cases of folder/cases.pt, on each backend of ``jobs`` those of its names; rank 0 writes what ``step``
    returned for each, and what was sent.

    Through files: tensors that are given to a process by hand each take an open file.
    """
    cases = torch.load(folder / "cases.pt", weights_only=False)
    found = {}
    gc.disable()  # what is left of a step is then left by the code, and not by a cycle that is collected some day
    for backend, names in jobs.items():
        collectives, _ = choose(backend, group, max_bytes=1 << 18, in_flight=in_flight)
        results = found[group.size, backend] = {}
        for name in names:
            watched = Watched(collectives)
            results[name] = result = step(cases[name], group, watched)
            assert all(torch.equal(other, result["losses"]) for other in group.gather(result["losses"]))
            result["events"] = watched.events
            result["open"] = sum(watched.open.values())
        collectives.settle()
    gc.enable()
    if group.is_main:
        torch.save(found, folder / f"{group.size}.pt")
