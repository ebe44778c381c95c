"""The benchmark: what it refuses, what it reports, that a wrong model stops it, and that its proofs can fail."""

import dataclasses
import json
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from ladderize.demo.inputs import MODEL
from ladderize.errors import UsageError, UserError
from ladderize.ranks.group import Ranks
from ladderize.runtime import launch as distributed
from ladderize.runtime import model as spd_model
from ladderize.runtime import spec
from ladderize.runtime.bench import harness, inference, reference_check, report, rows
from ladderize.runtime.bench import plan as bench_plan
from ladderize.runtime.bench.cost_model import Operation, predict
from ladderize.runtime.bench.document import BenchDocument
from ladderize.runtime.bench.options import BenchOptions, ModelChoice, named_layout, parse_counts
from ladderize.runtime.bench.plan import plan_bench
from ladderize.runtime.bench.rows import PhaseCommunication
from ladderize.runtime.bench.trace import Overlap, cpu_flights, gpu_flights
from ladderize.runtime.collectives.base import Collectives, Handle
from ladderize.runtime.collectives.emulated import Emulated, sleep_until
from ladderize.runtime.collectives.links import Link, known_interconnects, parse_link
from ladderize.runtime.collectives.observed import Recording
from ladderize.runtime.decode import Generator
from ladderize.runtime.kv_cache import KVCache
from ladderize.runtime.model import TPLlama
from tests.groups import report_and_die, report_once, traced_swaps
from tests.helpers import ROOT, SHAPE, invoke, listing, make_model, one_sentence
from tests.warm import PATIENCE

QUICK = ["--prompt-len", 8, "--output-len", 4, "--repeat", 2, "--warmup", 1, "--threads", 1]
REFERENCE = Path(__file__).parent.parent.parent / "shared" / "reference"


@pytest.fixture
def shape(tmp_path):
    path = tmp_path / "config.json"
    path.write_text(json.dumps({**SHAPE, "model_type": "llama"}))
    return path


# ---- links, delays, the cost model ----


def test_link_by_hand_and_by_name():
    link = parse_link("200,1", 8)
    assert link.seconds(0) == pytest.approx(200e-6)
    assert link.seconds(10**9) == pytest.approx(1 + 200e-6)
    assert parse_link("nccl_nvlink_h100", 8).alpha_us == 22
    assert parse_link("nccl_nvlink_h100", 4).alpha_us == 18
    for text in ("fast", "1,2,3", "1,", "-1,5", "1,0", "nan,1"):
        with pytest.raises(UsageError, match="--link"):
            parse_link(text, 8)
    with pytest.raises(UserError, match="measured with 4 and 8 ranks, not 32"):
        parse_link("nccl_nvlink_h100", 32)


def test_a_link_without_bandwidth_is_refused_above_its_range():
    link = parse_link("nccl_two_nodes_ib_ndr", 16)
    assert link.seconds(512) == pytest.approx(47e-6)
    with pytest.raises(UserError, match="was measured up to 512 bytes only"):
        link.seconds(513)


def test_the_table_is_the_published_one():
    path = REFERENCE / "all_reduce_latency.csv"
    if not path.is_file():
        pytest.skip("../shared/reference is not here")
    published = [
        line.split(",") for line in path.read_text().splitlines() if line and not line.startswith(("#", "path"))
    ]
    ours = {(name, row.ranks): row for name, link in known_interconnects().items() for row in link.rows}
    for name, ranks, alpha, beta, *_ in published:
        row = ours[name, int(ranks)]
        assert (row.alpha_us, row.beta_gb_s) == (float(alpha), pytest.approx(float(beta)) if beta else None)


def test_emulated_messages_take_turns(monkeypatch):
    """A clock that stands still: two messages started together end one after the other, and nothing returns before its
    time."""
    now = [100.0]
    slept = []
    monkeypatch.setattr("time.perf_counter", lambda: now[0])
    monkeypatch.setattr(
        "ladderize.runtime.collectives.emulated.sleep_until",
        lambda deadline: (slept.append(deadline), now.__setitem__(0, deadline)),
    )
    link = Link("test", 1e6, 1e-9 * 4)  # a second, and a second for each 4 bytes
    emulated = Emulated(4, link)
    x = torch.ones(1)
    first, second = emulated.all_reduce_async(x), emulated.all_reduce_async(x)
    assert torch.equal(first.wait(), x)
    second.wait()
    assert slept == pytest.approx([102, 104])
    assert emulated.all_gather(x).shape == (4,)
    assert slept[-1] == pytest.approx(104 + 1 + 4)


def test_sleep_until_is_never_early():
    import time

    for delay in (0.0, 1e-4, 4e-3):
        deadline = time.perf_counter() + delay
        sleep_until(deadline)
        assert time.perf_counter() >= deadline


def test_cost_model_sub_module_by_sub_module():
    operations = [Operation(8, 3.0, (5.0, 4.0)), Operation(8, 3.0, (2.0, 0.0)), Operation(8, 3.0, (0.0,))]
    prediction = predict(10.0, operations, unhideable=0.5)
    assert prediction.communication == 9.5
    assert prediction.hideable == 4.0
    assert prediction.exposed == 5.5
    assert prediction.total == 15.5


def test_recording_keeps_what_happened():
    ticks = iter(range(100))
    recording = Recording(Collectives(2), lambda: float(next(ticks)))
    handle = recording.all_reduce_async(torch.zeros(4))
    recording.all_reduce(torch.zeros(2))
    handle.wait()
    assert [seen.bytes for seen in recording.all_reduces] == [16, 8]
    first, second = recording.all_reduces
    assert first.started < second.start < second.end <= first.wait


# ---- proof of overlap ----


def span(name, ts, dur, **extra):
    return {"ph": "X", "name": name, "ts": ts, "dur": dur, "pid": 1, "tid": 1, **extra}


def test_cpu_overlap_of_a_hand_made_trace():
    events = [span("all-reduce: start", 0, 1000), span("all-reduce: wait", 5000, 2000), span("aten::mm", 1000, 4000),
              span("all-reduce: start", 8000, 500), span("all-reduce: wait", 8500, 500)]  # fmt: skip
    overlap = Overlap.of_flights(cpu_flights(events, [6500, 1200]))
    assert overlap.in_flight_ms == pytest.approx(7.7)
    # the first blocked 3 ms of its 6.5 at start and wait; the second had no compute to run under
    assert overlap.under_compute_ms == pytest.approx(3.5)
    assert len([event for event in events if event.get("cat") == "communication"]) == 2


def test_gpu_overlap_of_a_hand_made_trace():
    kernel = {"cat": "kernel"}
    events = [span("gemm", 0, 1000, **kernel), span("gemm", 500, 1500, **kernel), span("softmax", 3500, 100, **kernel)]
    events += [
        span("ncclDevKernel_AllReduce", 1000, 3000, **kernel),
        span("at::cuda::spin_kernel", 9000, 1000, **kernel),
    ]
    events += [span("cpu thing", 0, 9999)]
    overlap = Overlap.of_flights(gpu_flights(events))
    assert overlap.in_flight_ms == pytest.approx(4)
    assert overlap.under_compute_ms == pytest.approx(1.1)


class Early(Emulated):
    """A backend that claims to be asynchronous and blocks at the start."""

    def all_reduce_async(self, x):
        total = super().all_reduce_async(x).wait()
        return Handle(lambda: total)


class Late(Emulated):
    """One that blocks at the wait."""

    def all_reduce_async(self, x):
        return Handle(lambda: super(Late, self).all_reduce_async(x).wait())


def test_profile_proves_overlap_and_fails_without_it(tmp_path, shape, monkeypatch):
    arguments = [
        "bench",
        "--random-weights",
        shape,
        "--layout",
        "dense,ladder",
        "--emulate-tp",
        4,
        "--link",
        "300,1",
        *QUICK,
    ]
    outcome = invoke(*arguments, "--profile", tmp_path / "traces", "--json")
    assert outcome.code == 0, outcome.stderr
    document = json.loads(outcome.stdout)
    assert_there_and_back(document)
    dense, ladder = document["rows"]
    assert "proven" not in dense["overlap"]
    assert ladder["overlap"]["proven"] is True
    assert ladder["overlap"]["share"] > 2 * dense["overlap"]["share"]
    assert listing(tmp_path / "traces") == ["0-dense-batch1-rank0.json", "1-ladder-batch1-rank0.json"]
    events = json.loads((tmp_path / "traces" / "1-ladder-batch1-rank0.json").read_text())["traceEvents"]
    assert any(event.get("tid") == "communication" for event in events)
    for backend in (Early, Late):
        monkeypatch.setattr(harness, "emulate", lambda ranks, link, device, backend=backend: backend(ranks, link))
        outcome = invoke(*arguments, "--profile", tmp_path / "traces")
        assert outcome.code == 1
        assert "nothing overlapped in the trace of ladder" in outcome.stderr.splitlines()[-1]


def test_nothing_listens_to_a_profiler_that_has_stopped(tmp_path):
    """Gloo's receives that were posted under the profiler used to write into its freed memory: a crash, always."""
    assert distributed.run(traced_swaps, tmp_path, 5, tp_size=2, device="cpu", threads=1) == 5


# ---- whole runs ----


def assert_there_and_back(document):
    """A bench.json, read and written again."""
    rest = {key: value for key, value in document.items() if key not in ("schema_version", "ladderize_version")}
    assert BenchDocument.from_dict(document, "bench.json").to_dict() == rest


def test_two_real_ranks_on_checkpoints(tmp_path):
    for name, arguments in (
        ("ladder", ["--ladder", "all"]),
        ("both", ["--ladder", "all", "--spd", "all", "--sync-tp-size", 4]),
    ):
        assert invoke("convert", MODEL, tmp_path / name, "--no-verify", *arguments).code == 0
    out = tmp_path / "bench.json"
    outcome = invoke(
        "bench",
        MODEL,
        tmp_path / "ladder",
        tmp_path / "both",
        "--tp-size",
        2,
        "--batch-size",
        "1,2",
        "--baselines",
        "parallel,no-comm",
        "--prompt-len",
        8,
        "--output-len",
        4,
        "--repeat",
        2,
        "--warmup",
        1,
        "--out",
        out,
        "--plot",
        tmp_path / "picture",
    )
    assert outcome.code == 0, outcome.stderr
    assert "both" in outcome.stdout
    document = json.loads(out.read_text())
    assert_there_and_back(document)
    assert document["emulated"] is False
    assert document["backend"].startswith("shm")
    assert set(document["checks"]) == {str(MODEL), str(tmp_path / "ladder"), str(tmp_path / "both")}
    assert all(check["logit_difference"] < check["tolerance"] for check in document["checks"].values())
    rows = document["rows"]
    assert [row["batch_size"] for row in rows] == [1] * 5 + [2] * 5
    assert [row["kind"] == "model" for row in rows[:5]] == [True, False, True, True, False]
    layers, hidden = 8, 128
    for row, reduces in zip(rows[:5], (2 * layers, None, 2 * layers, layers, layers), strict=True):
        assert row["speedup_decode"] > 0
        assert len(row["samples_ms"]["prefill"]) == 2
        assert row["output_tokens_per_s"] == pytest.approx(row["batch_size"] * row["tokens_per_s_per_user"])
        assert row["end_to_end_ms"] == pytest.approx(row["prefill_ms"] + 3 * row["decode_ms_per_token"])
        assert (row["peak_memory_bytes"] or row["weight_bytes"] + row["kv_cache_bytes"]) >= row["weight_bytes"]
        if reduces is None:
            assert not {"communication", "no_communication_samples_ms"} & row.keys()
        else:
            for phase, tokens in (("prefill", 8), ("decode", 1)):
                assert row["communication"][phase]["all_reduces"] == reduces
                assert row["communication"][phase]["bytes"] == reduces * tokens * hidden * 2
    assert (tmp_path / "picture.png").stat().st_size > 1000
    assert (tmp_path / "picture.svg").read_text().startswith("<svg ")


# ---- the reference check: what it has to see ----


def ignored_padding(monkeypatch):
    read = Generator.read
    monkeypatch.setattr(Generator, "read", lambda self, ids, padding=None: read(self, ids))


def wrong_rope_beyond_64_positions(monkeypatch):
    table = spec.rope_table

    def stuck(config, positions, device):
        right = table(config, positions, device)
        return right[torch.arange(positions).clamp(max=63)]

    monkeypatch.setattr(spec, "rope_table", stuck)


def a_window_on_the_kv_cache(monkeypatch):
    read = KVCache.read

    def window(self, layer, length):
        keys, values = (part.clone() for part in read(self, layer, length))
        keys[:, :, : max(0, length - 64)] = 0
        values[:, :, : max(0, length - 64)] = 0
        return keys, values

    monkeypatch.setattr(KVCache, "read", window)


def a_rank_of_dropped_points_left_out(monkeypatch):
    right = spd_model.mlp_inner
    monkeypatch.setattr(
        spd_model, "mlp_inner", lambda weights, x, carry: right(weights, x, carry and [carry[0]] * len(carry))
    )


def one_weight_is_off(monkeypatch):
    load = spec.load_weights

    def off(*arguments, **more):
        weights = load(*arguments, **more)
        weights.attention(1).norm.weight[3] += 0.5
        weights.attention(1).norm.doubled[3] += 0.5
        return weights

    monkeypatch.setattr(spec, "load_weights", off)


@pytest.fixture(scope="module")
def checked_model(tmp_path_factory):
    """A model of which no two tokens are all but as good in the texts of the check: rounding chooses none."""
    while True:
        folder = tmp_path_factory.mktemp("checked") / "m"
        make_model("mixed", max_position_embeddings=160).save_pretrained(folder)
        reference = reference_check.compute_reference(spec.checkpoint_spec(str(folder), tp_size=1), "cpu", 8)
        torch.set_num_threads(1)
        ranked = np.sort(reference.logits, -1)
        if (ranked[..., -1] - ranked[..., -2]).min() > 1e-4:
            return folder


def test_the_right_model_passes_the_check(checked_model):
    outcome = invoke("bench", checked_model, *QUICK, "--json")
    assert outcome.code == 0, outcome.stderr
    (check,) = json.loads(outcome.stdout)["checks"].values()
    # the prompts are longer than those that are timed, so that a wrong position shows
    assert check["prompt_tokens"] == [64, 43]
    assert check["decode_steps"] == 32
    assert check["equal_greedy_tokens"] == check["greedy_tokens"] == 2 * 2 * 33
    assert check["logit_difference"] < check["tolerance"]
    said = invoke("bench", checked_model, *QUICK).stdout
    assert "Reference check of m: passed. Largest logit difference to transformers in float32" in said
    assert "all 132 tokens equal" in said


@pytest.mark.parametrize(
    "fault",
    [
        ignored_padding,
        wrong_rope_beyond_64_positions,
        a_window_on_the_kv_cache,
        a_rank_of_dropped_points_left_out,
        one_weight_is_off,
    ],
)
@pytest.mark.parametrize("emulated", [(), ("--emulate-tp", 2, "--link", "1,1")], ids=["one rank", "emulated"])
def test_a_wrong_model_is_not_timed(checked_model, tmp_path, monkeypatch, fault, emulated):
    fault(monkeypatch)
    message = one_sentence(invoke("bench", checked_model, *QUICK, *emulated, "--out", tmp_path / "bench.json"))
    assert "off the fp32 reference" in message
    assert "nothing was timed" in message
    assert not (tmp_path / "bench.json").exists()


@pytest.mark.parametrize("layout", ["dense", "ladder", "spd+ladder"])
def test_a_sum_that_is_left_out_under_emulation(shape, monkeypatch, layout):
    """Emulated sums are delays: nobody sees in the logits that one was not even begun."""
    forward = TPLlama.forward

    class LeavesOut(Collectives):
        def __init__(self, inner):
            super().__init__(inner.ranks)
            self.inner, self.count = inner, 0

        def all_reduce_async(self, x):
            self.count += 1
            return Handle(lambda: x) if self.count == 3 else self.inner.all_reduce_async(x)

        def all_gather(self, x):
            return self.inner.all_gather(x)

    def mutated(self, ids, step, cache, schedule):
        whole = self.collectives
        self.collectives = LeavesOut(whole)
        try:
            return forward(self, ids, step, cache, schedule)
        finally:
            self.collectives = whole

    monkeypatch.setattr(TPLlama, "forward", mutated)
    arguments = ["--random-weights", shape, "--layout", layout, "--emulate-tp", 2, "--link", "1,1", *QUICK]
    message = one_sentence(invoke("bench", *arguments))
    reduces = {"dense": 9, "ladder": 9, "spd+ladder": 5}[layout]
    assert f"{layout}: a prefill completed {reduces - 1} all-reduces ({reduces - 1} of 512 bytes)" in message
    assert f"its layout asks for {reduces} all-reduces ({reduces} of 512 bytes)" in message


def test_without_the_check_results_say_so(checked_model, monkeypatch):
    monkeypatch.setattr(
        reference_check, "references", lambda specs, options: pytest.fail("--no-check asks for no reference")
    )
    outcome = invoke("bench", checked_model, *QUICK, "--no-check")
    assert outcome.code == 0, outcome.stderr
    assert "Not checked against a reference" in outcome.stdout


@pytest.mark.parametrize(("dtype", "stops"), [("float32", True), ("bfloat16", False)])
def test_a_different_token_needs_a_margin_below_the_tolerance(dtype, stops):
    """The reference prefers another token by a hundredth of its logits' deviation: what bfloat16's rounding explains,
    and float32's does not."""
    model = spec.checkpoint_spec(str(MODEL), tp_size=1, dtype=dtype)
    reference = reference_check.compute_reference(model, "cpu", 8)
    torch.set_num_threads(1)
    logits = reference.logits.copy()
    ranked = np.sort(logits[0], -1)
    place = int((ranked[:, -1] - ranked[:, -2]).argmin())  # where two tokens are all but as good
    best, second = np.argsort(logits[0, place])[::-1][:2]
    logits[0, place, [best, second]] = logits[0, place, best] + np.array([-0.005, 0.005]) * logits.std()
    changed = dataclasses.replace(reference, logits=logits)
    weights = spec.WeightCache(torch.device("cpu"), pack=False)
    ranks = Ranks(0, 1, torch.device("cpu"))
    generator = spec.open_generator(model, Collectives(), weights, ranks, 2, len(reference.ids[0]))
    with torch.inference_mode():
        right = reference_check.check_against_reference(generator, reference, model)
        if stops:
            with pytest.raises(UserError, match="off the fp32 reference"):
                reference_check.check_against_reference(generator, changed, model)
        else:
            assert reference_check.check_against_reference(generator, changed, model).tolerance > 0
            assert right.equal_greedy_tokens <= right.greedy_tokens


def test_lengths_of_the_checked_texts():
    lengths = reference_check.text_lengths
    assert lengths(131072, 128) == (128, 86, 32)
    assert lengths(131072, 4096) == (256, 171, 32)  # a long reference would take as long as the benchmark
    assert lengths(131072, 4) == (64, 43, 32)
    assert lengths(64, 32) == (32, 22, 32)
    assert lengths(2, 1) == (1, 1, 1)


# ---- spread, and what is shown of it ----


def test_intervals_of_rounds_that_agree_and_that_do_not():
    slow, fast = [10.0, 11.0, 12.0, 13.0, 14.0], [5.0, 5.5, 6.0, 6.5, 7.0]
    assert rows.speedup_interval(slow, fast) == pytest.approx([2, 2])  # in every round
    low, high = rows.speedup_interval(slow, list(reversed(slow)))
    assert low < 1 < high
    assert rows.difference_interval(slow, [x - 3 for x in slow]) == pytest.approx([3, 3])
    assert rows.quartiles(slow) == [11, 13]


def test_an_interval_holds_its_speed_up():
    """A round is slow in one of its phases, each in another round: no round is as fast as the medians."""
    slow_first, slow_last = [9.0, 9, 9, 1, 1, 1, 1], [1.0, 1, 1, 1, 9, 9, 9]
    reference = {phase: [2.0] * 7 for phase in rows.PHASES}
    found = rows.inference_figures({"prefill": slow_first, "decode": slow_last}, reference, 1, 1)
    low, high = found["speedup_end_to_end_interval"]
    assert low < found["speedup_end_to_end"] == 2 <= high


def communication(exposed, interval, alone=5.0):
    figures = {"no_communication_ms": 20.0, "alone_ms": alone, "vocabulary_alone_ms": 0.0, "exposed_ms": exposed}
    missing = dict.fromkeys(("hideable_ms", "hidden_share", "predicted_ms"))
    return PhaseCommunication(
        all_reduces=4, bytes=64, exposed_interval_ms=list(interval), hidden_ms=alone - exposed, **figures, **missing
    )


@pytest.mark.parametrize(
    ("exposed", "interval", "waited", "hidden"),
    [
        (3.0, (2.0, 4.0), "3.000", "2.000"),
        (-0.5, (-1.0, 2.0), "<2.000", ">3.000"),  # the rounds do not tell it from nothing
        (1.0, (-9.0, 9.0), "<9.000", "?"),
        (-229.0, (-300.0, -100.0), "?", "?"),  # no waiting time is negative
        (12.7, (11.0, 13.0), "12.70", "none"),  # it waited for longer than the communication takes alone
    ],
)
def test_no_waiting_time_is_negative_or_clipped(exposed, interval, waited, hidden):
    found = communication(exposed, interval)
    assert report.waited_text(found) == waited
    assert report.hidden_text(found) == hidden


def test_what_is_doubtful_is_said(shape, monkeypatch):
    """Rounds that disagree by more than the models differ, and a model that is slower without communication."""
    arguments = ["--random-weights", shape, "--layout", "dense,ladder", "--emulate-tp", 2, "--link", "1,1"]
    given = iter(range(10**6))

    def time_pass(timed):
        noise = 1 + (next(given) * 7 % 10) / 2
        return (noise, noise)

    monkeypatch.setattr(inference.TimedGenerator, "sample", time_pass)
    outcome = invoke("bench", *arguments, *QUICK, "--repeat", 9)
    assert outcome.code == 0, outcome.stderr
    assert "Warning: the rounds disagree by more than the models differ" in outcome.stderr
    assert "ladder (batch 1, prefill)" in outcome.stderr
    head = next(line for line in outcome.stdout.splitlines() if line.startswith("model"))
    assert "95 % interval" in head
    assert "waited ms  hidden ms  comm. alone ms" in head

    def backwards(timed):
        return (1.0, 1.0) if timed.generator.model.collectives.name == "none" else (0.5, 0.5)

    monkeypatch.setattr(inference.TimedGenerator, "sample", backwards)
    outcome = invoke("bench", *arguments, *QUICK)
    assert "Warning: without communication these were slower than with it" in outcome.stderr
    assert "-500" not in outcome.stdout


def test_a_single_round_has_no_interval(shape):
    arguments = ["--random-weights", shape, "--layout", "dense,ladder", "--emulate-tp", 2, "--link", "1,1"]
    outcome = invoke("bench", *arguments, *QUICK, "--repeat", 1)
    assert "Warning: with fewer than 3 rounds their scatter is unknown" in outcome.stderr
    assert "one round" in outcome.stdout
    assert not re.search(r"\d-\d", outcome.stdout.split("speed-up: over")[0])


# ---- what fails late loses nothing ----


def test_results_are_written_before_traces_are_made(tmp_path, shape, monkeypatch):
    def broken(*arguments):
        seen.append(json.loads((tmp_path / "bench.json").read_text()))
        raise UserError("the disk is full")

    seen = []
    monkeypatch.setattr(inference, "trace", broken)
    arguments = ["--random-weights", shape, "--layout", "dense,ladder", "--emulate-tp", 2, "--link", "1,1", *QUICK]
    outputs = ["--out", tmp_path / "bench.json", "--plot", tmp_path / "picture"]
    outcome = invoke("bench", *arguments, *outputs, "--profile", tmp_path / "traces", "--batch-size", "1,2")
    assert outcome.code == 1
    assert outcome.stderr.splitlines()[-1] == "Error: the disk is full"
    document = json.loads((tmp_path / "bench.json").read_text())
    assert_there_and_back(document)
    assert document == seen[0]
    assert document["complete"] is False
    assert [(row["model"], row["batch_size"]) for row in document["rows"]] == [("dense", 1), ("ladder", 1)]
    assert "UNFINISHED" in outcome.stdout
    assert "Prefill (emulated)" in outcome.stdout
    assert (tmp_path / "picture.png").is_file()


def test_what_a_rank_reports_is_heard_before_it_dies():
    heard = []
    with pytest.raises(UserError, match="rank 0 was killed by SIGKILL"):
        distributed.run(report_and_die, tp_size=2, device="cpu", threads=1, report=heard.append)
    assert heard == ["rank 0 of 2", "again"]
    assert distributed.run(report_once, tp_size=1, device="cpu", threads=1, report=heard.append) == 7
    assert heard[2:] == ["alone"]


def test_first_words_come_before_torch(tmp_path):
    """What argv alone decides is said without seconds of imports, and other runs begin with a line."""
    script = (
        "import sys\nfrom ladderize.cli import main\nimport ladderize.console as c\n"
        "say = c._say\n"
        "c._say = lambda text, **more: (print('torch' in sys.modules, text), sys.stdout.flush())\n"
        "main()"
    )

    def first(*arguments):
        command = [sys.executable, "-c", script, "bench", *map(str, arguments)]
        done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, timeout=PATIENCE, check=False)
        return done.stdout.splitlines()[0]

    assert first(MODEL, "--batch-size", "1,x").startswith("False Error: --batch-size '1,x'")
    assert first(MODEL, "--layout", "dense").startswith("False Error: --layout goes with --random-weights")
    assert first("/no/such/model") == "False loading torch"


# ---- random weights ----


def test_random_weights_emulated_with_compile_off_and_more_virtual_ranks(tmp_path, shape):
    layouts = ["--layout", "dense,ladder=1:3,spd+ladder", "--sync-tp-size", 4, "--num-layers", 3]
    outcome = invoke("bench", "--random-weights", shape, *layouts, "--emulate-tp", 2, "--link", "10,1", *QUICK)
    assert outcome.code == 0, outcome.stderr
    assert outcome.stdout.startswith("EMULATED: rank 0 of 2")
    assert "(emulated)" in outcome.stdout
    assert "Weights are random" in outcome.stdout
    assert "was measured at" not in outcome.stderr
    outcome = invoke("bench", "--random-weights", shape, "--emulate-tp", 4, "--link", "nccl_pcie", *QUICK)
    assert "extrapolated beyond the sizes that nccl_pcie was measured at: messages of" in outcome.stderr


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        ([], 2, "name checkpoints, or a shape with --random-weights"),
        ([MODEL, "--random-weights", "8b"], 2, "and not both"),
        ([MODEL, "--layout", "dense"], 2, "--layout goes with --random-weights"),
        ([MODEL, "--num-layers", 4], 2, "--num-layers goes with --random-weights"),
        ([MODEL, MODEL], 2, "a model is named twice"),
        ([MODEL, "--link", "1,1"], 2, "--emulate-tp and --link must be given together"),
        ([MODEL, "--emulate-tp", 2, "--link", "1,1", "--tp-size", 2], 2, "leave --tp-size out"),
        (
            [MODEL, "--emulate-tp", 2, "--link", "1,1", "--backend", "gloo"],
            2,
            "--backend has no effect with --emulate-tp",
        ),
        ([MODEL, "--emulate-tp", 3, "--link", "1,1"], 1, "--emulate-tp 3 does not divide"),
        ([MODEL, "--batch-size", "1,x"], 2, "--batch-size '1,x' is not a comma-separated list"),
        ([MODEL, "--baselines", "magic"], 2, "--baselines magic is not one of"),
        ([MODEL, "--prompt-len", 100000], 1, "over the model's"),
        ([MODEL, "--profile", "x"], 2, "--profile measures overlap of communication with compute"),
        ([MODEL, "--out", "/nowhere/bench.json"], 1, "does not exist"),
        ([MODEL, "--plot", "/nowhere/bench"], 1, "does not exist"),
        (["--random-weights", "9b"], 1, "--random-weights 9b is neither one of 1b, 3b, 8b, 70b, 405b nor"),
        ([MODEL, "--backend", "none"], 2, "--backend none has no effect with one rank"),
        ([MODEL, "--backend", "none", "--tp-size", 2, "--profile", "x"], 2, "--backend none has no communication"),
        ([MODEL, "--emulate-tp", 2, "--link", "1e300,1"], 2, "alpha must be from 0"),
        ([MODEL, "--threads", 100000], 1, "is more than the"),
        ([MODEL, "--batch-size", 99999999999], 1, "are free; choose a smaller model"),
        (
            [MODEL, "--batch-size", 99999999999, "--emulate-tp", 2, "--link", "1,1"],
            1,
            "are free; choose a smaller model",
        ),
        (["--random-weights", "405b", "--tp-size", 1], 1, "weights take 812 GB"),
        (["--random-weights", "8b", "--num-layers", 10**9], 2, "--num-layers 1000000000 is not from 1 to 10,000"),
        (["--random-weights", "8b", "--num-layers", 10000], 1, "are free; choose a smaller model"),
        (["--random-weights", "8b", "--no-check"], 2, "--no-check has no effect"),
        (["--random-weights", "8b", "--layout", "ladder,domino"], 2, "--layout domino is not one of"),
        (["--random-weights", "8b", "--layout", "ladder=30:40"], 1, "out of range for a model of 32 layers"),
        (["--random-weights", "8b", "--layout", "dense", "--sync-tp-size", 8], 2, "--sync-tp-size has no effect"),
        (
            ["--random-weights", "8b", "--layout", "spd", "--sync-tp-size", 6, "--emulate-tp", 8, "--link", "1,1"],
            1,
            "6",
        ),
        (
            ["--random-weights", "8b", "--emulate-tp", 16, "--link", "nccl_two_nodes_ib_ndr"],
            1,
            "was measured up to 512 bytes only",
        ),
        (
            ["--random-weights", "8b", "--layout", "ladder", "--baselines", "parallel"],
            1,
            "needs a dense model as the first one",
        ),
    ],
)
def test_bad_arguments(arguments, code, message):
    outcome = invoke("bench", *arguments)
    assert message in one_sentence(outcome)
    assert outcome.code == code


def test_named_layouts():
    assert named_layout("dense", 4, 2).is_dense
    assert named_layout("ladder=2:", 4, 2).ladder_layers == [2, 3]
    both = named_layout("spd+ladder", 4, 2)
    assert both.spd_layers == [0, 1, 2, 3]
    assert both.ladder_layers == [1, 2, 3]  # nothing enters the first layer
    assert both.sync_tp_size == 2


def test_the_default_layouts(shape):
    options = BenchOptions(emulate_tp=2, batch_sizes=parse_counts("1,4,1"), prompt_len=8)
    assert options.batch_sizes == (1, 4)
    plan = plan_bench(ModelChoice(random_weights=str(shape)), options, "1,1")
    assert [spec.name for spec in plan.specs] == ["dense", "ladder", "spd", "spd+ladder"]
    assert plan.options.ranks == 2
    assert plan.link.seconds(0) == pytest.approx(1e-6)


def test_too_large_for_the_reference(monkeypatch):
    model = spec.checkpoint_spec(str(MODEL), tp_size=1)
    monkeypatch.setattr(reference_check, "parameter_count", lambda config: 10**15)
    with pytest.raises(UserError, match="--no-check skips it"):
        reference_check.references([model], BenchOptions())
    monkeypatch.undo()
    # the one reader of free memory, which knows the limits of containers too
    monkeypatch.setattr(reference_check, "available_bytes", lambda device: 1000)
    with pytest.raises(UserError, match="1 kB are free; --no-check skips it"):
        reference_check.references([model], BenchOptions())


def test_memory_is_checked_before_it_is_taken(monkeypatch):
    """Weights exactly, the cache exactly; and a checkpoint that emulation would have to load whole."""
    model = spec.checkpoint_spec(str(MODEL), tp_size=1)
    alone = Ranks(0, 1, torch.device("cpu"))
    options = BenchOptions(batch_sizes=(1, 3), prompt_len=8, output_len=4)
    weights = spec.WeightCache(alone.device, pack=False)
    generator = spec.open_generator(model, Collectives(), weights, alone, 3, 12)
    need = bench_plan.memory_need([model, model], options, alone.device)
    own = generator.model.weights.resident_bytes
    assert own <= need.weights <= 1.3 * own  # packed, the tied LM head is a copy
    assert need.kv_cache == generator.cache.nbytes
    monkeypatch.setattr(bench_plan, "available_bytes", lambda device: need.total)
    bench_plan.check_bench_memory([model], options, alone)
    with pytest.raises(UserError, match="on each of 2 ranks, and"):
        bench_plan.check_bench_memory([model], options, dataclasses.replace(alone, local_size=2))
    monkeypatch.setattr(bench_plan, "parameter_count", lambda config: 10**15)
    emulated = dataclasses.replace(options, emulate_tp=2)
    with pytest.raises(UserError, match="runs the whole model, which takes .*--no-check skips it"):
        bench_plan.check_bench_memory([model], emulated, alone)
    bench_plan.check_bench_memory([model], dataclasses.replace(emulated, check=False), alone)
