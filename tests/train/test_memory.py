"""The one formula of what a training takes, against the peaks of real steps, and what --dry-run says of it."""

import random
import weakref
from unittest import mock

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from ladderize.adapt.options import AdaptOptions
from ladderize.adapt.train import run
from ladderize.adapt.train.loop import Loop
from ladderize.adapt.train.task import OTHER_BYTES, estimate
from ladderize.console import SILENT
from ladderize.convert.pipeline import convert_checkpoint
from ladderize.convert.recipe import Recipe
from ladderize.ranks.group import Ranks
from tests.helpers import invoke_json, invoke_well, listing, save_llama
from tests.train.commands import arguments

CPU = Ranks(0, 1, torch.device("cpu"))
ROWS, TOKENS = 4, 192  # of a micro-batch


@pytest.fixture(scope="module")
def larger(tmp_path_factory):
    """Models of which layers, ends and activations all count, and their data."""
    folder = tmp_path_factory.mktemp("larger")
    shape = {"hidden_size": 128, "intermediate_size": 448, "num_hidden_layers": 4, "vocab_size": 1024}
    save_llama(folder / "dense", **shape, max_position_embeddings=TOKENS, num_attention_heads=4, head_dim=32)
    recipes = {"ladder": Recipe(ladder="all"), "upper": Recipe(ladder="2:")}
    for name, recipe in {**recipes, "spd": Recipe(spd="all", sync_tp_size=4)}.items():
        convert_checkpoint(str(folder / "dense"), folder / name, recipe, verify=False)
    np.save(folder / "ids.npy", np.random.randint(3, 1000, (80, TOKENS // 2)))  # two of which share a row
    return folder


def options(larger, model, out, **more):
    given = {"max_steps": 2, "batch_size": 2 * ROWS, "micro_batch_size": ROWS, "seq_len": TOKENS}
    given |= {"distill_from": str(larger / "dense"), "heldout": 0, "write": "last"}
    paths = {"model": str(larger / model), "out": str(out), "data": (str(larger / "ids.npy"),)}
    return AdaptOptions(device="cpu", verify=False, **{**paths, **given, **more})


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
    for module in (model.student, teacher):
        for parameter in module.parameters() if module is not None else ():
            yield parameter
            if parameter.grad is not None:
                yield parameter.grad
    optimizer = getattr(model.optimizer, "optimizer", model.optimizer)
    for kept in optimizer.state.values():
        yield from (value for value in kept.values() if isinstance(value, torch.Tensor))


def peak_and_estimate(options):
    found, teachers = [], [None]

    def step(self, *given, original=Loop.step):
        if self.progress.step != 1:
            return original(self, *given)
        with Peak(state_of(self.model, self.model.teacher and teachers[-1])) as peak:
            metrics = original(self, *given)
        found.append(peak.peak)
        return metrics

    def made(task, *given, original=run.make_model):
        found.append(estimate(task)["memory_bytes"] - OTHER_BYTES)
        return original(task, *given)

    def taught(*given, original=run.make_teacher):
        teachers.append(original(*given))
        return teachers[-1]

    with (
        mock.patch.object(Loop, "step", step),
        mock.patch.object(run, "make_model", made),
        mock.patch.object(run, "make_teacher", taught),
    ):
        run.retrain(CPU, options, SILENT)
    expected, peak = found
    return peak, expected


@pytest.mark.parametrize(
    ("model", "more"),
    [
        ("ladder", {"gradient_checkpointing": True, "train": "all"}),
        ("upper", {}),
        ("spd", {"micro_batch_size": 2}),
        ("spd", {"method": "lora", "gradient_checkpointing": True}),
        ("upper", {"teacher_cache": "answers"}),
    ],
)
def test_the_estimate_is_the_peak_of_a_step(larger, tmp_path, model, more):
    dtype = random.choice(["float32", "bfloat16"])
    if "teacher_cache" in more:
        more = {"teacher_cache": str(tmp_path / "answers")}
    peak, expected = peak_and_estimate(options(larger, model, tmp_path / "out", dtype=dtype, **more))
    assert 0.7 * peak <= expected <= 1.6 * peak, dtype


def test_a_dry_run(place, tmp_path):
    given = [*arguments(place, None, model="upper", steps=3), "--dry-run", "--distill-from", place / "dense"]
    assert ", 3 steps of 4 rows of 48 tokens, 4 at once. " in invoke_well(*given).stdout
    asking = invoke_well(*given, "--teacher-cache", tmp_path / "answers").stdout
    assert "while the dense model answers, each process holds it whole (149 kB)" in " ".join(asking.split())
    document = invoke_json(*given)
    assert document["memory_bytes"] == sum(document["memory_parts"].values())
    assert listing(tmp_path) == []
