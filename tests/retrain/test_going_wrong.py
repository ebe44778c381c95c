"""What retraining refuses, and what it says when something goes wrong."""

import json
import math
import os
import re

import numpy as np
import pytest
import torch
from ladderize.adapt.retrain import run
from ladderize.adapt.retrain import trainer as training
from ladderize.adapt.retrain.hf_model import HFEngine
from ladderize.ranks.training import wants_fsdp
from safetensors.torch import load_file, save_file

from ladderize.adapt.teacher import share_won_back, target_text
from ladderize.commands.adapt import adapt_options
from ladderize.errors import UsageError, UserError
from ladderize.tradeoff.sweep.stages import asked_by
from tests.helpers import listing, one_sentence
from tests.retrain.commands import adapt, losses_of, perplexity_of, succeed


@pytest.fixture
def nan_in_step_3(tmp_path, monkeypatch):
    """Of the training of ``out``, once step 2 is saved, until ``undo()``."""

    def losses(self, batch, original=HFEngine.losses):
        wrong = self.student.training and (tmp_path / "out.ladderize-work" / "step-00000002").is_dir()
        return original(self, batch) * (math.nan if wrong else 1)

    monkeypatch.setattr(HFEngine, "losses", losses)
    return monkeypatch


def test_nan_names_the_step_and_the_rows_and_loses_nothing(place, tmp_path, nan_in_step_3):
    succeed(place, tmp_path / "whole", "--save-every", 1)
    message = one_sentence(adapt(place, tmp_path / "out", "--save-every", 2))
    state = tmp_path / "out.ladderize-work" / "step-00000002" / "state.json"
    saved = state.stat()
    assert message == one_sentence(adapt(place, tmp_path / "out", "--save-every", 2))
    assert os.path.samestat(state.stat(), saved)  # not written anew, of which a kill could leave half
    nan_in_step_3.undo()
    assert "the loss of step 3 is nan; step 3, of " in message
    assert "ids.npy, row" in message
    assert "was not applied; resume from step 2, which is saved in" in message
    assert adapt(place, tmp_path / "out", "--save-every", 2).code == 0
    assert losses_of(tmp_path / "out") == losses_of(tmp_path / "whole")


def test_a_state_that_is_damaged(place, tmp_path, nan_in_step_3):
    """Tensors of another shape, none at all, JSON without end: the state and what to do are named."""
    assert "is nan" in one_sentence(adapt(place, tmp_path / "out", "--save-every", 2))
    nan_in_step_3.undo()
    state = tmp_path / "out.ladderize-work" / "step-00000002"
    optimizer = load_file(state / "optimizer.safetensors")
    name = min(optimizer)
    damage = {
        r"optimizer.safetensors: exp_avg.* has shape \[3\] instead of": lambda: save_file(
            optimizer | {name: torch.zeros(3)}, state / "optimizer.safetensors"
        ),
        "optimizer.safetensors is truncated": lambda: (state / "optimizer.safetensors").write_bytes(b"x"),
        "nested deeper than": lambda: (state / "state.json").write_text("[" * 9999),
    }
    for message, harm in damage.items():
        harm()
        said = one_sentence(adapt(place, tmp_path / "out", "--save-every", 2))
        assert re.search(f"{state} is damaged .*{message}", said), said


def test_an_exploding_loss_stops(place, tmp_path, monkeypatch):
    def losses(self, batch, original=HFEngine.losses):
        taken = next((int(state["step"]) for state in self.optimizer.state.values()), 0)
        return original(self, batch) * (4 if taken in (15, *range(17, 30)) else 1)

    monkeypatch.setattr(HFEngine, "losses", losses)
    message = one_sentence(adapt(place, tmp_path / "out", steps=30))
    assert "the loss exploded: " in message  # not in step 16, after which it fell again
    assert "in steps 18 to 20" in message
    assert "lower --lr" in message
    bound = training.explosion_bound([2.0] * 20)
    assert bound == 6.0
    assert training.explosion_bound([3.0] * 20) == 9.0
    assert training.explosion_bound([2.0] * 9) == math.inf


@pytest.mark.parametrize(
    ("more", "code", "expected"),
    [
        (["--method", "half"], 2, "'half' is not one of 'full', 'lora', 'blocks'"),
        (["--samples", "4"], 2, "--samples has no effect with --method full"),
        (["--temperature", "2"], 2, "--temperature has no effect without --distill-from"),
        (["--max-tokens", "9"], 2, "give one of them"),
        (["--lr-schedule", "linear"], 2, "'linear' is not one of 'cosine', 'wsd', 'constant'"),
        (["--preset", "best"], 2, "'best' is not one of 'ladder-paper'"),
        (["--heldout", "3"], 2, "--heldout has no effect with --eval-data"),
        (["--lr", "0"], 2, "--lr must be above 0"),
        (["--weight-decay", "inf"], 2, "--weight-decay must be a finite number of at least 0, not inf"),
        (["--log-dir", "x"], 2, "--log-dir has no effect without --log-with"),
        (["--log-with", "pigeon"], 1, "--log-with pigeon is not one of tensorboard, wandb, trackio"),
        (["--log-with", "trackio"], 1, "needs the package trackio, which is not installed"),
        (["--seq-len", "65"], 1, "--seq-len 65 is more than the 64 positions"),
        (["--train", "9"], 1, "--train: 9 is out of range"),
        (["--micro-batch-size", "3"], 1, "--micro-batch-size 3 does not divide the 4 rows"),
        (["--batch-size", "99"], 1, "fewer than --batch-size 99"),
        (["--distill-from", "OTHER"], 1, "--distill-from OTHER is not dense"),
        (["--attention", "magic"], 2, "'magic' is not one of 'sdpa'"),
        (["--attention", "flash_attention_2"], 1, "needs the package flash-attn"),
        (["--attention", "flex_attention"], 1, "--attention flex_attention needs a GPU"),
        (
            ["--log-dir", "x", "--log-with", "trackio"],
            2,
            "--log-dir has no effect without --log-with tensorboard or wandb",
        ),
        (["--log-with", ","], 2, "--log-with names no tracker"),
        (["--min-lr", "0.1", "--lr-schedule", "constant"], 2, "--min-lr has no effect with --lr-schedule constant"),
    ],
)
def test_bad_arguments(place, tmp_path, more, code, expected):
    more = [str(place / "upper") if argument == "OTHER" else argument for argument in more]
    outcome = adapt(place, tmp_path / "out", *more)
    assert outcome.code == code, outcome
    assert expected.replace("OTHER", str(place / "upper")) in one_sentence(outcome)
    assert listing(tmp_path) == []


# methods -> options that they alone heed
HEEDED = {
    "full lora": {
        **{"--max-steps": 2, "--max-tokens": "2k", "--temperature": 2.0, "--distill-weight": 0.5, "--hidden-weight": 1},
        **{"--eval-data": "x.txt", "--resume": "no", "--tp-size": 2, "--schedule": "domino", "--keep": 1},
        "--attention": "eager",
    },
    "lora": {"--lora-rank": 4},
    "full lora blocks": {"--lr": 1e-3, "--batch-size": 2},
    "blocks align": {"--samples": 4, "--max-memory": "1GB"},
    "blocks": {"--epochs": 2, "--patience": 2},
    "align": {"--ridge": 0.1, "--random-share": 0.1},
}


@pytest.mark.parametrize("method", ["full", "lora", "blocks", "align"])
def test_options_of_other_methods_have_no_effect(method):
    for methods, options in HEEDED.items():
        for option, value in options.items() if method not in methods.split() else ():
            words = ["adapt", "MODEL", "OUT", "--method", method, "--data", "x.txt", option, str(value)]
            with pytest.raises(UsageError, match=f"^{option} has no effect with --method {method}$"):
                adapt_options(asked_by(words))


def test_logs_do_not_fill_out(place, tmp_path, monkeypatch):
    """Which is to be written at the end, and would then not be empty."""
    monkeypatch.setattr(run, "check_trackers", lambda names: None)
    for folder in (tmp_path / "out", tmp_path / "out" / "logs"):
        message = one_sentence(adapt(place, tmp_path / "out", "--log-with", "tensorboard", "--log-dir", folder))
        assert "--log-dir" in message
        assert "is OUT or lies inside it" in message
    assert listing(tmp_path) == []


def test_the_launcher_is_believed_or_refused(place, tmp_path, monkeypatch):
    for variables, expected in (
        ({"ACCELERATE_USE_DEEPSPEED": "true"}, "DeepSpeed, which adapt does not support"),
        ({"ACCELERATE_USE_FSDP": "true", "FSDP_VERSION": "2"}, "FSDP with one process"),
        ({"ACCELERATE_MIXED_PRECISION": "fp16"}, "mixed_precision fp16"),
        ({"ACCELERATE_GRADIENT_ACCUMULATION_STEPS": "8"}, "--gradient_accumulation_steps has no effect"),
    ):
        with monkeypatch.context() as patch:
            for key, value in variables.items():
                patch.setenv(key, value)
            assert expected in one_sentence(adapt(place, tmp_path / "out"))
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "bf16")
    assert succeed(place, tmp_path / "out", steps=1)["dtype"] == "bfloat16"


def test_of_fsdp_what_is_here(monkeypatch):
    monkeypatch.setenv("ACCELERATE_USE_FSDP", "true")
    monkeypatch.setenv("FSDP_VERSION", "1")
    with pytest.raises(UserError, match="FSDP 1"):
        wants_fsdp(2)
    monkeypatch.setenv("FSDP_VERSION", "2")
    assert wants_fsdp(2)
    monkeypatch.setenv("FSDP_OFFLOAD_PARAMS", "true")
    with pytest.raises(UserError, match="--fsdp_offload_params has no effect"):
        wants_fsdp(2)


def test_missing_budgets_are_refused(place, tmp_path):
    assert "say how long to train" in one_sentence(adapt(place, tmp_path / "out", without=["--max-steps"]))
    assert "OUT is missing" in one_sentence(adapt(place, None))
    shown = adapt(place, None, "--show-data", without=["--max-steps"])
    assert shown.code == 0
    assert "row 1:" in shown.stdout
    assert listing(tmp_path) == []


@pytest.mark.parametrize("method", ["full", "lora"])
def test_training_that_never_helped_writes_nothing(place, tmp_path, method):
    """What is learnt from half of the vocabulary is wrong of the other half."""
    ids = np.random.default_rng(0)
    np.save(tmp_path / "data.npy", ids.integers(3, 20, (40, 24)))
    np.save(tmp_path / "other.npy", ids.integers(50, 97, (4, 24)))
    data = ("--data", tmp_path / "data.npy", "--eval-data", tmp_path / "other.npy")

    def train(write):
        return adapt(place, tmp_path / "out", *data, "--method", method, "--lr", 0.02, "--write", write, steps=4)

    for again in (False, True):  # the work is kept, and nothing is trained again
        outcome = train("best")
        message = one_sentence(outcome)
        assert outcome.code == 1
        assert "training never lowered the held-out cross-entropy (before " in message
        assert "--write last" in message
        assert ("resuming after step 4" in outcome.stderr) == again
        assert listing(tmp_path) == ["data.npy", "other.npy", "out.ladderize-work"]
    assert train("last").code == 0
    heldout = json.loads((tmp_path / "out" / "adaptation.json").read_text())["heldout_perplexity"]
    assert heldout["after"] > heldout["before"]
    assert "out.ladderize-work" not in listing(tmp_path)


def test_the_dense_model_is_the_target(place, tmp_path):
    outcome = adapt(place, tmp_path / "out", "--distill-from", place / "dense", steps=2)
    assert outcome.code == 0, outcome.stderr
    heldout = json.loads((tmp_path / "out" / "adaptation.json").read_text())["heldout_perplexity"]
    dense = perplexity_of(place / "dense", place / "eval.npy")
    assert heldout["dense"] == pytest.approx(dense, rel=1e-4)
    assert f"dense model (target) {heldout['dense']:.4f}" in outcome.stderr
    assert f"dense model (target) {heldout['dense']:.4f}" in outcome.stdout
    assert f"{heldout['dense']:.4f}" in (tmp_path / "out" / "README.md").read_text()
    assert "loss (KL)" in outcome.stdout
    if heldout["before"] > heldout["dense"]:
        share = math.log(heldout["before"] / heldout["after"]) / math.log(heldout["before"] / heldout["dense"])
        assert heldout["won_back"] == pytest.approx(share)


def test_the_share_won_back():
    assert share_won_back(4.0, 4.0, 2.0) == 0
    assert share_won_back(4.0, 2.0, 2.0) == 1
    assert share_won_back(4.0, 2**1.5, 2.0) == pytest.approx(0.5)
    assert share_won_back(2.0, 1.9, 2.0) is None  # the conversion cost nothing
    assert share_won_back(math.inf, 2.0, 2.0) is None


def test_the_share_won_back_in_words():
    assert target_text(4.0, 2**1.5, 2.0) == "dense model (target) 2.0000: 50% of the loss recovered"
    assert target_text(2.01, 1.5, 2.0) == "dense model (target) 2.0000: all of the loss recovered, and more"
    assert target_text(2.01, 2.9, 2.0) == "dense model (target) 2.0000: none of the loss recovered"
    assert target_text(2.0, 1.9, 2.0) == "dense model (target) 2.0000"
