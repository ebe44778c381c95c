"""The time model of plan: its limits in closed form, layouts against a slow simulation, links, devices, bands, fits."""

import dataclasses
import json
import math
import random

import pytest
import torch

from ladderize.errors import UserError
from ladderize.layout import APART, BLOCKING, DELAYED, DROPPED, Layout
from ladderize.plan.hardware import LIKE_ANOTHER, DeviceSpec, EngineFacts, known_devices, known_engines, read_device
from ladderize.plan.passes import (
    CASES,
    Errors,
    PassParts,
    Serving,
    pass_parts,
    predict_parallel,
    predict_pass,
    predict_silent,
)
from ladderize.plan.rows import memory_need, planned_rows, relative_band
from ladderize.runtime.collectives.links import NO_LINK, Interconnect, InterconnectRow, Link, known_interconnects
from ladderize.runtime.kv_cache import KVCache
from ladderize.runtime.shards import Shape, cache_bytes
from tests.helpers import held_bytes, random_layout

# an engine that does nothing but its products
NOTHING = {field.name: 0 for field in dataclasses.fields(EngineFacts) if field.name != "cache_bytes"}
BARE = EngineFacts(**{**NOTHING, "name": "bare", "source": "a test"})
INSTANT = 1e30  # of a rate: whatever needs it takes no time


def random_config() -> dict[str, object]:
    heads, kv_heads, head_dim = (*random.choice([(8, 8), (16, 8), (16, 2)]), random.choice([32, 64]))
    return {
        "vocab_size": random.randint(100, 999) * 8, "hidden_size": heads * head_dim,
        "intermediate_size": random.randint(10, 99) * 64, "num_hidden_layers": random.randint(2, 9),
        "num_attention_heads": heads, "num_key_value_heads": kv_heads, "head_dim": head_dim,
    }  # fmt: skip


def a_device(**changes: object) -> DeviceSpec:
    spec = DeviceSpec(
        "test", random.uniform(1e3, 4e3), {"bfloat16": random.uniform(200, 900)}, None, random.uniform(0.5, 1),
        random.uniform(0.3, 1), random.uniform(1, 4), random.uniform(1, 6), 0.05, "published", False, "a test",
    )  # fmt: skip
    return dataclasses.replace(spec, **changes)


def only(**rates: float) -> DeviceSpec:
    """A device of whose limits only the given ones hold."""
    gb_s, tflop_s = rates.get("gb_s", INSTANT), rates.get("tflop_s", INSTANT)
    return DeviceSpec("only", gb_s, {"bfloat16": tflop_s}, None, 1, 1, 0, 0, 0, "published", False, "a test")


def parts_of(
    config, device, engine=BARE, link=NO_LINK, ranks=1, workload=(1, 64, 16), virtual=None, contention=0.0, fp8=False
):
    """Parts by phase. workload: batch size, and lengths of prompt and output."""
    over = Interconnect(link.name, [], contention, 0, False, "a test", any_ranks=link)
    sent = () if link is NO_LINK else (over,)
    return pass_parts(Serving(config, "bfloat16", fp8, device, engine, sent, ranks, *workload), virtual)


def layer_weights(config) -> int:
    hidden, width = config["hidden_size"], config["head_dim"]
    attention = 2 * hidden * width * (config["num_attention_heads"] + config["num_key_value_heads"])
    return attention + 3 * hidden * config["intermediate_size"]


# ---- limits in closed form ----


def test_without_a_limit_of_bandwidth_only_arithmetic_counts():
    config, batch, prompt = random_config(), random.randint(1, 5), random.randint(2, 99)
    rate = random.uniform(0.1, 9)
    parts = parts_of(config, only(tflop_s=rate), workload=(batch, prompt, 2))["prefill"]
    pairs = batch * prompt * (prompt + 1) / 2
    scores = 4 * pairs * config["num_attention_heads"] * config["head_dim"]
    products = 2 * batch * prompt * layer_weights(config)
    head = 2 * batch * config["hidden_size"] * config["vocab_size"]
    layers = config["num_hidden_layers"]
    expected = (layers * (products + scores) + head) / (rate * 1e12)
    assert predict_silent(parts).total == pytest.approx(expected)
    assert predict_pass(parts, Layout.dense(layers)).total == pytest.approx(expected)  # one rank sends nothing
    assert predict_parallel(parts).total == pytest.approx(expected)


@pytest.mark.parametrize("fp8", [False, True])
@pytest.mark.parametrize("ranks", [1, 2, 4, 8])
def test_without_a_limit_of_arithmetic_decoding_reads_weights_and_cache(ranks, fp8):
    """With FP8 a weight is one byte, and so is a number that a product reads; attention's output is rounded by a kernel
    that reads two."""
    config, prompt, output = random_config(), random.randint(2, 99), random.randint(2, 99)
    rate, layers = random.uniform(1, 99), config["num_hidden_layers"]
    device = dataclasses.replace(only(gb_s=rate), matmul_tflop_s={"bfloat16": INSTANT, "float8": INSTANT})
    parts = parts_of(config, device, ranks=ranks, workload=(1, prompt, output), fp8=fp8)["decode"]
    heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
    width, hidden, inner = config["head_dim"], config["hidden_size"], config["intermediate_size"] // ranks
    heads, kv_heads = heads // ranks, max(1, kv_heads // ranks)  # KV heads are held twice where there are too few
    outputs = heads * width + 2 * kv_heads * width
    weights = hidden * outputs + heads * width * hidden + 3 * hidden * inner
    read, written = hidden + heads * width + hidden + inner, outputs + hidden + 2 * inner + hidden
    mean_context = sum(prompt + step for step in range(1, output)) / (output - 1)
    cache = 2 * kv_heads * width * mean_context
    vocab = math.ceil(config["vocab_size"] / ranks)
    rounding = (2 + 1) * heads * width if fp8 else 0
    layer = (1 if fp8 else 2) * (weights + read) + rounding + 2 * (written + cache)
    # the stream is looked up, and normed at the end: four passes over a vector
    rest = 2 * (hidden * vocab + 5 * hidden + vocab)
    assert predict_silent(parts).total == pytest.approx((layers * layer + rest) / (rate * 1e9), rel=2e-3)


def test_windows_count_where_the_engine_heeds_them():
    """Against a count, token by token and layer by layer: windows shorter than the prompt, longer than it, and none."""
    layers, prompt, output = random.randint(3, 8), random.randint(20, 60), random.randint(2, 40)
    window = random.choice([random.randint(1, prompt), prompt + random.randint(0, output), 10**6])
    kinds = ["sliding_attention", "full_attention", *random.choices(["sliding_attention", "full_attention"], k=layers)]
    config = {**random_config(), "num_hidden_layers": len(kinds)}
    sliding = {
        "model_type": "qwen3", "use_sliding_window": True, "sliding_window": window, "max_window_layers": 0,
        "layer_types": kinds,
    }  # fmt: skip
    heads, kv_heads, width = (config[name] for name in ("num_attention_heads", "num_key_value_heads", "head_dim"))
    reached = [window if kind == "sliding_attention" else 10**9 for kind in kinds]
    prefill = sum(min(own, token) for own in reached for token in range(1, prompt + 1))
    steps = [sum(min(own, prompt + step) for own in reached) for step in range(1, output)]
    all_prefill = len(kinds) * prompt * (prompt + 1) / 2
    all_steps = len(kinds) * (prompt + output / 2)

    def saved(phase, device, **facts):
        engine = dataclasses.replace(BARE, **facts)
        full, own = (
            predict_silent(parts_of(one, device, engine, workload=(3, prompt, output))[phase]).total
            for one in (config, {**config, **sliding})
        )
        return full - own

    flop = saved("prefill", only(tflop_s=1e-3), windowed=True) * 1e9 / (3 * 4 * heads * width)
    assert flop == pytest.approx(all_prefill - prefill, abs=1e-3)
    numbers = saved("decode", only(gb_s=1.0), windowed=True) * 1e9 / (2 * 3 * 2 * kv_heads * width)
    assert numbers == pytest.approx(all_steps - sum(steps) / len(steps), abs=1e-3)
    whole = saved("prefill", only(tflop_s=1e-3), windowed=True, masked_prefill=True) * 1e9 / (3 * 4 * heads * width)
    end = prompt + output
    assert whole == pytest.approx(prompt * sum(end - min(own, end) for own in reached), abs=1e-3)
    for phase in ("prefill", "decode"):
        assert saved(phase, a_device()) == 0  # under a mask, as the runtime does
    # and its cache holds the whole text of every layer
    shape = Shape.from_config({**config, **sliding}, tp_size=2, rank=0)
    dense = Layout.dense(shape.layers)
    kept = held_bytes(KVCache.allocate(shape, 3, end, torch.float32, torch.device("cpu")))
    assert kept == cache_bytes(shape, dense, 3, end, 4) == len(kinds) * 2 * 3 * max(1, kv_heads // 2) * end * width * 4


def test_kernels_and_launches_count_by_themselves():
    config = random_config()
    layers, device = config["num_hidden_layers"], dataclasses.replace(only(), kernel_us=2.0, launch_us=5.0)
    launches = {"attention_launches": 11, "mlp_launches": 6, "message_launches": 8, "replicate_vocab": True}
    engine = dataclasses.replace(BARE, attention_kernels=4, mlp_kernels=3, rest_kernels=9, **launches)
    parts = parts_of(config, device, engine, Link("x", 0.0, None), ranks=2)
    assert predict_silent(parts["decode"]).total == pytest.approx((layers * 7 + 9) * 2e-6)
    assert predict_pass(parts["decode"], Layout.dense(layers)).total == pytest.approx((layers * 7 + 9) * 2e-6)
    # the host is the slower side of a prefill, and starts messages too, which nothing hides
    host = layers * 17 * 5e-6 + 9 * 2e-6
    assert predict_silent(parts["prefill"]).total == pytest.approx(host)
    for layout in (Layout.dense(layers), Layout.from_layers(layers, ladder=range(layers))):
        assert predict_pass(parts["prefill"], layout).total == pytest.approx(host + 2 * layers * 8 * 5e-6)
    # a device that is slower than the host by more than the messages take it
    slow = parts_of(config, dataclasses.replace(device, kernel_us=100.0), engine, Link("x", 0.0, None), ranks=2)
    assert slow["prefill"].message_start == 0
    assert predict_pass(slow["prefill"], Layout.dense(layers)).total == pytest.approx((layers * 7 + 9) * 1e-4)


# ---- what changes no result ----


def random_serving(ranks: int, batch: int, **device: object) -> Serving:
    """Kernels of a microsecond and messages: nothing else takes time."""
    kernels = {"attention_kernels": 5, "mlp_kernels": 5, "rest_kernels": random.randint(1, 9)}
    engine = dataclasses.replace(BARE, **kernels, norm_kernels=random.randint(1, 3), replicate_vocab=True)
    rows = [InterconnectRow(count, random.uniform(20, 90), random.uniform(1, 9)) for count in (2, 4, 8)]
    wire = Interconnect("wire", rows, 0.2, 0.1, False, "a test")
    spec = dataclasses.replace(only(), kernel_us=1.0, **device)
    return Serving(random_config(), "bfloat16", False, spec, engine, (wire,), ranks, batch, 7, 5)


def dense_ms(serving: Serving) -> tuple[float, float, float]:
    """By hand: prefill, decode step, all of them."""
    layers, hidden = (serving.config[name] for name in ("num_hidden_layers", "hidden_size"))
    kernels, link = layers * 10 + serving.engine.rest_kernels, serving.links[0].at(serving.ranks)
    messages = [link.seconds(2 * serving.batch_size * tokens * hidden) for tokens in (7, 1)]
    prefill, decode = (kernels / 1e3 + 2 * layers * seconds * 1e3 for seconds in messages)
    return prefill, decode, prefill + 4 * decode


def planned(serving: Serving):
    return {row.name: row for row in planned_rows(serving, {})}


def exact(serving: Serving):
    """All of these ranks, or replicas of them."""
    rows = planned(serving)
    return {name: row for name, row in rows.items() if row.kind == "exact" and not name.endswith(" ranks")}


def with_device(serving: Serving, **changes: object) -> Serving:
    return dataclasses.replace(serving, device=dataclasses.replace(serving.device, **changes))


@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_replicas_by_hand(ranks):
    """Each takes its part of the batch over its part of the ranks; the largest part is what is waited for."""
    batch = random.randint(2, 9)
    serving = random_serving(ranks, batch)
    counts = [count for count in (2, 4, 8) if count <= min(ranks, batch)]
    assert list(exact(serving)) == [f"{count} replicas" for count in counts]
    count = random.choice(counts)
    replica = dataclasses.replace(serving, ranks=ranks // count, batch_size=math.ceil(batch / count))
    one, (prefill, decode, whole) = exact(serving)[f"{count} replicas"], dense_ms(replica)
    assert (one.prefill_ms, one.decode_ms_per_token) == pytest.approx((prefill, decode))
    assert one.speedup == pytest.approx(dense_ms(serving)[2] / whole)
    assert one.tokens_per_s == pytest.approx(1e3 * batch * 5 / whole)
    assert one.speedup_low < one.speedup < one.speedup_high
    need = memory_need(replica, Layout.dense(3))
    assert (one.memory_need_bytes, one.fits) == (need, None)
    for more, fits in ((0, False), (2**20, True)):
        room = with_device(serving, memory_gib=(need + more - 1) / 2**30)
        assert (f"{count} replicas" in exact(room)) is fits
    assert exact(dataclasses.replace(serving, batch_size=1)) == {}


def test_fewer_ranks_by_hand():
    """Where they are faster than all of them, one replica with the whole batch is a row; the others idle."""
    serving = random_serving(8, 1)
    times = {ranks: dense_ms(dataclasses.replace(serving, ranks=ranks))[2] for ranks in (1, 2, 4, 8)}
    expected = {f"{ranks} of 8 ranks": times[8] / times[ranks] for ranks in (4, 2, 1) if times[ranks] < times[8]}
    found = {name: row.speedup for name, row in planned(serving).items() if name.endswith(" ranks")}
    assert found == pytest.approx(expected)
    assert list(found) == list(expected)


def test_a_fused_norm_by_hand():
    """As much faster as is documented, in the phases whose messages are fused; less certain where sources disagree."""
    serving = random_serving(8, 3)
    prefill, decode, whole = dense_ms(serving)
    sizes = [2 * 3 * tokens * serving.config["hidden_size"] / 2**20 for tokens in (1, 7)]

    def fused(most, faster_unfused=None, **changes):
        limits = {"fused_norm_mib": {8: most}}
        limits["faster_unfused_mib"] = {} if faster_unfused is None else {8: faster_unfused}
        return exact(with_device(dataclasses.replace(serving, **changes), **limits)).get("fused")

    both = fused(sizes[1])
    assert (both.prefill_ms, both.decode_ms_per_token) == pytest.approx((prefill / 1.125, decode / 1.125))
    assert [both.speedup_low, both.speedup_high] == pytest.approx([1.05, 1.20])
    disputed = fused(sizes[1], sizes[0])
    assert disputed.decode_ms_per_token == pytest.approx(decode / (1 + (0.2 - 0.074) / 2))
    assert [disputed.speedup_low, disputed.speedup_high] == pytest.approx([1 - 0.074, 1.20])
    steps = fused(sizes[0])
    assert (steps.prefill_ms, steps.decode_ms_per_token) == pytest.approx((prefill, decode / 1.125))
    assert steps.speedup == pytest.approx(whole / (prefill + 4 * decode / 1.125))
    assert fused(sizes[0] / 1.01) is None
    assert fused(sizes[1], links=(dataclasses.replace(serving.links[0], medium="pcie"),)) is None
    # replicas are fused where vLLM fuses
    serving = random_serving(8, 3, fused_norm_mib={4: 1e6})
    prefill, decode, _ = dense_ms(dataclasses.replace(serving, ranks=4, batch_size=2))
    one = exact(serving)["2 replicas"]
    assert (one.prefill_ms, one.decode_ms_per_token) == pytest.approx((prefill / 1.125, decode / 1.125))


# ---- layouts ----


def random_parts(layers: int) -> PassParts:
    seconds = [random.choice([0.0, random.random(), random.random()]) for _ in range(8)]
    message = random.choice([0.0, random.random()])
    groups = random.choice([(0.0, message, 0.0), (random.random(), random.random(), 0.0), (0.3, 0.5, 0.1)])
    start, contention = random.choice([0.0, message / 3]), random.random()
    return PassParts(layers, *seconds[:6], message, 16, start, seconds[6], contention, *groups, reading=seconds[7])


def slow_times(parts: PassParts, layout: Layout, *, dt: float = 2e-3) -> tuple[float, float]:
    """The loop of docs/layouts.md, lived through in small steps of time: all of it, and what is computed."""
    clock, in_flight, behind = 0.0, 0.0, 0.0  # behind: what comes after the message in flight
    busy = parts.rest + parts.vocabulary

    def compute(work):
        nonlocal clock, in_flight, busy
        busy += work
        while work > 0:
            work -= dt * (1 - parts.contention if in_flight > 0 else 1)
            in_flight -= dt
            clock += dt

    def wait():
        nonlocal clock, in_flight, behind
        clock, in_flight, behind = clock + max(in_flight, 0.0) + behind, 0.0, 0.0

    def sync(mode):
        nonlocal clock, in_flight, behind
        if mode in APART:
            clock += parts.within
        if mode != DROPPED:
            in_flight, behind = (parts.across, parts.gather) if mode == DELAYED else (parts.message, 0.0)
        if mode == BLOCKING:
            wait()

    for index, (attention, mlp) in enumerate(zip(layout.attention_sync, layout.mlp_sync, strict=True)):
        apart = attention in APART
        compute(parts.attention_apart if apart or layout.entering(index) == DELAYED else parts.attention)
        compute(parts.reading if layout.entering(index) == DELAYED else 0.0)
        wait()
        sync(attention)
        compute(parts.mlp_apart if apart else parts.mlp)
        wait()
        sync(mlp)
    return clock + parts.rest + parts.vocabulary, busy


def test_a_pass_is_what_living_through_it_takes():
    for _ in range(20):
        layers = random.randint(1, 4)
        parts = dataclasses.replace(random_parts(layers), message_start=0.0, contention=random.uniform(0, 0.8))
        layout = random_layout(layers)
        total, busy = slow_times(parts, layout)
        found = predict_pass(parts, layout)
        assert found.total == pytest.approx(total, abs=4 * layers * 4e-3)
        assert found.busy == pytest.approx(busy)


# ---- links ----


def test_links_between_measured_ranks_are_interpolated_and_said_so():
    rows = [InterconnectRow(2, 10.0, 100.0, 8, 1 << 30), InterconnectRow(8, 22.0, 160.0, 16, 1 << 20)]
    link = Interconnect("mine", rows, 0.1, 0.05, True, "a test")
    link.check("here")
    assert link.at(8) == Link("mine", 22.0, pytest.approx(160 * 8 / 14), 16, 1 << 20, "a test", "", 0.05)
    between = link.at(4)
    assert (between.alpha_us, between.beta_gb_s) == (pytest.approx(14), pytest.approx(120 * 4 / 6))
    assert between.derived == "interpolated from 2 and 8 ranks"
    beyond = link.at(16)
    assert (beyond.alpha_us, beyond.beta_gb_s) == (pytest.approx(38), pytest.approx(160 * 16 / 30))
    assert beyond.derived == "extrapolated from 2 and 8 ranks"
    assert link.at(1) == NO_LINK
    # errors grow with the distance from what was timed, in ranks and in sizes
    errors = [link.at(ranks).error(1 << 10) for ranks in (8, 4, 16, 64)]
    assert errors == pytest.approx([0.05, math.hypot(0.05, 0.1), math.hypot(0.05, 0.2), math.hypot(0.05, 0.6)])
    assert link.at(8).error(1) == pytest.approx(0.05 + 0.2)
    single = dataclasses.replace(link, rows=rows[1:])
    assert (single.at(4).alpha_us, single.at(4).beta_gb_s) == (22 * 0.75, pytest.approx(160 * 4 / 6))
    wider = dataclasses.replace(link, wire_gb_s=30.0).over_wires(60.0).at(8)
    assert (wider.alpha_us, wider.beta_gb_s) == (22, pytest.approx(2 * 160 * 8 / 14))
    assert wider.relative_error == pytest.approx(math.hypot(0.05, 0.2))
    steep = dataclasses.replace(link, rows=[InterconnectRow(4, 5.0, None), InterconnectRow(8, 45.0, None)])
    assert steep.at(2).alpha_us == 2.5  # not negative
    assert steep.at(2).beta_gb_s is None


def test_a_device_may_be_like_a_known_one(tmp_path):
    known, device, path = known_devices()["h100-sxm"], a_device(), tmp_path / "device.json"

    def read(**changes):
        content = {key: value for key, value in device.to_dict().items() if key not in LIKE_ANOTHER}
        content |= {"like": known.name, **changes}
        path.write_text(json.dumps({"device": content}, indent="\t"))  # which YAML may not be indented by
        return read_device(str(path))

    copied = {key: getattr(known, key) for key in LIKE_ANOTHER}
    assert read(thin_us=7.5) == dataclasses.replace(device, **copied | {"thin_us": 7.5})
    with pytest.raises(UserError, match="device: like h1000 is not one of h100-sxm, h200"):
        read(like="h1000")
    with pytest.raises(UserError, match="relative_error"):  # no other device's error
        read(relative_error=None)


# ---- bands ----


def test_a_ratios_band_is_narrower_than_a_times():
    config, device, link = random_config(), a_device(relative_error=0.1), known_interconnects()["nvlink"]
    parts = parts_of(config, device, known_engines()["runtime"], link.at(8), 8, contention=0.2)
    layers = config["num_hidden_layers"]
    dense, ladder = Layout.dense(layers), Layout.from_layers(layers, ladder=range(layers))
    cases = [parts["decode"].off_by(errors) for errors in CASES]
    times = [predict_pass(case, dense).total for case in cases]
    ratios = [before / predict_pass(case, ladder).total for before, case in zip(times, cases, strict=True)]
    assert 0 < relative_band(ratios) < relative_band(times) < 0.5
    assert relative_band([1.0] * len(cases)) == 0
    # all compute: twice its error, and the scatter of runs beside it
    assert relative_band([predict_silent(case).total for case in cases]) == pytest.approx(2 * math.hypot(0.1, 0.02))
    surer = dataclasses.replace(parts["decode"], errors=Errors(0.01, 0.01, 0.1))
    assert relative_band([predict_pass(surer.off_by(errors), dense).total for errors in CASES]) < relative_band(times)


def test_a_link_of_two_levels():
    """All ranks: a message goes through the group's link whole, and the slices through the link between groups."""
    inner = Interconnect("in", [], 0.1, 0.05, False, "a test", any_ranks=Link("in", 3.0, 100.0))
    outer = Interconnect("out", [], 0.3, 0.2, False, "a test", any_ranks=Link("out", 50.0, 10.0))
    joined, size = inner.joined_by(outer, 4), random.randint(1, 1 << 24)
    assert joined.at(8).seconds(size) == pytest.approx(53e-6 + size / 100e9 + size / 4 / 10e9)
    assert joined.at(4).seconds(size) == inner.at(4).seconds(size)
    assert [link.name for link in joined.parts(8, 4)] == ["in", "out"]
    assert joined.relative_error == 0.2
    with pytest.raises(UserError, match="6 ranks are no groups of 4"):
        joined.at(6)
