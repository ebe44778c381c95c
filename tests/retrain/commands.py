"""The command `ladderize adapt` as these tests give it, and what it leaves."""

import json
from itertools import chain

import torch
from safetensors.torch import load_file

from ladderize.adapt.retrain.state import read_metrics
from ladderize.ranks.group import Ranks
from tests.helpers import invoke

CPU = Ranks(0, 1, torch.device("cpu"))
LENGTH, ROWS = 24, 40


def arguments(place, out, *more, model="both", steps=6, without=()):
    """The command; ``more`` wins over what is given here. out: None to name none. without: options to leave out."""
    given = {"--data": place / "ids.npy", "--eval-data": place / "eval.npy", "--max-steps": steps, "--batch-size": 4}
    given |= {"--seq-len": 2 * LENGTH, "--lr": "3e-3", "--threads": 1, "--device": "cpu"}
    given["--write"] = "last"  # what random models learn need not show on other data
    given = {name: value for name, value in given.items() if name not in (*more, *without)}
    switches = [] if "lora" in more else ["--no-verify"]
    named = [] if out is None else [out]
    return ["adapt", place / model, *named, *chain.from_iterable(given.items()), *switches, *more]


def adapt(place, out, *more, **kwargs):
    return invoke(*arguments(place, out, *more, **kwargs))


def succeed(place, out, *more, **kwargs):
    outcome = adapt(place, out, *more, **kwargs)
    assert outcome.code == 0, outcome.stderr
    return json.loads((out / "adaptation.json").read_text())


def losses_of(folder):
    return read_metrics(folder / "metrics.jsonl", "loss")


def all_tensors(folder):
    return load_file(folder / "model.safetensors")


def same_weights(ours, theirs):
    return ours.keys() == theirs.keys() and all(torch.equal(ours[name], theirs[name]) for name in theirs)
