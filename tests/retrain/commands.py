"""The command `ladderize adapt` as these tests give it, and what it leaves."""

import json

import torch

from ladderize.adapt.retrain.state import read_metrics
from ladderize.ranks.group import Ranks
from tests.helpers import invoke

CPU = Ranks(0, 1, torch.device("cpu"))
LENGTH, ROWS = 24, 40


def arguments(place, *more, model="both", steps=6):
    return [
        "adapt",
        place / model,
        "--data",
        place / "ids.npy",
        "--eval-data",
        place / "eval.npy",
        "--max-steps",
        steps,
        "--batch-size",
        4,
        "--seq-len",
        2 * LENGTH,
        "--lr",
        "3e-3",
        "--threads",
        1,
        "--no-verify",
        "--device",
        "cpu",
        *(() if "--write" in more else ("--write", "last")),  # what random models learn need not show on other data
        *more,
    ]


def adapt(place, out, *more, **kwargs):
    command = arguments(place, *more, **kwargs)
    if "lora" in more:
        command.remove("--no-verify")
    return invoke(*command[:2], out, *command[2:])


def succeed(place, out, *more, **kwargs):
    outcome = adapt(place, out, *more, **kwargs)
    assert outcome.code == 0, outcome.stderr
    return json.loads((out / "adaptation.json").read_text())


def losses_of(folder):
    return read_metrics(folder / "metrics.jsonl", "loss")
