"""``ladderize calibrate``: timing, resuming, timings that are there, what is refused."""

import csv
import dataclasses
import json
import random

import pytest
import torch

import ladderize
from ladderize import memory
from ladderize.errors import UsageError, UserError
from ladderize.layout import LayoutError
from ladderize.plan.hardware import DeviceSpec, read_device
from ladderize.plan.passes import Workload
from ladderize.planning.calibration import run as calibration
from ladderize.planning.calibration import timing
from ladderize.planning.calibration.fit import Residual
from ladderize.planning.calibration.observations import Observation, expected_seconds, layout_observation
from ladderize.planning.calibration.options import CalibrateOptions, TimingsOptions
from ladderize.planning.calibration.run import CalibrationDocument, uneven_ranks
from ladderize.ranks.group import Ranks
from ladderize.runtime.bench import plan as bench_plan
from ladderize.runtime.bench.options import named_layout
from ladderize.runtime.collectives.links import Interconnect, InterconnectRow, parse_link, read_interconnect
from ladderize.runtime.shards import read_shape
from tests.helpers import invoke, listing, one_sentence

TINY = {
    "model_type": "llama",
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 96,
    "tie_word_embeddings": False,
    "rope_theta": 10000.0,
    "rms_norm_eps": 1e-5,
    "max_position_embeddings": 512,
}
QUICK = ["--repeat", 1, "--warmup", 1, "--threads", 1, "--output-len", 3, "--prefill-tokens", 64]


@pytest.fixture
def shapes(tmp_path):
    """Two widths, as options of the command."""
    options = []
    for hidden, layers in ((64, 3), (128, 2)):
        path = tmp_path / f"shape-{hidden}.json"
        sizes = {"hidden_size": hidden, "intermediate_size": 3 * hidden, "num_hidden_layers": layers}
        path.write_text(json.dumps({**TINY, **sizes}))
        options += ["--shape", path]
    return options


def some_machine() -> tuple[DeviceSpec, Interconnect]:
    """A machine so slow that bytes, products and starts of kernels all count for models of this size."""
    device = DeviceSpec(
        name="planted",
        memory_bandwidth_gb_s=random.uniform(0.1, 0.3),
        matmul_tflop_s={"bfloat16": random.uniform(0.001, 0.002), "float32": 0.002},
        memory_gib=None,
        bandwidth_share=1.0,
        matmul_share=1.0,
        kernel_us=random.uniform(5, 15),
        thin_us=0.0,
        relative_error=0.05,
        engine="runtime-cpu",
        calibrated=True,
        source="",
        serial_share=random.uniform(0.2, 0.8),
    )
    # faster ones are hardly seen beside such products, and the fit leans towards where it began
    row = InterconnectRow(2, random.uniform(100, 200), random.uniform(0.004, 0.01))
    return device, Interconnect("planted", [row], random.uniform(0.2, 0.6), 0.05, True, "")


def planted(seen: Observation, device: DeviceSpec, link: Interconnect | None) -> Observation:
    """What ``seen`` would have taken on that machine."""
    return dataclasses.replace(seen, seconds=expected_seconds([seen], device, link)[0])


@pytest.fixture
def machine(monkeypatch):
    """Everything is timed really; then its times are those of a machine whose figures are known, which is returned.
    Third: the numbers of ranks that were timed."""
    device, link = some_machine()
    really, counts = calibration._time, []

    def time_and_replace(options, ranks, jobs, console):
        timed = really(options, ranks, jobs, console)
        counts.append(ranks)
        assert all(seen.seconds > 0 for seen in timed.observations)
        return dataclasses.replace(timed, observations=[planted(seen, device, link) for seen in timed.observations])

    monkeypatch.setattr(calibration, "_time", time_and_replace)
    return device, link, counts


def check_found(document: CalibrationDocument, device: DeviceSpec, link: Interconnect) -> None:
    assert document.mean_error < 0.01
    found = {figure.name: figure.value for figure in document.figures}
    assert found["memory_bandwidth_gb_s"] == pytest.approx(device.memory_bandwidth_gb_s, rel=0.05)
    assert found["matmul_tflop_s.bfloat16"] == pytest.approx(device.matmul_tflop_s["bfloat16"], rel=0.05)
    assert found["kernel_us"] == pytest.approx(device.kernel_us, rel=0.1)
    assert found["serial_share"] == pytest.approx(device.serial_share, abs=0.1)
    assert found["alpha_us[2]"] == pytest.approx(link.rows[0].alpha_us, rel=0.05)
    assert found["bus_gb_s[2]"] == pytest.approx(link.rows[0].bus_gb_s, rel=0.05)
    assert found["contention"] == pytest.approx(link.contention, abs=0.1)


def test_a_run_finds_the_machine_and_its_file_is_read(shapes, machine, tmp_path):
    out = tmp_path / "machine.json"
    outcome = invoke("calibrate", *shapes, "--tp-size", 2, "--backend", "shm", *QUICK, "--json", "--out", out)
    assert outcome.code == 0, outcome.stderr
    document = CalibrationDocument.from_dict(json.loads(outcome.stdout), "stdout")
    device, link, _ = machine
    check_found(document, device, link)
    assert json.loads(outcome.stdout) == json.loads(out.read_text())
    assert not [name for name in listing(tmp_path) if "work" in name]
    groups = {seen.group for seen in document.observations}
    assert {"dense, prefill, 2 ranks", "ladder, decode, 2 ranks", "no communication, decode, 2 ranks"} <= groups
    assert {len(samples) for samples in document.samples_ms} == {0, 1}
    assert document.groups[0].backend.startswith("shm")
    # what others read of it
    assert read_device(str(out)) == document.device
    assert read_interconnect(str(out)) == document.link
    assert parse_link(str(out), 2).alpha_us == document.link.rows[0].alpha_us
    assert document.device.calibrated
    assert document.link.calibrated
    assert document.link.rows[0].min_bytes == 1 * 64 * 2


def test_a_killed_run_goes_on(shapes, machine, tmp_path, monkeypatch):
    out = tmp_path / "machine.json"
    arguments = ["calibrate", *shapes, "--tp-size", "1,2", "--backend", "gloo", *QUICK, "--out", out]
    device, link, counts = machine
    timing = calibration._time

    def stop_at_two(options, ranks, jobs, console):
        if ranks == 2:
            raise UserError("stopped")
        return timing(options, ranks, jobs, console)

    monkeypatch.setattr(calibration, "_time", stop_at_two)
    assert "stopped" in one_sentence(invoke(*arguments))
    assert not out.exists()
    monkeypatch.setattr(calibration, "_time", timing)
    other = one_sentence(invoke(*arguments, "--seed", 5))
    assert "unfinished work of a run with another calibration" in other
    outcome = invoke(*arguments)
    assert outcome.code == 0, outcome.stderr
    assert counts == [1, 2]
    assert "--tp-size 1 was timed before" in outcome.stderr
    document = CalibrationDocument.from_dict(json.loads(out.read_text()), out)
    check_found(document, device, link)
    assert document.groups[1].backend.startswith("gloo")
    for text in ("memory bandwidth", "contention", "dense, decode, 1 rank", "next:"):
        assert text in outcome.stdout
    assert not [name for name in listing(tmp_path) if "work" in name]


def test_one_rank_gives_a_device_alone(shapes, machine, tmp_path):
    out = tmp_path / "machine.json"
    outcome = invoke("calibrate", *shapes, *QUICK, "--out", out)
    assert outcome.code == 0, outcome.stderr
    assert json.loads(out.read_text())["link"] is None
    assert "the file has no link" in outcome.stdout
    with pytest.raises(UserError, match="has no link"):
        read_interconnect(str(out))


def test_what_leaves_a_figure_open_is_refused(shapes, machine, tmp_path):
    """One width at batch 1: bytes, starts of kernels and products cannot be told apart."""
    one = [*shapes[:2], "--batch-size", 1, *QUICK, "--prefill-tokens", 1]
    message = one_sentence(invoke("calibrate", *one, "--out", tmp_path / "machine.json"))
    assert "the timings leave" in message
    assert "add timings of" in message


def test_ranks_that_share_a_memory_are_said():
    layout, workload = named_layout("dense", 1, 1), Workload(1, 8, 4)
    config = {**TINY, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 1}

    def said(errors: dict[int, float]) -> list[str]:
        observations, residuals = [], []
        for ranks, error in errors.items():
            variant = "layout" if ranks == 1 else "no-comm"
            arguments = ("decode", 1.0, ranks, variant, workload, "runtime-cpu")
            observations.append(layout_observation(layout, *arguments, config=config, dtype="bfloat16", name="dense"))
            residuals.append(Residual("", 1.0, 1 + error, error))
        return uneven_ranks(observations, residuals)

    (text,) = said({1: 0.2, 2: -0.1})
    assert "+20% with 1, -10% with 2" in text
    assert said({1: 0.04, 2: -0.04}) == said({1: 0.5}) == []


# ---- timings that are there ----


def write_table(path, rows):
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, rows[0].keys())
        writer.writeheader()
        writer.writerows(rows)
    return path


def published_row(link: Interconnect, ranks: int, batch: int, variant: str = "dense", **held: object) -> dict:
    """A row of a table as h100-sxm with ``link`` would have given it."""
    device = read_device("h100-sxm")
    config = read_shape("8b")
    workload = Workload(batch, 512, 128)
    seconds = {}
    for quantity in ("prefill", "decode", "end_to_end"):
        kind = variant if variant in ("no-comm", "parallel") else "layout"
        layout = named_layout(variant if kind == "layout" else "dense", config["num_hidden_layers"], ranks)
        timed = (layout, quantity, 1.0, ranks, kind, workload, device.engine)
        seen = layout_observation(*timed, config=config, dtype="bfloat16", name=variant)
        seconds[quantity] = planted(seen, dataclasses.replace(device, **held), link).seconds
    return {
        "shape": "8b",
        "dtype": "bfloat16",
        "tp_size": ranks,
        "batch_size": batch,
        "prompt_len": 512,
        "output_len": 128,
        "variant": variant,
        "prefill_ms": 1e3 * seconds["prefill"],
        "decode_ms_per_token": 1e3 * seconds["decode"],
        "end_to_end_tokens_per_s": batch * 128 / seconds["end_to_end"],
    }


def some_link(contention: float = 0.24) -> Interconnect:
    rows = [InterconnectRow(ranks, random.uniform(20, 90), random.uniform(3, 40)) for ranks in (2, 4, 8)]
    return Interconnect("planted", rows, contention, 0.05, True, "")


def test_two_dense_timings_give_a_link_at_each_number_of_ranks(tmp_path):
    """Of totals alone, as people publish them."""
    link = some_link()
    rows = [published_row(link, ranks, batch) for ranks in (2, 4, 8) for batch in (1, 16)]
    kept = [
        {key: value for key, value in row.items() if not key.endswith("_ms") and "per_token" not in key} for row in rows
    ]
    table = write_table(tmp_path / "table.csv", kept)
    out = tmp_path / "link.json"
    outcome = invoke("calibrate", "--timings", table, "--hardware", "h100-sxm", "--out", out)
    assert outcome.code == 0, outcome.stderr
    found = read_interconnect(str(out))
    for row, given in zip(found.rows, link.rows, strict=True):
        assert row.ranks == given.ranks
        assert row.alpha_us == pytest.approx(given.alpha_us, rel=0.1)
        # a total hardly shows the bandwidth of a fast link
        assert row.bus_gb_s == pytest.approx(given.bus_gb_s, rel=0.2)
    assert json.loads(out.read_text())["mean_error"] < 0.01  # a fit leans a little towards where it began
    assert "held: the figures of h100-sxm" in outcome.stdout
    assert "held: contention" in outcome.stdout
    assert read_device(str(out)) == read_device("h100-sxm")


def test_overlapping_layouts_free_contention_and_silent_passes_the_device(tmp_path):
    link, share = some_link(random.uniform(0.3, 0.6)), random.uniform(0.3, 0.6)
    ways = [(2, "dense"), (2, "ladder"), (2, "no-comm"), (1, "dense"), (2, "spd"), (2, "parallel"), (2, "ladder=:9")]
    rows = [published_row(link, n, b, way, matmul_share=share) for n, way in ways for b in (1, 32)]
    for row in rows:
        row["end_to_end_tokens_per_s"] = ""
    document = ladderize.calibrate(
        TimingsOptions((write_table(tmp_path / "table.csv", rows),), "h100-sxm", name="found")
    )
    found = {figure.name: figure.value for figure in document.figures}
    assert found.keys() == {"alpha_us[2]", "bus_gb_s[2]", "contention", "bandwidth_share", "matmul_share"}
    assert found["contention"] == pytest.approx(link.contention, abs=0.02)
    assert found["matmul_share"] == pytest.approx(share, rel=0.05)
    assert document.device.calibrated
    assert document.device.engine == "published"
    chosen = TimingsOptions((tmp_path / "table.csv",), "h100-sxm", free=("matmul_share",), link="nvlink")
    assert [figure.name for figure in ladderize.calibrate(chosen).figures] == ["matmul_share"]
    assert not ladderize.calibrate(chosen).device.calibrated  # one of its two shares is still assumed


def test_timings_of_our_own_bench(shapes, tmp_path, monkeypatch):
    measured = tmp_path / "bench.json"
    lengths = ["--prompt-len", 8, "--output-len", 3, "--repeat", 1, "--warmup", 1, "--threads", 1]
    models = ["--random-weights", shapes[1], "--layout", "dense,ladder", "--baselines", "no-comm,parallel"]
    outcome = invoke("bench", *models, "--tp-size", 2, *lengths, "--batch-size", "1,8", "--out", measured)
    assert outcome.code == 0, outcome.stderr
    device = tmp_path / "device.yaml"
    device.write_text(json.dumps({"device": some_machine()[0].to_dict()}))
    seen = calibration.read_timings(measured, engine="published", shape=str(shapes[1]))
    assert len(seen) == 2 * 2 * 4
    assert {one.variant for one in seen} == {"layout", "no-comm", "parallel"}
    assert {one.engine for one in seen} == {"runtime-cpu"}
    rows = json.loads(measured.read_text())["rows"]
    assert sorted(1e3 * one.seconds for one in seen) == pytest.approx(
        sorted(row[key] for row in rows for key in ("prefill_ms", "decode_ms_per_token"))
    )
    scheduled = json.loads(measured.read_text())
    for row in scheduled["rows"]:
        row["schedule"] = "domino"
    (tmp_path / "domino.json").write_text(json.dumps(scheduled))
    plain = calibration.read_timings(tmp_path / "domino.json", engine="published", shape=str(shapes[1]))
    assert {one.quantity for one in plain} == {"decode"}  # what domino hides of a prefill is none of the link's
    # the device that comes of them is of the engine that was timed, not of the one that --hardware's figures are of
    fitted = TimingsOptions((measured,), "h100-sxm", shape=str(shapes[1]), name="own", link="20,5", free=("kernel_us",))
    changed = [dataclasses.replace(one, dtype="bfloat16") for one in seen]
    monkeypatch.setattr("ladderize.planning.calibration.run.read_timings", lambda *_, **__: changed)
    assert ladderize.calibrate(fitted).device.engine == "runtime-cpu"
    monkeypatch.undo()
    message = one_sentence(
        invoke("calibrate", "--timings", measured, "--hardware", device, "--out", tmp_path / "link.json")
    )
    assert "has random weights and names no shape; give --shape" in message


# ---- what is refused ----


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"speed": "1"}, "has the column 'speed', which is none of"),
        ({"dtype": None}, "has no column dtype; add it"),
        ({"tp_size": "3"}, "row 1: .*3"),
        ({"tp_size": "2.5"}, "row 1: tp_size is 2.5, but must be an integer of at least 1"),
        ({"batch_size": "0"}, "row 1: batch_size is '0', but must be a positive number"),
        ({"output_len": "1"}, "row 1: output_len is 1, but must be an integer of at least 2"),
        ({"variant": "fast"}, "row 1: --layout fast is not one of"),
        ({"dtype": "int8"}, "row 1: dtype is 'int8', but must be one of"),
        ({"prefill_ms": "nan"}, "row 1: prefill_ms is 'nan', but must be a positive number"),
        ({"prefill_ms": "", "decode_ms_per_token": "", "end_to_end_tokens_per_s": ""}, "row 1 has no time; fill in"),
        ({"shape": "9b"}, "row 1: shape 9b is neither one of"),
        ({"shape": ""}, "row 1 names no shape"),
    ],
)
def test_tables_that_cannot_be_right(tmp_path, change, message):
    row = {key: value for key, value in {**published_row(some_link(), 2, 1), **change}.items() if value is not None}
    table = write_table(tmp_path / "table.csv", [row])
    with pytest.raises(UserError, match=message):
        ladderize.calibrate(TimingsOptions((table,), "h100-sxm"))


def test_timings_that_leave_nothing_or_too_little(tmp_path):
    link = some_link()
    alone = write_table(tmp_path / "alone.csv", [published_row(link, 1, 1)])
    for free, message in (
        ((), "leave nothing to fit"),
        (("alpha_us",), "needs timings of several ranks"),
        (("speed",), "--fit speed is not one of"),
        (("kernel_us.bfloat16",), "--fit kernel_us.bfloat16 is not one of"),
        (("matmul_tflop_s",), "is of no dtype that h100-sxm has a figure for; say .*matmul_tflop_s.bfloat16 or"),
        (("matmul_tflop_s.int8",), "is of no dtype that h100-sxm has a figure for"),
        (("kernel_us", "kernel_us"), "--fit names a figure twice"),
    ):
        with pytest.raises(UsageError, match=message):
            ladderize.calibrate(TimingsOptions((alone,), "h100-sxm", free=free))
    row = {**published_row(link, 2, 1), "prefill_ms": "", "end_to_end_tokens_per_s": ""}
    one = write_table(tmp_path / "one.csv", [row])
    with pytest.raises(UserError, match=r"leave \S+ open; add timings of .* with 2 ranks"):
        ladderize.calibrate(TimingsOptions((one,), "h100-sxm"))
    with pytest.raises(UsageError, match="--fit alpha_us fits what --link gives by hand"):
        ladderize.calibrate(TimingsOptions((one,), "h100-sxm", link="20,100", free=("alpha_us",)))
    with pytest.raises(UserError, match="--engine fast is not one of"):
        ladderize.calibrate(TimingsOptions((one,), "h100-sxm", engine="fast"))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--timings", "x.csv"], "--timings needs --hardware"),
        (["--timings", "x.csv", "--hardware", "h100-sxm", "--tp-size", 2], "--tp-size has no effect with --timings"),
        (["--link", "nvlink"], "--link has no effect without --timings"),
        (["--fit", "alpha_us"], "--fit has no effect without --timings"),
        (["--tp-size", "0"], "--tp-size '0' is not a comma-separated list"),
        (["--batch-size", "a"], "--batch-size 'a' is not a comma-separated list"),
        (["--backend", "gloo"], "--backend gloo has no effect with one rank"),
        (["--backend", "none", "--tp-size", 2], "'none' is not one of"),
        (["--name", " "], "--name is empty"),
    ],
)
def test_arguments_that_take_no_effect(arguments, message, tmp_path):
    outcome = invoke("calibrate", *arguments, "--out", tmp_path / "out.json")
    assert message in one_sentence(outcome)
    assert outcome.code == 2


def test_memory_is_checked_for_all_jobs_together(shapes, monkeypatch):
    options = CalibrateOptions(shapes=(str(shapes[1]),), batch_sizes=(1, 4), dtype="float32", device="cpu")
    alone = Ranks(0, 1, torch.device("cpu"))
    one, other = timing.calibration_jobs(options, 1)
    needs = [bench_plan.needed_bytes(job.specs, job.options, alone.device) for job in (one, other)]
    enough = needs[0][0] + sum(caches for _, caches in needs)  # the weights once
    monkeypatch.setattr(memory, "available_bytes", lambda device: enough)
    timing.check_jobs_memory([one, other], alone)
    monkeypatch.setattr(memory, "available_bytes", lambda device: enough - 1)
    with pytest.raises(UserError, match="fewer --prefill-tokens"):
        timing.check_jobs_memory([one, other], alone)


def test_shapes_and_devices_that_cannot_be_timed(shapes, tmp_path):
    with pytest.raises(LayoutError, match="--tp-size 3 does not divide the 4 attention heads"):
        ladderize.calibrate(CalibrateOptions(tp_sizes=(3,), shapes=(str(shapes[1]),), device="cpu"))
    with pytest.raises(UserError, match="are over the 512 positions"):
        ladderize.calibrate(CalibrateOptions(shapes=(str(shapes[1]),), prefill_tokens=1024, device="cpu"))
    with pytest.raises(UserError, match="--hardware h900 is neither"):
        ladderize.calibrate(CalibrateOptions(shapes=(str(shapes[1]),), hardware="h900", device="cpu"))
    with pytest.raises(UserError, match="does not exist"):
        ladderize.calibrate(CalibrateOptions(device="cpu"), out=tmp_path / "none" / "out.json")
