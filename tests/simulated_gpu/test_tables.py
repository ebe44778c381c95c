"""What is decided before anything runs on a GPU: groups, memory, times of messages."""

from datetime import timedelta
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from ladderize.console import Console
from ladderize.errors import UserError
from ladderize.memory import available_bytes, check_room
from ladderize.ranks.environment import Place
from ladderize.ranks.group import (
    INFERENCE_TIMEOUT,
    MEETING_TIMEOUT,
    SAME_WORK_TIMEOUT,
    TRAINING_TIMEOUT,
    Ranks,
    join_group,
)
from ladderize.runtime.bench import run
from ladderize.runtime.bench.inference import InferenceRun
from ladderize.runtime.bench.options import BenchOptions
from ladderize.runtime.bench.run import ALONE_REPEAT, ALONE_ROUNDS, BenchRun, seconds_alone
from ladderize.runtime.collectives.choose import _peers_reachable
from ladderize.runtime.collectives.emulated import emulate
from ladderize.runtime.collectives.links import Link
from ladderize.runtime.decode import check_mask
from tests.simulated_gpu.device import DEVICE, MEMORY_BYTES, SimulatedGpu
from tests.simulated_gpu.groups import AlikeRanks, collectives
from tests.simulated_gpu.models import RANKS, seed


def test_nccl_knows_its_gpu_and_does_not_wait_for_days():
    limits, asked = {"cuda": [], "cpu": [], "store": []}, []
    world = SimpleNamespace(
        WORLD=SimpleNamespace(
            _get_backend=lambda device: SimpleNamespace(_set_default_timeout=limits[device.type].append)
        )
    )
    store = SimpleNamespace(set_timeout=limits["store"].append)
    init = mock.create_autospec(dist.init_process_group, side_effect=lambda *given, **more: asked.append((given, more)))
    with (
        mock.patch.multiple(torch.cuda, device_count=lambda: 4, set_device=mock.DEFAULT),
        mock.patch.multiple(dist, init_process_group=init, group=world),
        mock.patch.object(dist.distributed_c10d, "_get_default_store", return_value=store),
    ):
        ranks = join_group(Place(3, 4, 3, 4), "cuda", timeout=TRAINING_TIMEOUT, init_method="file:///nowhere")
    ((backends,), more) = asked[0]
    assert backends == "cpu:gloo,cuda:nccl"
    assert more["device_id"] == ranks.device == torch.device("cuda", 3)
    assert more["timeout"] == MEETING_TIMEOUT
    assert limits == {"cuda": [SAME_WORK_TIMEOUT], "cpu": [TRAINING_TIMEOUT], "store": [TRAINING_TIMEOUT]}
    assert timedelta(minutes=10) <= SAME_WORK_TIMEOUT < INFERENCE_TIMEOUT


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


def test_messages_are_timed_as_a_graph():
    with SimulatedGpu(seed(), RANKS) as gpu:
        group = AlikeRanks(0, RANKS, DEVICE)
        carried = collectives("one-shot", gpu)
        assert seconds_alone(group, carried, torch.float32, "all_reduce", 4096) > 0
        kernels = [entry for entry in gpu.log if entry[0] == "run" and entry[2] == "one_shot_all_reduce_copy"]
        assert len(kernels) == 2 * ALONE_REPEAT  # a warm-up and the capture; then the graph is replayed
        assert gpu.replays == ALONE_ROUNDS
        assert seconds_alone(group, carried, torch.float32, "all_gather", 4096) > 0
    assert not gpu.problems, gpu.problems[0]


@pytest.mark.parametrize(("took", "warned"), [(10.5e-6, 0), (13e-6, 1)])
def test_an_emulated_message_is_measured_before_it_is_believed(took, warned):
    """A GPU's clock may tick once in a microsecond: a delay of ten is then not ten."""
    link, console = Link("test", 10.0, None), mock.create_autospec(Console, instance=True)
    with SimulatedGpu(seed()), mock.patch.object(run, "seconds_alone", return_value=took):
        messages = emulate(RANKS, link, DEVICE)
        one = InferenceRun.__new__(InferenceRun)
        BenchRun.__init__(one, Ranks(0, 1, DEVICE), BenchOptions(), console, link)
        for _ in range(2):  # measured once
            assert one.time_alone(messages, messages, torch.float32, "all_reduce", 64) == pytest.approx(1e3 * took)
    assert console.warn.call_count == warned
    assert not warned or "took 13.0 us on this GPU, not 10.0 us" in console.warn.call_args.args[0]
