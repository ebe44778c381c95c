"""The command `ladderize adapt` as these tests give it, and what it leaves."""

import json
from itertools import chain
from unittest import mock

import numpy as np
import pytest
import torch
from torch.nn.functional import cross_entropy

import ladderize
from ladderize.adapt.train import run
from ladderize.adapt.train.loop import read_metrics
from ladderize.errors import UserError
from tests.helpers import all_tensors, invoke, invoke_well, one_sentence

LENGTH, ROWS = 24, 40


def arguments(place, out, *more, model="both", steps=6, without=()):
    """The command; ``more`` wins over what is given here. out: None to name none. without: options to leave out."""
    given = {"--data": place / "ids.npy", "--eval-data": place / "eval.npy", "--max-steps": steps, "--batch-size": 4}
    given |= {"--seq-len": 2 * LENGTH, "--lr": "3e-3", "--device": "cpu"}
    given["--write"] = "last"  # what random models learn need not show on other data
    given = {name: value for name, value in given.items() if name not in (*more, *without)}
    switches = [] if "lora" in more else ["--no-verify"]
    named = [] if out is None else [out]
    return ["adapt", place / model, *named, *chain.from_iterable(given.items()), *switches, *more]


def adapt(place, out, *more, **kwargs):
    return invoke(*arguments(place, out, *more, **kwargs))


def succeed(place, out, *more, **kwargs):
    invoke_well(*arguments(place, out, *more, **kwargs))
    return json.loads((out / "adaptation.json").read_text())


def refused(place, out, *more, **kwargs):
    return one_sentence(adapt(place, out, *more, **kwargs))


def losses_of(folder):
    return read_metrics(folder / "metrics.jsonl", "loss")


def perplexity_of(folder, data):
    ids = torch.from_numpy(np.load(data))
    with torch.no_grad():
        logits = ladderize.load(folder)(ids).logits[:, :-1]
    return float(cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten()).exp())


def stopped_before_the_end(place, out, *more, **kwargs):
    """The command, all of whose steps are made, but nothing is written: its work stays. Returns what it said."""
    with mock.patch.object(run, "write_outcome", side_effect=UserError("no outcome")):
        outcome = adapt(place, out, *more, **kwargs)
    assert "no outcome" in one_sentence(outcome)
    return outcome.stderr


def check_same_run(ours, theirs):
    """The losses and the weights of two runs, which may round otherwise."""
    assert losses_of(ours) == pytest.approx(losses_of(theirs), rel=1e-4)
    written, expected = all_tensors(ours), all_tensors(theirs)
    assert written.keys() == expected.keys()
    for key, value in expected.items():
        torch.testing.assert_close(written[key], value, rtol=1e-3, atol=1e-4, msg=key)


def same_weights(ours, theirs):
    return ours.keys() == theirs.keys() and all(torch.equal(ours[name], theirs[name]) for name in theirs)
