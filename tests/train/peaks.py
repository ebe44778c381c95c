"""The memory that a step of training really takes: the bytes of all tensors that are alive at once."""

import os
import weakref
from unittest import mock

import torch
from ladderize.adapt.retrain import run as retraining
from ladderize.adapt.retrain.memory_estimate import OTHER_BYTES, demand_of
from ladderize.adapt.retrain.trainer import Trainer
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from ladderize.adapt.train.run import retrain
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
            storage = getattr(tensor, "_local_tensor", tensor).untyped_storage()
            if (key := storage._cdata) not in self.alive:
                self.alive[key] = weakref.ref(storage)
                weakref.finalize(storage, self.alive.pop, key, None)

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        results = func(*args, **(kwargs or {}))
        self.add(result for result in tree_leaves(results) if isinstance(result, torch.Tensor))
        sizes = [storage.nbytes() for known in list(self.alive.values()) if (storage := known()) is not None]
        self.peak = max(self.peak, sum(sizes))  # FSDP2 gives storages back without an end of their tensors
        return results


def state_of(engine):
    """Weights, gradients and moments."""
    for module in (engine.student, getattr(engine.teacher, "__self__", engine.teacher)):
        for parameter in module.parameters() if module is not None else ():
            yield parameter
            if parameter.grad is not None:
                yield parameter.grad
    for kept in engine.optimizer.state.values():
        yield from (value for value in kept.values() if isinstance(value, torch.Tensor))


def peak_and_estimate(ranks, model, out, options):
    """Bytes of the second step of a training, and those that were estimated."""
    found = []

    def step(self, *given, original=Trainer.step):
        if self.progress.step != 1:
            return original(self, *given)
        with Peak(state_of(self.engine)) as peak:
            metrics = original(self, *given)
        found.append(peak.peak)
        return metrics

    def make_trainer(task, *given, original=retraining.make_trainer):
        found.append(demand_of(task).total - OTHER_BYTES)
        return original(task, *given)

    with mock.patch.object(Trainer, "step", step), mock.patch.object(retraining, "make_trainer", make_trainer):
        retrain(ranks, RetrainJob(str(model), str(out), options, False, False, None), SILENT)
    estimate, peak = found
    return peak, estimate


def of_ranks(group, runs):
    """The same for each of ``runs`` (model, out, options, variables) by two ranks."""
    found = []
    for *run, variables in runs:
        with mock.patch.dict(os.environ, variables):
            found.append(peak_and_estimate(group, *run))
    return found
