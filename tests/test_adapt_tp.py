"""``ladderize adapt --tp-size``: what it refuses, and whole runs of the command."""

import json
import os
import re
import shutil
import signal
import sys

import numpy as np
import pytest
import torch

from ladderize.adapt.train.options import RetrainOptions
from ladderize.adapt.train.states import read_metrics
from ladderize.adapt.train.task import Launch, open_task
from ladderize.convert.pipeline import convert_checkpoint
from ladderize.convert.recipe import Recipe
from ladderize.errors import UserError
from tests import warm
from tests.helpers import CLIPPED, SHAPE, all_gone, edit_json, invoke_well, listing, ranks_of, refusal, save_llama

LENGTH, ROWS = 16, 32


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """A dense model, the same with every layer ladder and dropped for two ranks, and data."""
    folder = tmp_path_factory.mktemp("tp")
    save_llama(folder / "dense")
    convert_checkpoint(
        str(folder / "dense"), folder / "both", Recipe(ladder="all", spd="all", sync_tp_size=2), verify=False
    )
    convert_checkpoint(str(folder / "dense"), folder / "ladder", Recipe(ladder="all"), verify=False)
    ids = np.random.default_rng(int(torch.randint(1 << 30, ()))).integers(3, SHAPE["vocab_size"], (ROWS, LENGTH))
    np.save(folder / "ids.npy", ids)
    np.save(folder / "eval.npy", ids[:3])
    return folder


def arguments(place, out, *more, model="both", steps=2):
    files = ["--data", place / "ids.npy", "--eval-data", place / "eval.npy"]
    budget = ["--max-steps", steps, "--batch-size", 4, "--seq-len", 2 * LENGTH, "--lr", "3e-3"]
    return ["adapt", place / model, out, *files, *budget, *CLIPPED, "--device", "cpu", "--write", "last", *more]


# ---- bad input ----

DOMINO = ["--tp-size", 2, "--schedule", "domino"]


@pytest.mark.parametrize(
    ("more", "code", "expected"),
    [
        (["--tp-size", 3], 1, "--tp-size 3 does not divide the"),
        (["--tp-size", 4], 1, "--tp-size 4 does not divide the 2 virtual ranks (sync_tp_size)"),
        (["--tp-size", 2, "--method", "lora"], 2, "--method lora has no --tp-size"),
    ],
)  # fmt: skip
def test_bad_arguments(place, tmp_path, more, code, expected):
    assert expected in refusal(*arguments(place, tmp_path / "out", *more), code=code)
    assert listing(tmp_path) == []


def options(place, **given):
    same = {"data": (str(place / "ids.npy"),), "max_steps": 1, "device": "cpu", "seq_len": LENGTH}
    return RetrainOptions(**{**same, **given})


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"hidden_act": "gelu"}, "hidden_act is 'gelu'; the runtime supports silu only"),
        ({"attention_dropout": 0.1}, "attention_dropout is 0.1, which training with --tp-size does not have"),
        ({"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}}, "rope_type dynamic changes"),
    ],
)
def test_models_that_would_be_trained_otherwise_are_refused(place, tmp_path, changes, expected):
    shutil.copytree(place / "ladder", tmp_path / "model")
    edit_json(tmp_path / "model" / "config.json", **changes)
    with pytest.raises(UserError, match=re.escape(expected)):
        open_task(str(tmp_path / "model"), options(place, tp_size=2), Launch(2))
    open_task(str(tmp_path / "model"), options(place), Launch(1))


def test_rows_are_shared_out_by_the_data_ranks(place):
    given = options(place, tp_size=2, batch_size=6)
    task = open_task(str(place / "both"), given, Launch(4))
    assert task.options.micro_batch_size == 3
    with pytest.raises(UserError, match="divisible by the 4 processes that read different data"):
        open_task(str(place / "both"), given, Launch(8))
    with pytest.raises(UserError, match="--tp-size 2 does not go together with the launcher's 3 processes;"):
        open_task(str(place / "both"), given, Launch(3))
    with pytest.raises(UserError, match="4 processes, which share the model by FSDP or DeepSpeed; start"):
        open_task(str(place / "both"), given, Launch(4, sharded=True))


# ---- runs ----


def steps_of(folder):
    path = folder / "metrics.jsonl"
    return read_metrics(path, "loss") if path.exists() else []


def test_sigterm_saves_and_the_same_command_goes_on(place, tmp_path, capfd):
    warm.warm_python().preload("accelerate", "datasets", "peft")
    out, work = tmp_path / "out", tmp_path / "out.ladderize-work"
    command = arguments(place, out, *DOMINO, "--eval-every", 1000, "--no-verify", steps=100_000)
    process = warm.WarmProcess([sys.executable, "-m", "ladderize", *command])
    warm.wait_until(lambda: len(steps_of(work)) >= 4, process)
    ranks = ranks_of(process.pid)
    assert len(ranks) == 2
    os.kill(process.pid, signal.SIGTERM)
    _, stderr = process.communicate()
    assert process.returncode == 1
    found = re.search(r"stopped by a signal after step (\d+), which is saved in ", stderr)
    assert found, stderr
    assert all_gone(ranks)
    assert not out.exists()
    made = steps_of(work)
    assert len(made) == int(found[1])
    outcome = invoke_well(*arguments(place, out, *DOMINO, "--no-verify", "--json", steps=len(made) + 3))
    assert json.loads(outcome.stdout).items() <= json.loads((out / "adaptation.json").read_text()).items()
    assert "2 for each copy of the model, schedule domino" in capfd.readouterr().err  # said by a rank
    assert steps_of(out)[:-3] == made
    assert len(steps_of(out)) == len(made) + 3
