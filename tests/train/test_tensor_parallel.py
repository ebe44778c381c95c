"""Tensor-parallel retraining makes the steps of one process, whatever the schedule and however many ranks."""

import json
import math
import os
import re
import shutil
import signal
import sys
from pathlib import Path
from unittest import mock

import pytest
import torch
from safetensors.torch import load_file

from ladderize.adapt.options import AdaptOptions
from ladderize.adapt.train import tensor_parallel
from ladderize.adapt.train.loop import read_metrics
from ladderize.adapt.train.run import adapt_checkpoint, retrain
from ladderize.adapt.train.task import Launch, open_task
from ladderize.checkpoint.opening import open_checkpoint
from ladderize.console import SILENT
from ladderize.convert.pipeline import convert_checkpoint
from ladderize.convert.recipe import Recipe
from ladderize.errors import UserError
from ladderize.layout import Layout
from ladderize.runtime import launch
from ladderize.runtime.loader import CheckpointSource
from ladderize.runtime.shards import Shape
from ladderize.runtime.training.weights import build_weights
from tests import warm
from tests.groups import Counting, in_turn
from tests.helpers import BIASES, CLIPPED, all_gone, edit_json, invoke_well, save_llama
from tests.train.commands import LENGTH, arguments, losses_of

STEPS, LEAST = 8, 6
BRIEF = {"max_steps": LEAST, "eval_every": 2}
DOMINO, SEQUENTIAL = "domino", "sequential"


def options(place, model, out, tp_size=1, schedule=SEQUENTIAL, **more):
    paths = {"model": str(model), "out": str(out), "verify": False}
    files = {"data": (str(place / "ids.npy"),), "eval_data": (str(place / "eval.npy"),), "write": "last"}
    sizes = {"max_steps": STEPS, "batch_size": 4, "micro_batch_size": 2, "seq_len": 2 * LENGTH, "eval_every": 8}
    rates = {"lr": 1e-3, "warmup_steps": 2, "max_grad_norm": CLIPPED[1]}
    how = {"device": "cpu", "tp_size": tp_size, "schedule": schedule}
    return AdaptOptions(**{**paths, **files, **sizes, **rates, **how, **more})


def taught(place):
    return {"distill_from": str(place / "dense"), "distill_weight": 0.7, "train": "all", **BRIEF}


# name -> how a run differs from the others
RUNS = {
    "full": lambda place: {"weight_decay": 0.1},
    "taught": taught,
    "odd": lambda place: {"train": "all", **BRIEF},
    "narrow": lambda place: {**taught(place), "dtype": "bfloat16", "gradient_checkpointing": True},
}
TOLERANCE = {"narrow": 5e-3}  # of those that round otherwise


@pytest.fixture(scope="module")
def models(place, tmp_path_factory):
    """Folders of the models by the names of runs; of "odd" two ranks, with two virtual ranks each, hold the same KV
    head, and it has biases and one matrix as embedding and head."""
    folder = tmp_path_factory.mktemp("odd")
    seed = int(torch.randint(1 << 30, ()))
    save_llama(folder / "dense", seed=seed, num_key_value_heads=1, tie_word_embeddings=True, vocab_size=97, **BIASES)
    recipe = Recipe(ladder="3", delayed="1:3", spd="2", sync_tp_size=4)
    convert_checkpoint(str(folder / "dense"), folder / "odd", recipe, verify=False)
    others = {"odd": folder / "odd"}
    return {name: others.get(name, place / "both") for name in RUNS}


@pytest.fixture(scope="module")
def alone(models, place, tmp_path_factory):
    folder = tmp_path_factory.mktemp("alone")
    for name, more in RUNS.items():
        adapt_checkpoint(options(place, models[name], folder / name, **more(place)))
    return folder


def same_run(ours, theirs, *, tolerance=1e-4):
    """Losses of every step, scores, and what was written."""
    assert len(losses_of(theirs)) in (LEAST, STEPS)
    assert losses_of(ours) == pytest.approx(losses_of(theirs), rel=tolerance)
    for key in ("heldout_perplexity", "heldout_divergence", "gradient_norm", "dense_heldout_perplexity"):
        ours_key, theirs_key = (read_metrics(folder / "metrics.jsonl", key) for folder in (ours, theirs))
        assert ours_key == pytest.approx(theirs_key, rel=20 * tolerance), key
    (name,) = (path.name for path in theirs.glob("*.safetensors"))
    written, expected = load_file(ours / name), load_file(theirs / name)
    assert written.keys() == expected.keys()
    for key, value in expected.items():
        assert (written[key] - value).norm() <= 50 * tolerance * value.norm(), key


class Killed(Exception):
    """Stands for a kill: what was saved before is all that is left."""


def retrain_counted(group, options, kill_at=None, nan_at=None):
    """What every rank ended with: nothing, or a message; and its messages that were not waited for.

    kill_at: a step: the run ends after it was saved. nan_at: rank, step: this rank's weights go wrong when the step was
    saved.
    """
    counted, training = [], tensor_parallel.TensorParallelTraining

    def saved(step):
        return Path(f"{options.out}.ladderize-work", f"step-{step:08d}").is_dir()

    def choose(*args, original=tensor_parallel.choose, **kwargs):
        collectives, said = original(*args, **kwargs)
        counted.append(Counting(collectives))
        return counted[-1], said

    def losses(self, batch, original=training.losses):
        if kill_at is not None and saved(kill_at):
            raise Killed(f"after step {kill_at}")
        if nan_at is not None and group.rank == nan_at[0] and saved(nan_at[1]):
            with torch.no_grad():
                self.parameters[0].view(-1)[0] = math.nan
        return original(self, batch)

    ended = None
    with mock.patch.object(tensor_parallel, "choose", choose), mock.patch.object(training, "losses", losses):
        try:
            retrain(group, options, SILENT)
        except (UserError, Killed) as error:
            ended = f"{type(error).__name__}: {error}"
    return group.gather((ended, [one.started - one.waited for one in counted]))


def run_on(ranks, *runs):
    """runs: what ``retrain_counted`` is given, one run after the other in one group."""
    calls = [(retrain_counted, *run) for run in runs]
    return launch.run(in_turn, calls, tp_size=ranks, device="cpu", threads=1)


def nothing_left(results):
    """Every rank came to its end, and every message was waited for."""
    for by_rank in results:
        for ended, in_flight in by_rank:
            assert ended is None
            assert in_flight == [0]


@pytest.fixture(scope="module")
def two(models, place, tmp_path_factory):
    folder, runs = tmp_path_factory.mktemp("two"), []
    for name, more in RUNS.items():
        schedule = SEQUENTIAL if name == "full" else DOMINO
        runs.append((options(place, models[name], folder / name, 2, schedule, **more(place)),))
    nothing_left(run_on(2, *runs))
    return folder


@pytest.mark.parametrize("name", [name for name in RUNS if name not in TOLERANCE])
def test_two_ranks_make_the_steps_of_one(two, alone, name):
    same_run(two / name, alone / name)


@pytest.mark.parametrize(("name", "tolerance"), TOLERANCE.items())
def test_recomputation_and_bfloat16(two, alone, name, tolerance):
    assert losses_of(two / name) == pytest.approx(losses_of(alone / name), rel=tolerance)


@pytest.mark.parametrize("tied", [False, True])
def test_a_teacher_takes_what_is_frozen_and_equal(tmp_path, tied):
    """Also as its student changes one layer, and has layers of which two virtual ranks are computed apart."""
    dense = open_checkpoint(str(save_llama(tmp_path / "dense", tie_word_embeddings=tied)))
    shape = Shape.from_config(dense.config, tp_size=1, rank=0)

    def build(layout, trained, shared=None):
        def source(dtype):
            return CheckpointSource(dense, dtype, torch.device("cpu")).read

        how = {"trained": frozenset(name for name in dense.tensors if name.startswith(trained)), "shared": shared}
        return build_weights(source, dense.config, shape, layout, compute=torch.bfloat16, **how)

    student = build(Layout.from_layers(4, ladder=[2], spd=[0, 2], sync_tp_size=2), ("model.layers.2.",))
    teacher = build(Layout.dense(4), (), student)
    theirs = dict(student.named_parameters())
    apart = {name for name, value in teacher.named_parameters() if theirs.get(name) is not value}
    layer = r"sublayers\.[45]\."
    assert all(re.match(layer, name) or re.match(r"sublayers\.(0\.row|1\.column)_parallel\.", name) for name in apart)
    assert not any(re.match(layer, name) for name in theirs.keys() & dict(teacher.named_parameters()).keys() - apart)
    assert all(not value.requires_grad for value in teacher.parameters())


def test_two_by_two_ranks_make_the_steps_of_one(place, alone, tmp_path):
    more = {**taught(place), "micro_batch_size": 1}
    nothing_left(run_on(4, (options(place, place / "both", tmp_path / "out", 2, **more),)))
    same_run(tmp_path / "out", alone / "taught")


def test_nan_on_one_rank_stops_all_and_names_the_step(place, tmp_path):
    out = tmp_path / "out"
    asked = options(place, place / "both", out, 2, **{**taught(place), "eval_every": 1})
    (by_rank,) = run_on(2, (asked, None, (1, 2)))
    for ended, in_flight in by_rank:
        assert ended.startswith("UserError: the loss of step 3 is nan; step 3 was not applied; ")
        assert "resume from step 2, saved" in ended
        assert in_flight == [0]
    assert not out.exists()
    assert all(math.isfinite(loss) for loss in read_metrics(tmp_path / "out.ladderize-work" / "metrics.jsonl", "loss"))


def test_a_killed_run_goes_on(place, alone, tmp_path):
    run = options(place, place / "both", tmp_path / "out", 2, DOMINO, **taught(place))
    (by_rank,) = run_on(2, (run, 4))
    assert {ended for ended, _ in by_rank} == {"Killed: after step 4"}
    nothing_left(run_on(2, (run,)))
    assert losses_of(tmp_path / "out") == pytest.approx(losses_of(alone / "taught"), rel=1e-4)


def ranks_of(pid: int) -> list[int]:
    """The ranks that a process has started: they are forked from a server. Linux only."""

    def children(parent: int) -> list[int]:
        return list(map(int, Path(f"/proc/{parent}/task/{parent}/children").read_text().split()))

    try:
        return [rank for server in children(pid) for rank in children(server)]
    except FileNotFoundError:
        return []


def test_sigterm_saves_and_the_same_command_goes_on(place, tmp_path):
    warm.warm_python().preload("accelerate", "datasets", "peft")
    out, work = tmp_path / "out", tmp_path / "out.ladderize-work"
    more = (*CLIPPED, "--tp-size", 2, "--schedule", "domino")
    command = arguments(place, out, *more, "--eval-every", 1000, steps=100_000)
    process = warm.WarmProcess([sys.executable, "-m", "ladderize", *command])
    warm.wait_until(lambda: (work / "metrics.jsonl").exists() and len(losses_of(work)) >= 4, process)
    ranks = ranks_of(process.pid)
    assert len(ranks) == 2
    os.kill(process.pid, signal.SIGTERM)
    _, stderr = process.communicate()
    assert process.returncode == 1
    found = re.search(r"stopped by a signal after step (\d+), which is saved in ", stderr)
    assert found, stderr
    assert all_gone(ranks)
    assert not out.exists()
    made = losses_of(work)
    assert len(made) == int(found[1])
    outcome = invoke_well(*arguments(place, out, *more, "--json", steps=len(made) + 3))
    assert json.loads(outcome.stdout).items() <= json.loads((out / "adaptation.json").read_text()).items()
    assert losses_of(out)[:-3] == made
    assert len(losses_of(out)) == len(made) + 3


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"hidden_act": "gelu"}, "the activation is 'gelu'; ladderize knows silu, swish, gelu_pytorch_tanh"),
        ({"attention_dropout": 0.1}, "attention_dropout is 0.1, which training with --tp-size does not have"),
        ({"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}}, "rope_type dynamic changes"),
    ],
)
def test_models_that_would_be_trained_otherwise_are_refused(place, tmp_path, changes, expected):
    shutil.copytree(place / "upper", tmp_path / "model")
    edit_json(tmp_path / "model" / "config.json", **changes)
    with pytest.raises(UserError, match=re.escape(expected)):
        open_task(options(place, tmp_path / "model", "out", 2), Launch(2))
    open_task(options(place, tmp_path / "model", "out"), Launch(1))
