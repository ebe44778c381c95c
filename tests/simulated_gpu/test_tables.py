"""What is decided before anything runs on a GPU: groups, memory, times of messages."""

from datetime import timedelta
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from ladderize.errors import UserError
from ladderize.memory import available_bytes
from ladderize.ranks.environment import Place
from ladderize.ranks.group import INFERENCE_TIMEOUT, NCCL_TIMEOUT, TRAINING_TIMEOUT, join_group
from ladderize.runtime.bench.messages import ALONE_REPEAT, ALONE_ROUNDS, AloneTimes
from ladderize.runtime.decode import check_mask
from tests.simulated_gpu.device import DEVICE, MEMORY_BYTES, SimulatedGpu
from tests.simulated_gpu.groups import AlikeRanks, collectives
from tests.simulated_gpu.models import RANKS, seed


def test_nccl_knows_its_gpu_and_does_not_wait_for_days():
    limits, asked = [], []
    backend = SimpleNamespace(_set_default_timeout=limits.append)
    world = SimpleNamespace(WORLD=SimpleNamespace(_get_backend=lambda device: backend))
    init = mock.create_autospec(dist.init_process_group, side_effect=lambda *given, **more: asked.append((given, more)))
    with (
        mock.patch.multiple(torch.cuda, device_count=lambda: 4, set_device=mock.DEFAULT),
        mock.patch.multiple(dist, init_process_group=init, group=world),
    ):
        ranks = join_group(Place(3, 4, 3, 4), "cuda", timeout=TRAINING_TIMEOUT, init_method="file:///nowhere")
    ((backends,), more) = asked[0]
    assert backends == "cpu:gloo,cuda:nccl"
    assert more["device_id"] == ranks.device == torch.device("cuda", 3)
    assert more["timeout"] == TRAINING_TIMEOUT
    assert limits == [NCCL_TIMEOUT]
    assert timedelta(minutes=10) <= NCCL_TIMEOUT < INFERENCE_TIMEOUT


def test_memory_that_torch_keeps_ready_is_free():
    with SimulatedGpu(seed()):
        before = available_bytes(DEVICE)
        assert before == MEMORY_BYTES
        held = torch.zeros(1 << 20, device=DEVICE)
        assert available_bytes(DEVICE) == before - held.nbytes
        del held
        assert torch.cuda.mem_get_info()[0] < before
        assert available_bytes(DEVICE) == before


def test_a_mask_of_prompts_of_different_lengths_has_to_have_room():
    with SimulatedGpu(seed()):
        check_mask(8, 8192, DEVICE)
        with pytest.raises(UserError, match=r"the mask of 64 prompts of different lengths up to 32,768 tokens needs"):
            check_mask(64, 32768, DEVICE)


def test_messages_are_timed_as_a_graph():
    with SimulatedGpu(seed(), RANKS) as gpu:
        group = AlikeRanks(0, RANKS, DEVICE)
        alone = AloneTimes(group, collectives("one-shot", gpu), None, torch.float32)
        assert alone.seconds("all_reduce", 4096) > 0
        kernels = [entry for entry in gpu.log if entry[0] == "run" and entry[2] == "one_shot_all_reduce_copy"]
        assert len(kernels) == 2 * ALONE_REPEAT  # a warm-up and the capture; then the graph is replayed
        assert gpu.replays == ALONE_ROUNDS
        assert alone.seconds("all_gather", 4096) > 0
    assert not gpu.problems, gpu.problems[0]
