"""What is decided before anything runs on a GPU: groups, memory, times of messages."""

from unittest import mock

import pytest
import torch

from ladderize.errors import UserError
from ladderize.memory import available_bytes, check_room
from ladderize.runtime.collectives.choose import _peers_reachable
from ladderize.runtime.decode import check_mask
from tests.simulated_gpu.device import DEVICE, MEMORY_BYTES, SimulatedGpu
from tests.simulated_gpu.groups import AlikeRanks
from tests.simulated_gpu.models import RANKS, seed


def test_memory_that_torch_keeps_ready_is_free_and_a_part_is_left_to_libraries():
    with SimulatedGpu(seed()):
        check_room(MEMORY_BYTES * 15 // 16, DEVICE, "a model", "lower it", processes=8)  # each has a GPU
        with pytest.raises(UserError, match="a model needs"):
            check_room(MEMORY_BYTES * 15 // 16 + 1, DEVICE, "a model", "lower it")
        before = available_bytes(DEVICE)
        assert before == MEMORY_BYTES
        held = torch.zeros(1 << 20, device=DEVICE)
        assert available_bytes(DEVICE) == before - held.nbytes
        del held
        assert torch.cuda.mem_get_info()[0] < before
        assert available_bytes(DEVICE) == before


@pytest.mark.parametrize(
    ("gpus", "unreachable", "symmetric"),
    [(2, {}, True), (2, {(0, 1)}, False), (2, {(1, 0)}, True), (1, {(0, 1)}, True)],
    ids=["all reach each other", "no peer access", "what the other one sees", "a process sees its own GPU only"],
)
def test_symmetric_memory_is_for_gpus_that_reach_each_other(gpus, unreachable, symmetric):
    group = AlikeRanks(0, RANKS, DEVICE)
    reaches = {"can_device_access_peer": lambda own, peer: (own, peer) not in unreachable}
    with (
        mock.patch.multiple(torch.cuda, device_count=lambda: gpus, **reaches),
        mock.patch.object(AlikeRanks, "gather", return_value=[0, 1]),
    ):
        assert _peers_reachable(group) == symmetric


def test_a_mask_of_prompts_of_different_lengths_has_to_have_room():
    with SimulatedGpu(seed()):
        check_mask(8, 8192, DEVICE)
        with pytest.raises(UserError, match=r"the mask of 64 prompts of different lengths up to 32,768 tokens needs"):
            check_mask(64, 32768, DEVICE)
