"""What launchers say of the processes they start, and the device and dtype to compute in."""

import pytest
import torch

from ladderize.blocks import compute_dtype
from ladderize.errors import UserError
from ladderize.ranks.device import check_device
from ladderize.ranks.environment import ALONE, Place, already_started, launched, started_rank_variables
from ladderize.ranks.group import join_ranks


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
    ("asked", "stored", "dtype"),
    [
        ("auto", "float32", torch.float32),
        ("auto", "bfloat16", torch.bfloat16),
        ("auto", "float64", torch.float32),
        ("auto", "float16", torch.bfloat16),
        ("float32", "bfloat16", torch.float32),
    ],
)
def test_one_policy_for_the_dtype(asked, stored, dtype):
    assert compute_dtype(asked, stored) == dtype


@pytest.mark.parametrize(
    ("device", "said"),
    [("1.5", "is no device that torch knows"), ("meta", "nothing to compute on"), ("\x1b", "no device")],
)
def test_a_device_that_is_none(device, said):
    with pytest.raises(UserError, match=said):
        check_device(device)
