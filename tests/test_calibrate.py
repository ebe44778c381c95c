"""``ladderize calibrate``: what a fit finds in planted times, a real run, what is refused."""

import itertools
import json
import random

import pytest

import ladderize
from ladderize.errors import UserError
from ladderize.plan import calibrate
from ladderize.plan.hardware import DeviceSpec, known_devices, read_device
from ladderize.plan.options import CalibrateOptions
from ladderize.plan.passes import product_seconds
from ladderize.runtime.bench.document import Environment
from ladderize.runtime.collectives.links import read_interconnect, ring_share
from tests.helpers import invoke_well, refusal

SMALL = calibrate.TimedSizes((64, 128), (1, 8, 32), 1 << 16)


def some_device(kind: str) -> DeviceSpec:
    fast = kind == "cuda"
    return DeviceSpec(
        name="planted", memory_bandwidth_gb_s=random.uniform(1000, 4000) if fast else random.uniform(5, 30),
        matmul_tflop_s={"bfloat16": random.uniform(200, 900) if fast else random.uniform(0.1, 0.5)}, memory_gib=None,
        bandwidth_share=1.0, matmul_share=1.0, kernel_us=random.uniform(1, 4) if fast else random.uniform(5, 15),
        thin_us=random.uniform(1, 6) if fast else 0.0, relative_error=0.05, speeds="runtime", calibrated=True,
        source="", serial_share=0.0 if fast else random.uniform(0.2, 0.7),
    )  # fmt: skip


def planted(kind: str, device: DeviceSpec, links: dict[int, tuple[float, float]]):
    """What groups of ranks time on such a device. links: latency and bandwidth of an all-reduce, by ranks."""
    sizes, flop_s = calibrate.SIZES[kind], device.matmul_tflop_s["bfloat16"] * 1e12
    groups, products = [], []
    for width, rows in itertools.product(sizes.widths, sizes.rows):
        seconds = product_seconds(device, rows, width, width, 2, flop_s, read=2)
        products.append(calibrate.TimedProduct(rows, width, seconds + 1e-6 * device.kernel_us))
    for ranks, (alpha_us, beta) in links.items():
        messages = [calibrate.TimedMessage(size, 1e-6 * alpha_us + size / (beta * 1e9)) for size in calibrate.MESSAGES]
        environment = Environment(kind, "x", 2, 1, "3", "2", "5", "Linux", 1, {})
        sent = (messages, 0.3) if ranks > 1 else ([], 0.0)
        groups.append(calibrate.TimedGroup(ranks, "gloo", environment, products, *sent, 5.0 * (kind == "cuda")))
    return groups


@pytest.mark.parametrize("kind", ["cpu", "cuda"])
def test_a_fit_finds_what_was_planted(kind):
    device = some_device(kind)
    links = {ranks: (random.uniform(5, 60), random.uniform(1, 60)) for ranks in (2, 4)}
    groups = planted(kind, device, links)
    found, link = calibrate.fit_device(kind, "bfloat16", groups), calibrate.fit_link(groups)
    close = {"rel": 0.15 if kind == "cpu" else 0.05}  # the corners of a CPU's roofline are round
    assert found.memory_bandwidth_gb_s == pytest.approx(device.memory_bandwidth_gb_s, **close)
    assert found.matmul_tflop_s["bfloat16"] == pytest.approx(device.matmul_tflop_s["bfloat16"], **close)
    assert found.launch_us == 5.0 * (kind == "cuda")
    assert found.serial_share == pytest.approx(device.serial_share, abs=0.15)
    assert found.thin_us == pytest.approx(device.thin_us, rel=0.3, abs=0.1)
    assert 0.05 <= found.relative_error < 0.15
    assert (link.contention, link.relative_error) == (pytest.approx(0.3), 0.05)
    for row, (ranks, (alpha, beta)) in zip(link.rows, links.items(), strict=True):
        assert (row.ranks, row.alpha_us) == (ranks, pytest.approx(alpha, rel=1e-3))
        assert row.bus_gb_s == pytest.approx(beta * ring_share(ranks), rel=1e-3)


def test_a_data_sheet_is_kept():
    device, known = some_device("cuda"), known_devices()["h100-sxm"]
    found = calibrate.fit_device("cuda", "bfloat16", planted("cuda", device, {1: (0, 1)}), known)
    assert (found.fused_norm_mib, found.wire_gb_s, found.medium) == (known.fused_norm_mib, 450, "nvlink")
    assert found.matmul_tflop_s == known.matmul_tflop_s
    reached = found.bandwidth_share * found.memory_bandwidth_gb_s
    assert reached == pytest.approx(min(device.memory_bandwidth_gb_s, known.memory_bandwidth_gb_s), rel=0.05)


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_run_writes_what_others_read(monkeypatch, tmp_path, ranks):
    monkeypatch.setitem(calibrate.SIZES, "cpu", SMALL)
    out = tmp_path / "machine.json"
    outcome = invoke_well("calibrate", "--tp-size", ranks, "--json", "--out", out)
    assert json.loads(outcome.stdout) == json.loads(out.read_text())
    document = calibrate.CalibrationDocument.from_dict(json.loads(outcome.stdout), "stdout")
    assert read_device(str(out)) == document.device
    assert document.device.calibrated
    if ranks == 1:
        with pytest.raises(UserError, match="has no link"):
            read_interconnect(str(out))
        return
    assert read_interconnect(str(out)) == document.link
    assert read_interconnect(str(out)).at(2).alpha_us == document.link.rows[0].alpha_us
    assert 0 <= document.link.contention <= 0.9
    invoke_well("plan", "--hardware", out, "--tp-size", 2, "--shape", "1b", "--layout", "ladder")


def test_arguments_memory_and_the_file_are_checked_before_anything_is_timed(monkeypatch, tmp_path):
    monkeypatch.setitem(calibrate.SIZES, "cpu", SMALL)
    out = ("--out", tmp_path / "out.json")
    assert "has no effect with one rank" in refusal("calibrate", "--backend", "gloo", *out, code=2)
    assert "--hardware h900 is neither" in refusal("calibrate", "--hardware", "h900", *out)
    monkeypatch.setattr("ladderize.memory.available_bytes", lambda device: 1000)
    with pytest.raises(UserError, match=r"calibrate needs .* of memory, and 1 kB are free"):
        ladderize.calibrate(CalibrateOptions(device="cpu", out=tmp_path / "out.json"))
