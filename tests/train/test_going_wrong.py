"""What retraining refuses, and what it says when something goes wrong."""

import math
import os
import re

import numpy as np
import pytest
import torch

from ladderize.adapt.train.training_model import HFTraining
from tests.helpers import listing, one_sentence, refusal
from tests.train.commands import adapt, arguments, losses_of, refused, succeed


@pytest.fixture
def nan_in_step_3(tmp_path, monkeypatch):
    """Of the training of ``out``, once step 2 is saved, until ``undo()``."""

    def losses(self, batch, original=HFTraining.losses):
        wrong = torch.is_grad_enabled() and (tmp_path / "out.ladderize-work" / "step-00000002").is_dir()
        return original(self, batch) * (math.nan if wrong else 1)

    monkeypatch.setattr(HFTraining, "losses", losses)
    return monkeypatch


def test_nan_names_the_step_and_loses_nothing(place, tmp_path, nan_in_step_3):
    succeed(place, tmp_path / "whole", "--eval-every", 1)
    message = refused(place, tmp_path / "out", "--eval-every", 2)
    state = tmp_path / "out.ladderize-work" / "step-00000002" / "state.json"
    saved = state.stat()
    assert message == refused(place, tmp_path / "out", "--eval-every", 2)
    assert os.path.samestat(state.stat(), saved)  # not written anew, of which a kill could leave half
    nan_in_step_3.undo()
    assert "the loss of step 3 is nan; step 3 was not applied; resume from step 2, saved in" in message
    assert adapt(place, tmp_path / "out", "--eval-every", 2).code == 0
    assert losses_of(tmp_path / "out") == losses_of(tmp_path / "whole")


def test_a_state_that_is_damaged(place, tmp_path, nan_in_step_3):
    """Cut off, of something else, JSON without end: the state and what to do are named."""
    assert "is nan" in refused(place, tmp_path / "out", "--eval-every", 2)
    nan_in_step_3.undo()
    state = tmp_path / "out.ladderize-work" / "step-00000002"
    damage = {
        "nested too deeply": lambda: (state / "state.json").write_text("[" * 9999),
        "": lambda: (state / "optimizer.bin").write_bytes(b"x"),
        "deserializing header": lambda: (state / "model.safetensors").write_bytes(b"x"),
    }
    whole = (state / "state.json").read_text()
    for message, harm in damage.items():
        harm()
        said = refused(place, tmp_path / "out", "--eval-every", 2)
        assert re.search(f"{state} is damaged .*{message}", said), said
        (state / "state.json").write_text(whole)


def test_an_exploding_loss_stops(place, tmp_path, monkeypatch):
    def losses(self, batch, original=HFTraining.losses):
        taken = next((int(state["step"]) for state in self.optimizer.optimizer.state.values()), 0)
        return original(self, batch) * (4 if taken in (15, *range(17, 30)) else 1)

    monkeypatch.setattr(HFTraining, "losses", losses)
    message = refused(place, tmp_path / "out", steps=30)
    assert re.search("the loss exploded: .*step 20 was not applied", message)  # not step 16, after which it fell again


@pytest.mark.parametrize(
    ("text", "code", "expected"),
    [
        ("--samples 4", 2, "--samples has no effect without --align"),
        ("--distill-weight 1", 2, "a --distill-weight above 0 have no effect without each other"),
        ("--method lora --lora-targets q_proj,lm_head", 2, "--lora-targets must name some of q_proj, "),
        ("--seq-len 65", 1, "--seq-len 65 is more than the 64 positions"),
        ("--batch-size 99", 1, "fewer than --batch-size 99"),
        ("--distill-from UPPER", 1, "/upper is not dense"),
        ("--tp-size 2 --method lora", 2, "--method lora has no --tp-size"),
    ],
)
def test_bad_arguments(place, tmp_path, text, code, expected):
    more = text.replace("UPPER", str(place / "upper")).split()
    assert expected in refusal(*arguments(place, tmp_path / "out", *more), code=code)
    assert listing(tmp_path) == []


def test_the_launcher_is_believed_or_refused(place, tmp_path, monkeypatch):
    """What Accelerate makes of its variables; nothing of ours reads them."""
    for name, value, message in (
        ("ACCELERATE_MIXED_PRECISION", "fp16", "mixed_precision fp16"),
        (
            "ACCELERATE_USE_FSDP",
            "true",
            "FSDP or DeepSpeed, which Accelerate runs on GPUs only",
        ),  # else it says nothing
    ):
        with monkeypatch.context() as patch:
            patch.setenv(name, value)
            assert message in refused(place, tmp_path / "out")
    assert listing(tmp_path) == []
    with monkeypatch.context() as patch:
        patch.setenv("ACCELERATE_GRADIENT_ACCUMULATION_STEPS", "4")
        document = succeed(place, tmp_path / "cut", steps=2)
        assert document["options"]["micro_batch_size"] == 1
        said = refused(place, tmp_path / "out", "--micro-batch-size", 2)
        assert "4 steps of gradient accumulation and --batch-size 4 do not leave --micro-batch-size 2" in said
    succeed(place, tmp_path / "whole", steps=2)
    assert losses_of(tmp_path / "cut") == pytest.approx(losses_of(tmp_path / "whole"), rel=1e-4)
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "bf16")
    assert succeed(place, tmp_path / "out", steps=1)["dtype"] == "bfloat16"
    succeed(place, tmp_path / "float32", "--dtype", "float32", steps=2)
    assert losses_of(tmp_path / "float32") == losses_of(tmp_path / "whole")


def test_training_that_never_helped_writes_nothing(place, tmp_path):
    """What is learnt from half of the vocabulary is wrong of the other half."""
    ids = np.random.default_rng(0)
    np.save(tmp_path / "data.npy", ids.integers(3, 20, (40, 24)))
    np.save(tmp_path / "other.npy", ids.integers(50, 97, (4, 24)))
    more = ("--data", tmp_path / "data.npy", "--eval-data", tmp_path / "other.npy", "--lr", 0.02, "--eval-every", 4)
    for again in (False, True):  # the work is kept, and nothing is trained again
        outcome = adapt(place, tmp_path / "out", *more, "--write", "best", steps=4)
        assert "training never lowered the held-out cross-entropy (before " in one_sentence(outcome)
        assert ("resuming after step 4" in outcome.stderr) == again
        assert listing(tmp_path) == ["data.npy", "other.npy", "out.ladderize-work"]
    heldout = succeed(place, tmp_path / "out", *more, steps=4)["heldout_perplexity"]
    assert heldout["after"] > heldout["before"]
    assert "out.ladderize-work" not in listing(tmp_path)
