"""The memory that a step of training really takes: the bytes of all tensors that are alive at once."""

import weakref
from unittest import mock

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from ladderize.adapt.train import run
from ladderize.adapt.train.loop import Loop
from ladderize.adapt.train.memory import OTHER_BYTES, estimate
from ladderize.adapt.train.task import RetrainJob
from ladderize.console import SILENT


class Peak(TorchDispatchMode):
    """peak: bytes, from ``tensors`` on."""

    def __init__(self, tensors):
        super().__init__()
        self.alive, self.peak = {}, 0
        self.add(tensors)

    def add(self, tensors):
        for tensor in tensors:
            storage = tensor.untyped_storage()
            if (key := storage._cdata) not in self.alive:
                self.alive[key] = weakref.ref(storage)
                weakref.finalize(storage, self.alive.pop, key, None)

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        results = func(*args, **(kwargs or {}))
        self.add(result for result in tree_leaves(results) if isinstance(result, torch.Tensor))
        sizes = [storage.nbytes() for known in list(self.alive.values()) if (storage := known()) is not None]
        self.peak = max(self.peak, sum(sizes))
        return results


def state_of(model, teacher):
    """Weights, gradients and moments."""
    for module in (model.student, teacher):
        for parameter in module.parameters() if module is not None else ():
            yield parameter
            if parameter.grad is not None:
                yield parameter.grad
    optimizer = getattr(model.optimizer, "optimizer", model.optimizer)
    for kept in optimizer.state.values():
        yield from (value for value in kept.values() if isinstance(value, torch.Tensor))


def peak_and_estimate(ranks, model, out, options):
    """Bytes of the second step of a training, and those that were estimated."""
    found, teachers = [], [None]

    def step(self, *given, original=Loop.step):
        if self.progress.step != 1:
            return original(self, *given)
        with Peak(state_of(self.model, teachers[-1])) as peak:
            metrics = original(self, *given)
        found.append(peak.peak)
        return metrics

    def made(task, *given, original=run.make_loop):
        found.append(estimate(task)["memory_bytes"] - OTHER_BYTES)
        return original(task, *given)

    def taught(*given, original=run.make_teacher):
        teachers.append(original(*given))
        return teachers[-1]

    with (
        mock.patch.object(Loop, "step", step),
        mock.patch.object(run, "make_loop", made),
        mock.patch.object(run, "make_teacher", taught),
    ):
        run.retrain(ranks, RetrainJob(str(model), str(out), options, False, False), SILENT)
    expected, peak = found
    return peak, expected
