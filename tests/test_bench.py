"""The benchmark: what it refuses, what it reports, that a wrong model stops it, and that its proofs can fail."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch

from ladderize.console import UsageError, UserError
from ladderize.demo.run import MODEL
from ladderize.runtime import launch as distributed
from ladderize.runtime.bench import reference_check
from ladderize.runtime.bench import run as bench
from ladderize.runtime.bench.cost_model import Operation, predict
from ladderize.runtime.bench.document import BenchDocument
from ladderize.runtime.bench.options import BenchOptions, ModelChoice, parse_batch_sizes
from ladderize.runtime.bench.plan import named_layout, plan_bench
from ladderize.runtime.bench.trace import cpu_overlap, gpu_overlap
from ladderize.runtime.collectives.base import Collectives, Handle
from ladderize.runtime.collectives.emulated import Emulated, Link, known_links, parse_link, sleep_until
from ladderize.runtime.collectives.observed import Recording
from tests.groups import traced_swaps
from tests.helpers import SHAPE, invoke, listing, make_model, one_sentence, save_llama

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
    with pytest.raises(UserError, match="measured with 4 and 8 ranks, not 2"):
        parse_link("nccl_nvlink_h100", 2)


def test_a_link_without_bandwidth_is_refused_above_its_range():
    link = parse_link("nccl_two_nodes_ib_ndr", 16)
    assert link.seconds(512) == pytest.approx(47e-6)
    with pytest.raises(UserError, match="known up to 512 bytes only"):
        link.seconds(513)


def test_the_table_is_the_published_one():
    path = REFERENCE / "all_reduce_latency.csv"
    if not path.is_file():
        pytest.skip("../shared/reference is not here")
    published = [
        line.split(",") for line in path.read_text().splitlines() if line and not line.startswith(("#", "path"))
    ]
    ours = {(link.name, ranks): (link.alpha_us, link.beta_gb_s) for ranks, link in known_links()}
    assert ours == {(row[0], int(row[1])): (float(row[2]), float(row[3]) if row[3] else None) for row in published}


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
    overlap = cpu_overlap(events, [6500, 1200])
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
    overlap = gpu_overlap(events)
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
        monkeypatch.setattr(bench, "emulate", lambda ranks, link, device, backend=backend: backend(ranks, link))
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
    assert (tmp_path / "picture.svg").read_text().startswith("<?xml")


def test_a_wrong_model_is_not_timed(tmp_path, monkeypatch):
    """The same files under a layout that they were not: the reference check has to see it."""
    make_model("ladder all", max_position_embeddings=128).save_pretrained(tmp_path / "m")
    right = reference_check.references

    def wrong(specs, device):
        noise = np.random.default_rng(0).normal(scale=0.01, size=(200, SHAPE["vocab_size"]))
        return {
            name: reference_check.Reference(r.ids, r.prompt, r.logits + noise[: len(r.logits)])
            for name, r in right(specs, device).items()
        }

    arguments = ["bench", tmp_path / "m", *QUICK]
    assert invoke(*arguments).code == 0
    monkeypatch.setattr(reference_check, "references", wrong)
    message = one_sentence(invoke(*arguments, "--out", tmp_path / "bench.json"))
    assert "off the fp32 reference" in message
    assert not (tmp_path / "bench.json").exists()
    monkeypatch.setattr(
        reference_check, "references", lambda specs, device: pytest.fail("--no-check asks for no reference")
    )
    outcome = invoke(*arguments, "--no-check")
    assert outcome.code == 0
    assert "Not checked against a reference" in outcome.stdout


@pytest.mark.parametrize(("dtype", "stops"), [("float32", True), ("bfloat16", False)])
def test_a_different_token_needs_a_margin_below_the_tolerance(tmp_path, dtype, stops):
    """Two logits nearly equal: bfloat16 may take either, float32 may not."""
    folder = tmp_path / "m"
    save_llama(folder, dtype=getattr(torch, dtype), max_position_embeddings=128)
    from ladderize.ranks.group import Ranks
    from ladderize.runtime.spec import checkpoint_spec
    from tests.groups import make_generator

    spec = checkpoint_spec(str(folder), tp_size=1)
    reference = reference_check._reference(spec, "cpu")
    torch.set_num_threads(1)
    logits = reference.logits.copy()
    step = reference.prompt + 5
    chosen, second = np.argsort(logits[step - 1])[::-1][:2]
    logits[step - 1, second] = logits[step - 1, chosen] + 1e-6  # the reference would have taken the other one
    ids = [*reference.ids[:step], int(second), *reference.ids[step + 1 :]]
    changed = reference_check.Reference(ids, reference.prompt, logits)
    generator = make_generator(folder, Ranks(0, 1, torch.device("cpu")), Collectives(), 1, len(ids))
    whole = generator.model.logits
    generator.model.logits = lambda hidden: whole(hidden) if hidden.shape[1] == 1 else torch.from_numpy(logits)[None]
    with torch.inference_mode():
        if stops:
            with pytest.raises(UserError, match="greedy decoding chose token"):
                reference_check.check_against_reference(generator, changed, spec)
        else:
            assert reference_check.check_against_reference(generator, changed, spec).equal_greedy_tokens <= 5


def test_random_weights_emulated_with_compile_off_and_more_virtual_ranks(tmp_path, shape):
    layouts = ["--layout", "dense,ladder=1:3,spd+ladder", "--sync-tp-size", 4, "--num-layers", 3]
    outcome = invoke("bench", "--random-weights", shape, *layouts, "--emulate-tp", 2, "--link", "10,1", *QUICK)
    assert outcome.code == 0, outcome.stderr
    assert outcome.stdout.startswith("EMULATED: rank 0 of 2")
    assert "(emulated)" in outcome.stdout
    assert "Weights are random" in outcome.stdout
    assert "was measured at" not in outcome.stdout
    outcome = invoke("bench", "--random-weights", shape, "--emulate-tp", 4, "--link", "nccl_pcie", *QUICK)
    assert "Beyond the sizes that nccl_pcie was measured at, so taken from its fit: messages of" in outcome.stdout


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        ([], 2, "name checkpoints, or a shape with --random-weights"),
        ([MODEL, "--random-weights", "8b"], 2, "and not both"),
        ([MODEL, "--layout", "dense"], 2, "--layout goes with --random-weights"),
        ([MODEL, "--num-layers", 4], 2, "--num-layers goes with --random-weights"),
        ([MODEL, MODEL], 2, "a model is named twice"),
        ([MODEL, "--link", "1,1"], 2, "--emulate-tp and --link go together"),
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
        ([MODEL, "--profile", "x"], 2, "--profile shows what communication runs under"),
        ([MODEL, "--out", "/nowhere/bench.json"], 1, "does not exist"),
        ([MODEL, "--plot", "/nowhere/bench"], 1, "does not exist"),
        (["--random-weights", "9b"], 1, "--random-weights 9b is neither one of 1b, 3b, 8b, 70b, 405b nor"),
        ([MODEL, "--backend", "none"], 2, "--backend none has no effect with one rank"),
        ([MODEL, "--backend", "none", "--tp-size", 2, "--profile", "x"], 2, "with --backend none there is none"),
        ([MODEL, "--emulate-tp", 2, "--link", "1e300,1"], 2, "alpha must be from 0"),
        ([MODEL, "--threads", 100000], 1, "is more than the"),
        ([MODEL, "--batch-size", 99999999999], 1, "out of memory"),
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
            "known up to 512 bytes only",
        ),
        (
            ["--random-weights", "8b", "--layout", "ladder", "--baselines", "parallel"],
            1,
            "needs a dense model in the first place",
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
    options = BenchOptions(emulate_tp=2, batch_sizes=parse_batch_sizes("1,4,1"), prompt_len=8)
    assert options.batch_sizes == (1, 4)
    plan = plan_bench(ModelChoice(random_weights=str(shape)), options, "1,1")
    assert [spec.name for spec in plan.specs] == ["dense", "ladder", "spd", "spd+ladder"]
    assert plan.options.ranks == 2
    assert plan.link.seconds(0) == pytest.approx(1e-6)


def test_too_large_for_the_reference(monkeypatch):
    from ladderize.runtime.spec import checkpoint_spec

    spec = checkpoint_spec(str(MODEL), tp_size=1)
    monkeypatch.setattr(reference_check, "parameter_count", lambda config: 10**15)
    with pytest.raises(UserError, match="--no-check leaves it out"):
        reference_check.references([spec], "cpu")
    monkeypatch.undo()
    # the one reader of free memory, which knows the limits of containers too
    monkeypatch.setattr(reference_check, "available_bytes", lambda device: 1000)
    with pytest.raises(UserError, match="1 kB are free; --no-check leaves it out"):
        reference_check.references([spec], "cpu")
