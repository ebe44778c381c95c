"""What launchers say, and that every way to train understands it alike."""

import json

import pytest
import torch
from ladderize.ranks.training import compute_dtype

from ladderize.errors import UserError
from ladderize.ranks.device import check_device
from ladderize.ranks.environment import ALONE, Place, already_started, launched, started_rank_variables
from ladderize.ranks.group import join_ranks
from tests.helpers import invoke, listing, one_sentence, training_command

REFUSED = {
    "DeepSpeed": {"ACCELERATE_USE_DEEPSPEED": "true"},
    "--gradient_accumulation_steps": {"ACCELERATE_GRADIENT_ACCUMULATION_STEPS": "4"},
    "FSDP": {"ACCELERATE_USE_FSDP": "true", "FSDP_VERSION": "2"},
    "mixed_precision fp16": {"ACCELERATE_MIXED_PRECISION": "fp16"},
}


def test_without_a_launcher_a_process_is_alone():
    assert launched() == ALONE
    assert not already_started()
    ranks = join_ranks("cpu")
    assert (ranks.rank, ranks.size, ranks.local_size, ranks.is_main) == (0, 1, 1, True)
    assert ranks.gather("x") == ["x"]
    assert ranks.broadcast("x") == "x"


def test_a_started_rank_reads_what_it_was_given(monkeypatch):
    place = Place(rank=3, size=4, local_rank=1, local_size=2)
    for name, value in {**started_rank_variables(place, {}), "MASTER_ADDR": "localhost", "MASTER_PORT": "1"}.items():
        monkeypatch.setenv(name, value)
    assert launched() == place
    monkeypatch.delenv("LOCAL_WORLD_SIZE")  # torchrun says it, other launchers may not
    assert launched().local_size == 4
    monkeypatch.setenv("RANK", "three")
    with pytest.raises(UserError, match="the environment variable RANK is 'three', but must be a whole number"):
        launched()


@pytest.mark.parametrize(
    ("asked", "launcher", "stored", "dtype"),
    [
        ("auto", "", "float32", torch.float32),
        ("auto", "no", "bfloat16", torch.bfloat16),
        ("auto", "bf16", "float32", torch.bfloat16),
        ("auto", "", "float64", torch.float32),
        ("auto", "", "float16", torch.bfloat16),
        ("float32", "bf16", "bfloat16", torch.float32),
    ],
)
def test_one_policy_for_the_dtype(monkeypatch, asked, launcher, stored, dtype):
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", launcher)
    assert compute_dtype(asked, stored) == dtype


@pytest.mark.parametrize("command", ["blocks", "spd"])
@pytest.mark.parametrize("what", REFUSED)
def test_what_block_to_block_distillation_refuses(place, tmp_path, monkeypatch, command, what):
    """As the other methods do: none of it would take effect."""
    for name, value in REFUSED[what].items():
        monkeypatch.setenv(name, value)
    outcome = invoke(*training_command(command, place, tmp_path / "out"))
    assert what in one_sentence(outcome)
    assert outcome.code == 1
    assert listing(tmp_path) == []


def test_blocks_train_in_the_launchers_precision(place, tmp_path, monkeypatch):
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "bf16")
    outcome = invoke(*training_command("blocks", place, tmp_path / "out"))
    assert outcome.code == 0, outcome.stderr
    assert json.loads((tmp_path / "out" / "distillation.json").read_text())["dtype"] == "bfloat16"


@pytest.mark.parametrize(
    ("device", "said"),
    [("1.5", "is no device that torch knows"), ("meta", "nothing to compute on"), ("\x1b", "no device")],
)
def test_a_device_that_is_none(device, said):
    with pytest.raises(UserError, match=said):
        check_device(device)
