"""What the figures of the benchmarks are made of: links, emulated messages, traces, intervals."""

import math
import re
from unittest import mock

import pytest
import torch

from ladderize.checkpoint.config import EMBEDDING, expected_tensors
from ladderize.errors import UsageError
from ladderize.layout import Layout
from ladderize.ranks.group import Ranks
from ladderize.runtime import launch as distributed
from ladderize.runtime.bench import document, rounds
from ladderize.runtime.bench.document import PhaseCommunication, environment
from ladderize.runtime.bench.trace import Flight, cpu_flights, flights_of, gpu_flights, overlap_of
from ladderize.runtime.collectives.emulated import Emulated, emulate
from ladderize.runtime.collectives.links import (
    Link,
    known_interconnects,
    one_shot_limit,
    over_similar_wires,
    read_interconnect,
)
from ladderize.runtime.shards import Shape, decode_read_bytes, known_shapes, read_shape
from tests.groups import traced_swaps
from tests.helpers import ROOT
from tests.simulated_gpu.device import DEVICE, SimulatedGpu


def test_link_by_hand_and_by_name():
    link = read_interconnect("200,1").at(8)
    assert link.seconds(0) == pytest.approx(200e-6)
    assert link.seconds(10**9) == pytest.approx(1 + 200e-6)
    assert read_interconnect("nccl_nvlink_h100").at(8).alpha_us == 22
    assert read_interconnect("nccl_nvlink_h100").at(4).alpha_us == 18
    for text in ("fast", "1,2,3", "1,", "-1,5", "1,0", "nan,1"):
        with pytest.raises(UsageError, match="--link"):
            read_interconnect(text).at(8)


@pytest.mark.parametrize("wires", [("nvlink", 450.0), ("nvlink", 300.0), ("pcie", 15.75), ("pcie", 63.0)])
@pytest.mark.parametrize("ranks", [2, 3, 4, 8])
def test_at_the_limit_of_one_kernel_nccl_is_as_fast(ranks, wires):
    """By the links as ``plan`` takes them, where their bytes do not cross more wires than with the ranks measured."""
    size, one_shot, nccl = one_shot_limit(ranks, *wires), *(over_similar_wires(k, *wires) for k in ("one_shot", "nccl"))
    if ranks in [row.ranks for row in one_shot.rows]:
        times = [link.at(ranks).seconds(1e15 if math.isinf(size) else size) for link in (one_shot, nccl)]
        assert times[0] < times[1] if math.isinf(size) else times[0] == pytest.approx(times[1])
    assert size <= one_shot_limit(2, *wires)  # with every rank more bytes cross the same wires
    assert one_shot_limit(ranks, "host", 31.5) == one_shot_limit(ranks, "pcie", 15.75)  # where only NCCL was timed


def test_the_table_is_the_published_one():
    path = ROOT.parent / "shared" / "reference" / "all_reduce_latency.csv"
    if not path.is_file():
        pytest.skip("../shared/reference is not here")
    published = [line.split(",") for line in path.read_text().splitlines() if re.match("(?!#|path).", line)]
    ours = {(name, row.ranks): row for name, link in known_interconnects().items() for row in link.rows}
    for name, ranks, alpha, beta, *_ in published:
        if not beta:  # two machines: what is left of this beside the sum within each is a row of ours
            within = ours["nccl_nvlink_h100", 8].alpha_us
            assert within + ours[name, 2].alpha_us == float(alpha)
            continue
        row = ours[name, int(ranks)]
        assert (row.alpha_us, row.beta_gb_s) == (float(alpha), pytest.approx(float(beta)))


def test_emulated_messages_take_turns(monkeypatch):
    """A clock that stands still: two messages started together end one after the other, and nothing returns before its
    time."""
    slept = [100.0]
    monkeypatch.setattr("time.perf_counter", lambda: slept[-1])
    monkeypatch.setattr("ladderize.runtime.collectives.emulated.sleep_until", slept.append)
    link = Link("test", 1e6, 1e-9 * 4)  # a second, and a second for each 4 bytes
    emulated = Emulated(4, link)
    x = torch.ones(1)
    first, second = emulated.all_reduce_async(x), emulated.all_reduce_async(x)
    assert torch.equal(first.wait(), x)
    second.wait()
    assert slept[1:] == pytest.approx([102, 104])
    assert emulated.all_gather(x).shape == (4,)
    assert slept[-1] == pytest.approx(104 + 1 + 4)


def span(name, ts, dur, **extra):
    return {"ph": "X", "name": name, "ts": ts, "dur": dur, "pid": 1, "tid": 1, **extra}


def test_cpu_overlap_of_a_hand_made_trace():
    events = [span("all-reduce: start", 0, 1000), span("all-reduce: wait", 5000, 2000), span("aten::mm", 1000, 4000),
              span("all-reduce: start", 8000, 500), span("all-reduce: wait", 8500, 500)]  # fmt: skip
    overlap = overlap_of(cpu_flights(events, [6500, 1200]))
    assert overlap.in_flight_ms == pytest.approx(7.7)
    # the first blocked 3 ms of its 6.5 at start and wait; the second had no compute to run under
    assert overlap.under_compute_ms == pytest.approx(3.5)


def test_gpu_overlap_of_a_hand_made_trace():
    kernel = {"cat": "kernel"}
    events = [span("gemm", 0, 1000, **kernel), span("gemm", 500, 1500, **kernel), span("softmax", 3500, 100, **kernel)]
    events += [span("ncclDevKernel_AllReduce", 1000, 3000, **kernel), span("cpu thing", 0, 9999)]
    events += [span("at::cuda::spin_kernel", 9000, 1000, **kernel)]
    overlap = overlap_of(gpu_flights(events))
    assert overlap.in_flight_ms == pytest.approx(4)
    assert overlap.under_compute_ms == pytest.approx(1.1)


@pytest.mark.parametrize(
    ("name", "is_communication"),
    [
        ("ncclDevKernel_AllReduce_Sum_bf16_RING_LL(ncclDevKernelArgsStorage<4096ul>)", True),
        ("void vllm::cross_device_reduce_1stage<__nv_bfloat16, 8>(vllm::RankData*, vllm::RankSignals, ...)", True),
        ("void flashinfer::trtllm_allreduce_fusion::allreduce_fusion_kernel_oneshot_lamport<...>(...)", True),
        ("quickreduce::allreduce_prototype_twoshot<AllReduceTwoshot<__half, CodecQ4<__half, 8>, true>, __half>", True),
        ("void (anonymous namespace)::multimem_all_reduce_kernel<c10::BFloat16, 16>(c10::BFloat16*, ...)", True),
        ("ladderize_spin_kernel", True),
        ("void at::native::reduce_kernel<512, 1, at::native::ReduceOp<float, ...>>(...)", False),
        ("void cublasLt::splitKreduce_kernel<32, 16, int, float, __nv_bfloat16>(...)", False),
        ("triton_poi_fused_all_reduce_0", False),  # the copy that an all-reduce of torch is given
    ],
)
def test_kernels_of_communication_are_known_by_their_names(name, is_communication):
    assert len(gpu_flights([span(name, 0, 10, cat="kernel")])) == is_communication


def test_passes_are_told_apart():
    """A message belongs to the pass in which it was started, also where that pass runs twice."""
    flights = [Flight(5, 100, 10), Flight(19, 100, 20), Flight(20, 100, 50), Flight(45, 100, 90), Flight(90, 100, 0)]
    events = [
        span("forward", 0, 20, cat="user_annotation"),
        span("backward", 20, 20, cat="user_annotation"),
        span("forward", 40, 20, cat="user_annotation"),
        span("backward", 0, 100, cat="gpu_user_annotation"),
    ]
    found = {part: overlap_of(flights_of(part, flights, events)) for part in ("forward", "backward")}
    assert (found["forward"].in_flight_ms, found["forward"].under_compute_ms) == (0.3, 0.12)
    assert (found["backward"].in_flight_ms, found["backward"].under_compute_ms) == (0.1, 0.05)


def test_an_emulated_group_of_groups():
    joined = read_interconnect("100,1000").joined_by(read_interconnect("60e6,1000"), 4)
    emulated = emulate(8, joined.at(8), torch.device("cpu"), joined)
    split = emulated.split(4)
    assert (split.within.ranks, split.across.ranks) == (4, 2)
    split.across.all_reduce_async(torch.ones(3))  # is on its way for a minute, over another link than the next one
    split.within.all_reduce(torch.ones(3))
    assert split.across.peers.free_at - split.within.free_at > 30
    assert emulated.free_at == 0


def test_nothing_listens_to_a_profiler_that_has_stopped(tmp_path):
    """Gloo's receives that were posted under the profiler used to write into its freed memory: a crash, always."""
    assert distributed.run(traced_swaps, tmp_path, 5, tp_size=2, device="cpu", threads=1) == 5


def test_an_interval_holds_its_speed_up():
    """A round is slow in one of its phases, each in another round: no round is as fast as the medians."""
    slow_first, slow_last = [9.0, 9, 9, 1, 1, 1, 1], [1.0, 1, 1, 1, 9, 9, 9]
    reference = {phase: [2.0] * 7 for phase in ("prefill", "decode")}
    seconds = {"prefill": slow_first, "decode": slow_last}
    found = rounds.timed_figures(seconds, reference, {"prefill": 1, "decode": 1}, "end_to_end")
    low, high = found["speedup_interval"]["end_to_end"]
    assert low < found["speedup"]["end_to_end"] == 2 <= high


def test_a_rank_of_a_70b_reads_19_gb_for_a_token():
    shape = Shape.from_config(read_shape("70b"), tp_size=8, rank=0, replicate_vocab=True)
    assert decode_read_bytes(shape, Layout.dense(80), 1, 0, 2) / 1e9 == pytest.approx(19.22, abs=0.005)


@pytest.mark.parametrize("name", known_shapes())
def test_a_decode_step_reads_every_weight_and_the_cache(name):
    """Biases and norms of heads, which no rank splits up, are within a percent. A tied embedding is the LM head."""
    config, batch, columns = read_shape(name), 3, 700
    sizes = {name: math.prod(sides) for name, sides in expected_tensors(config).items()}
    rows = batch * config["hidden_size"]
    weights = sum(sizes.values()) + rows - (0 if config["tie_word_embeddings"] else sizes[EMBEDDING])
    shape = Shape.from_config(config, tp_size=1, rank=0)
    layout = Layout.dense(shape.layers)
    cache = 2 * shape.layers * shape.kv_heads * shape.head_dim * batch * columns
    read = decode_read_bytes(shape, layout, batch, columns, 2)
    assert read == pytest.approx(2 * (weights + cache), rel=0.01)
    of_eight = Shape.from_config(config, tp_size=8, rank=0)  # every one of which has a KV head of its own
    assert decode_read_bytes(of_eight, layout, batch, columns, 2) == pytest.approx(read / 8, rel=0.01)


def test_the_memory_of_a_known_gpu_has_a_rate():
    for name, gb_s in (("NVIDIA H200", 4800), ("simulated", None)):
        with SimulatedGpu(0), mock.patch.object(torch.cuda, "get_device_name", lambda *_, name=name: name):
            assert environment(Ranks(0, 1, DEVICE)).gpu_memory_gb_s == gb_s


def test_no_waiting_time_is_negative_or_clipped():
    for exposed, interval, waited in (
        (3.0, [2.0, 4.0], "3.000"),
        (-0.5, [-1.0, 2.0], "<2.000"),  # the rounds do not tell it from nothing
        (-229.0, [-300.0, -100.0], "?"),
    ):
        assert document.waited_text(PhaseCommunication(4, 64, 20.0, 5.0, exposed, interval)) == waited
