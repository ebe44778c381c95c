"""``ladderize plan``: its figures against a slow walk through every sync point, what it says, and what it refuses."""

import dataclasses
import json
import random
import re
import subprocess
import sys

import numpy as np
import pytest
import torch
import yaml

import ladderize
from ladderize import PlanModel, PlanOptions
from ladderize.checkpoint import reading
from ladderize.checkpoint.opening import read_checkpoint, read_config
from ladderize.console import Console
from ladderize.errors import UserError
from ladderize.layout import BLOCKING, DROPPED, OVERLAPPED, Layout
from ladderize.plan import measure, run
from ladderize.plan.document import PlanResult
from ladderize.plan.hardware import known_devices, known_engines
from ladderize.plan.passes import Workload, pass_parts
from ladderize.plan.show import show_plan
from ladderize.runtime.collectives.links import read_interconnect
from tests.helpers import ROOT, SHAPE, fresh_rng, invoke, make_layout, one_sentence, save_llama
from tests.quantised import save_quantised

H100 = ("--hardware", "h100-sxm", "--link", "nvlink", "--tp-size", "8")
TINY = ("--prompt-len", "12", "--output-len", "9")
CHOOSING = ("--shape", "8b", *H100, "--sensitivity", "s.json")


@pytest.fixture(scope="module")
def dense(tmp_path_factory):
    return save_llama(tmp_path_factory.mktemp("plan") / "dense")


@pytest.fixture
def hardware(tmp_path):
    """A file of a device and a link with random figures, which were "calibrated" with 2 and 4 ranks."""
    rng = fresh_rng()
    device = {
        "name": "box",
        "memory_bandwidth_gb_s": float(rng.uniform(10, 3000)),
        "matmul_tflop_s": {"float32": float(rng.uniform(0.1, 100)), "bfloat16": float(rng.uniform(0.1, 900))},
        "memory_gib": 1.0,
        "bandwidth_share": float(rng.uniform(0.3, 1)),
        "matmul_share": float(rng.uniform(0.3, 1)),
        "kernel_us": float(rng.uniform(0, 5)),
        "thin_us": float(rng.uniform(0, 5)),
        "launch_us": float(rng.uniform(0, 5)),
        "relative_error": 0.05,
        "engine": random.choice(list(known_engines())),
        "calibrated": True,
        "source": "a test",
    }
    rows = [
        {"ranks": ranks, "alpha_us": float(rng.uniform(1, 90)), "bus_gb_s": float(rng.uniform(0.1, 300))}
        for ranks in (2, 4)
    ]
    link = {
        "name": "wire",
        "rows": rows,
        "contention": float(rng.uniform(0, 0.5)),
        "relative_error": 0.1,
        "calibrated": True,
        "source": "a test",
    }
    path = tmp_path / "box.yaml"
    path.write_text(yaml.safe_dump({"device": device, "link": link}))
    return path


def planned(*arguments):
    outcome = invoke("plan", *arguments, "--json")
    assert outcome.code == 0, outcome
    return PlanResult.from_dict(json.loads(outcome.stdout), "plan.json")


def edited(path, key, **changes):
    content = yaml.safe_load(path.read_text())
    content[key] |= changes
    path.write_text(yaml.safe_dump(content))
    return path


# ---- its figures ----


def slow_walk(parts, layout):
    """Seconds of a pass, one sub-module after the other: (all, of it compute)."""
    clock = compute = parts.rest
    clock += parts.vocabulary
    in_flight = False
    for layer in range(layout.num_layers):
        apart = layout.attention_sync[layer] == DROPPED
        for own, mode in (
            (parts.attention_apart if apart else parts.attention, layout.attention_sync[layer]),
            (parts.mlp_apart if apart else parts.mlp, layout.mlp_sync[layer]),
        ):
            compute += own
            clock += own
            if in_flight:  # the part of the message that runs beside this compute costs nothing
                hidden = min(own, parts.message - parts.message_start, (1 - parts.contention) * parts.message)
                clock += parts.message - hidden
            in_flight = mode == OVERLAPPED
            if mode == BLOCKING:
                clock += parts.message
    return clock, compute


@pytest.mark.parametrize("name", ["dense", "ladder gaps", "spd some", "mixed", "same layer"])
def test_figures_are_those_of_a_slow_walk(dense, hardware, tmp_path, name):
    layout = make_layout(name)
    model = dense
    if not layout.is_dense:
        model = tmp_path / "model"
        ladderize.convert_checkpoint(dense, model, layout, verify=False)
    batches = random.sample(range(1, 300), 2)
    rows = ("--layout", "ladder=1:,spd=:3,parallel,no-comm", "--sync-tp-size", "4")
    served = ("--batch-size", ",".join(map(str, batches)), *TINY)
    result = planned(model, "--hardware", hardware, "--tp-size", "2", *served, *rows)
    layouts = {
        "dense": Layout.dense(4),
        "ladder=1:": Layout.from_layers(4, ladder=[1, 2, 3]),
        "spd=:3": Layout.from_layers(4, spd=[0, 1, 2], sync_tp_size=4),
        str(model): layout,
    }
    wire = read_interconnect(str(hardware))
    for batch in batches:
        for row in result.rows_of(2, batch):
            if not row.is_model:
                continue
            workload = Workload(batch, 12, 9)
            own = layouts[row.model]
            where = (result.device, known_engines()[result.device.engine], wire, 2)
            parts = pass_parts(read_config(dense), *where, "float32", workload, own.sync_tp_size)
            (prefill, compute), (decode, _) = (slow_walk(parts[phase], own) for phase in ("prefill", "decode"))
            first = [slow_walk(parts[phase], Layout.dense(4))[0] for phase in ("prefill", "decode")]
            whole = prefill + 8 * decode
            assert row.prefill_ms == pytest.approx(1e3 * prefill)
            assert row.decode_ms_per_token == pytest.approx(1e3 * decode)
            assert row.end_to_end_ms == pytest.approx(1e3 * whole)
            assert row.end_to_end_tokens_per_s == pytest.approx(batch * 9 / whole)
            assert row.output_tokens_per_s == pytest.approx(batch / decode)
            assert row.speedup_end_to_end == pytest.approx((first[0] + 8 * first[1]) / whole)
            assert row.speedup_prefill == pytest.approx(first[0] / prefill)
            assert row.communication["prefill"].exposed_ms == pytest.approx(1e3 * (prefill - compute))
            assert row.communication["prefill"].all_reduces == 8 - own.count(DROPPED)
            assert row.attention_sync == list(own.attention_sync)
    assert result.rows_of(2, batches[0])[0].model == (str(model) if layout.is_dense else "dense")


def test_fp8_weights_gain_more_of_a_layout():
    """Compute gets shorter and messages do not: ladder wins more of a large model, whose weights need half."""
    shape = ("--shape", "70b", *H100, "--layout", "ladder")
    floats, fp8 = planned(*shape), planned(*shape, "--weights", "fp8")
    assert fp8.model.weights == "fp8"
    assert floats.model.weights == "float"
    for before, after in zip(floats.rows, fp8.rows, strict=True):
        assert after.decode_ms_per_token < before.decode_ms_per_token
        for phase in ("prefill", "decode"):
            assert after.communication[phase].alone_ms == before.communication[phase].alone_ms
        projections = 80 * (2 * 8192 * 8192 + 2 * 8192 * 1024 + 3 * 8192 * 28672) // 8
        assert before.weight_bytes - after.weight_bytes == projections
        assert (after.dtype, after.kv_cache_bytes) == ("bfloat16", before.kv_cache_bytes)
    assert fp8.rows[1].speedup_decode > floats.rows[1].speedup_decode
    outcome = invoke("plan", *shape, "--weights", "fp8")
    assert "70b, bfloat16, FP8 weights; prompt 1024" in outcome.stdout
    assert "ladderize bench" not in outcome.stdout + outcome.stderr  # which runs no FP8
    outcome = invoke("plan", "--shape", "8b", "--hardware", "a100-80gb", "--tp-size", "1", "--weights", "fp8")
    assert "device a100-80gb has no matmul_tflop_s for float8" in " ".join(outcome.stderr.split())


@pytest.mark.parametrize("name", ["FP8 dynamic", "FP8 blocks", "modelopt"])
def test_a_quantised_checkpoint_is_planned_as_fp8(tmp_path, name):
    source = save_quantised(tmp_path / "src", name)
    words = ("--hardware", "h100-sxm", "--link", "nvlink", "--tp-size", "2", *TINY, "--dtype", "bfloat16")
    found = planned(source, *words)
    assert found.model.weights == "fp8"
    same = planned("--shape", source / "config.json", *words)
    assert [row.end_to_end_ms for row in same.rows] == [row.end_to_end_ms for row in found.rows]
    assert planned(source, *words, "--weights", "float").rows[0].weight_bytes > found.rows[0].weight_bytes


def test_other_quantised_weights_are_no_fp8(tmp_path):
    source = save_quantised(tmp_path / "src", "W4A16")
    words = (source, "--hardware", "h100-sxm", "--link", "nvlink", "--tp-size", "2", *TINY, "--dtype", "bfloat16")
    outcome = invoke("plan", *words)
    assert outcome.code == 1
    assert "known of floats and of FP8, but its weights are others (compressed-tensors pack-quantized)" in " ".join(
        outcome.stderr.split()
    )
    assert planned(*words, "--weights", "fp8").model.weights == "fp8"


def test_bounds_and_bands_of_a_known_shape():
    result = planned("--shape", "70b", *H100, "--batch-size", "1,16")
    names = ["dense", "ladder", "spd", "spd+ladder", "parallel baseline", "no-comm baseline"]
    for batch in (1, 16):
        rows = {row.model: row for row in result.rows_of(8, batch)}
        assert list(rows) == names
        assert rows["dense"].speedup_end_to_end_interval == [1.0, 1.0]
        assert all(row.end_to_end_ms >= rows["no-comm baseline"].end_to_end_ms for row in rows.values())
        assert rows["no-comm baseline"].exposed_end_to_end_ms == 0
        for row in rows.values():
            for value, (low, high) in (
                (row.speedup_end_to_end, row.speedup_end_to_end_interval),
                (row.end_to_end_tokens_per_s, row.end_to_end_tokens_per_s_interval),
            ):
                assert low <= value <= high
            assert row.basis == "predicted"
            assert row.peak_memory_bytes is None
    assert "samples_ms" not in result.rows[0].to_dict()


def test_memory_is_that_of_the_tensors(dense, hardware):
    """One rank's dense weights, and keys and values of all its heads."""
    result = planned(dense, "--hardware", hardware, "--tp-size", "1", "--batch-size", "3", "--layout", "dense", *TINY)
    row = result.rows[0]
    stored = sum(tensor.nbytes for tensor in read_checkpoint(dense).tensors.values())
    assert row.weight_bytes == stored - 4 * SHAPE["hidden_size"]  # the last norm is not counted
    assert row.kv_cache_bytes == 2 * 4 * SHAPE["num_key_value_heads"] * 4 * 3 * 21 * 4  # layers ... head_dim, columns
    assert row.memory_need_bytes > row.weight_bytes + row.kv_cache_bytes
    assert row.fits


def test_what_does_not_fit_is_said(hardware):
    outcome = invoke("plan", "--shape", "8b", "--hardware", hardware, "--tp-size", "2", "--layout", "dense")
    assert outcome.code == 0
    assert "2 x box over wire, batch 1: it does not fit: weights" in outcome.stderr
    assert "each, which has 1.07 GB" in outcome.stderr
    edited(hardware, "device", memory_gib=None)
    assert "fit" not in invoke("plan", "--shape", "8b", "--hardware", hardware, "--tp-size", "2").stderr


# ---- what it says ----


def test_where_converting_is_not_worth_it():
    said = "converting is not worth it there"
    slow = invoke("plan", "--shape", "8b", *H100[:2], "--link", "500,1", "--tp-size", "2")
    assert said not in slow.stdout
    fast = invoke("plan", "--shape", "8b", *H100[:2], "--link", "0,1e6", "--tp-size", "2", "--batch-size", "1,64")
    assert fast.stdout.count(said) == 2
    alone = invoke("plan", "--shape", "8b", *H100[:2], "--tp-size", "1")
    assert "One rank sends nothing" in alone.stdout
    # of one layer it is the vocabulary's collectives that take long, which no layout hides
    small = ("--shape", "8b", "--num-layers", "1", *H100[:2])
    small += ("--engine", "runtime", "--tp-size", "2", "--link", "0,100")
    served = ("--prompt-len", "1", "--output-len", "64", "--batch-size", "64")
    dense = planned(*small, *served).rows[0]
    assert dense.exposed_end_to_end_ms > 0.2 * dense.end_to_end_ms
    assert said in invoke("plan", *small, *served).stdout


@pytest.mark.parametrize(
    ("ranks", "batch", "verdict"),
    [
        (2, 1, "does not pay: it is no faster than dense with fused norms"),
        (8, 16, "is not shown to pay: dense with fused norms"),
        (8, 64, None),
    ],
)
def test_a_layout_has_to_beat_what_changes_no_result(ranks, batch, verdict):
    """By its speed-up, and then by its band: over vLLM's all-reduce, not that of the authors' benchmark."""
    where = ("--shape", "70b", *H100[:-1], ranks, "--batch-size", batch, "--layout", "ladder")
    result = planned(*where)
    exact = result.exact_of(ranks, batch)
    assert all(one.fits for one in exact)
    ladder, served = result.rows[1], ranks == 8
    assert (ladder.speedup_over_vllm is not None) == served == (ranks in result.vllm_links)
    known = [one.speedup_band for one in exact if not served or one.speedup_over_vllm]
    value, low, _ = ladder.speedup_band
    pays = value > max([1.0, *(best for best, _, _ in known)])
    surely = low > max([1.0, *(most for _, _, most in known)])
    assert (pays, surely) == {
        "does not pay: it is no faster than dense with fused norms": (False, False),
        None: (True, True),
    }.get(verdict, (True, False))
    outcome = invoke("plan", *where)
    said = " ".join(outcome.stdout.split())
    assert ("to pay" in said or "not pay" in said) == (verdict is not None)
    over = ", vLLM's all-reduce" * served
    assert verdict is None or f"batch {batch}{over}: ladder {verdict}" in said
    for one in exact:
        assert re.search(f"^{one.name} +{one.speedup_end_to_end:.2f}x", outcome.stdout, re.MULTILINE)


def test_a_chosen_layout_is_judged_and_not_the_fastest(capsys):
    result = planned("--shape", "70b", *H100, "--batch-size", "64", "--layout", "ladder,spd")
    show_plan(result, Console())
    assert "pay: " not in capsys.readouterr().out
    dense, ladder, spd = result.rows
    chosen = dataclasses.replace(spd, model="chosen")
    show_plan(dataclasses.replace(result, rows=[dense, chosen, ladder]), Console())
    assert "batch 64, vLLM's all-reduce: chosen is not shown to pay" in " ".join(capsys.readouterr().out.split())


def test_what_dense_cannot_do_better_is_said(hardware):
    where = ("--shape", "8b", "--hardware", hardware, "--layout", "ladder", "--batch-size", "2", "--explain")
    edited(hardware, "device", memory_gib=99.0)
    said = " ".join(invoke("plan", *where, "--tp-size", "2").stdout.split())
    assert "No row fused: vLLM fuses no norm into such messages on box over such a link" in said
    content = yaml.safe_load(hardware.read_text())
    edited(hardware, "link", rows=content["link"]["rows"][1:])
    result = planned(*where, "--tp-size", "4")
    assert (result.exact, list(result.no_replicas)) == ([], [4])
    said = " ".join(invoke("plan", *where, "--tp-size", "4").stdout.split())
    assert f"No further replicas of 4 ranks: {result.no_replicas[4]}." in said
    edited(hardware, "device", fused_norm_mib={4: -1})
    assert "fused_norm_mib.4 is -1, but must be between" in one_sentence(invoke("plan", *where, "--tp-size", "4"))


def test_no_two_columns_have_one_name():
    lines = invoke("plan", "--shape", "8b", *H100, "--explain").stdout.splitlines()
    headers = [[name.strip() for name in line.split("  ") if name.strip()] for line in lines if line[:6] == "layout"]
    assert [len(set(names)) for names in headers] == [len(names) for names in headers] == [4, 7]


def test_a_first_answer_fits_a_terminal_and_the_rest_is_asked_for():
    """25 lines of 80 columns; what is no layout is explained where it stands."""
    rng = fresh_rng()
    served = ("--batch-size", rng.integers(1, 33), "--prompt-len", rng.integers(64, 2049))
    where = ("--shape", rng.choice(["3b", "8b", "70b", "qwen3-32b"]), *H100[:-1], rng.choice([4, 8]), *served)
    outcome, more = invoke("plan", *where), invoke("plan", *where, "--explain")
    assert outcome.code == more.code == 0
    lines = (outcome.stdout + outcome.stderr).splitlines()
    assert sum(max(1, -(-len(line) // 80)) for line in lines) <= 25, outcome
    for name, note in (("parallel", "no layout: attention beside MLP"), ("no-comm", "no layout: nothing is sent")):
        (line,) = [line for line in lines if line.startswith(f"{name} ")]
        assert line.endswith(note)
        assert len(line) <= 80
    for words in ("prefill wait", "decode wait", "prefill, decode: ms", "engine published: the"):
        assert words in more.stdout
        assert words not in outcome.stdout
    assert invoke("plan", *where, "--json").stdout == invoke("plan", *where, "--json", "--explain").stdout


@pytest.mark.parametrize("link", ["nvlink", "nccl_nvlink_h100"])
def test_what_vllm_takes_stands_beside(link):
    """With the speed-ups that a plan over it has; alone where it was asked for."""
    batch = fresh_rng().integers(2, 65)
    where = ("--shape", "8b", *H100[:2], "--batch-size", batch, "--tp-size", "8", "--link")
    asked, vllm = (planned(*where, name) for name in (link, "nvls_multimem_h100"))
    assert (asked.vllm_links, vllm.vllm_links) == ({8: "nvls_multimem_h100"}, {})
    for ours, theirs in zip(asked.rows, vllm.rows, strict=True):
        assert theirs.speedup_over_vllm is None
        assert ours.speedup_over_vllm == theirs.speedup_band == ours.speedup_band
    known = {one.name: one.speedup_band for one in vllm.exact}
    assert {one.name: one.speedup_over_vllm for one in asked.exact if one.speedup_over_vllm} == known
    shown = invoke("plan", *where, link).stdout.splitlines()
    header = shown.index(next(line for line in shown if line.startswith("layout ")))
    for line, ours in zip(shown[header + 3 :], asked.rows[1:], strict=False):
        low, high = ours.speedup_end_to_end_interval
        cells = [f"{ours.speedup_end_to_end:.2f}x", f"{low:.2f}-{high:.2f}", f"{ours.speedup_over_vllm[0]:.2f}x"]
        assert re.split("  +", line)[1:4] == cells
    assert "over vLLM's" not in invoke("plan", *where, "nvls_multimem_h100").stdout


def test_long_prompts_need_a_fused_attention():
    said = "the engine published writes all attention scores of a prompt to memory"
    long = ("--shape", "8b", *H100, "--prompt-len", "8000")
    assert said in invoke("plan", *long).stderr
    assert said not in invoke("plan", *long, "--engine", "runtime").stderr
    assert said not in invoke("plan", "--shape", "8b", *H100).stderr


def test_a_figure_is_calibrated_where_device_and_link_are(dense, hardware):
    def basis(ranks, *more):
        return {row.basis for row in planned(dense, "--hardware", hardware, "--tp-size", ranks, *TINY, *more).rows}

    assert basis("2") == {"calibrated"}
    for engine in known_engines():
        timed = engine == yaml.safe_load(hardware.read_text())["device"]["engine"]
        assert basis("2", "--engine", engine) == {"calibrated" if timed else "predicted"}
    assert basis("8") == {"predicted"}  # extrapolated
    outcome = invoke("plan", dense, "--hardware", hardware, "--tp-size", "2,8", *TINY)
    assert "Warning: wire was not timed with 8 ranks: extrapolated from 2 and 4 ranks" in outcome.stderr
    assert "batch 1 (calibrated)" in outcome.stdout
    assert "batch 1 (predicted)" in outcome.stdout
    edited(hardware, "link", calibrated=False)
    assert basis("2") == {"predicted"}
    edited(hardware, "link", calibrated=True)
    edited(hardware, "device", calibrated=False)
    assert basis("2") == {"predicted"}


def test_the_nvlink_of_other_devices_is_said():
    def said(device, link="nvlink"):
        arguments = ("--shape", "8b", "--hardware", device, "--link", link, "--tp-size", "2", "--layout", "dense")
        return " ".join(invoke("plan", *arguments).stderr.split())

    for name, device in known_devices().items():
        differs = device.nvlink_gb_s != known_devices()["h100-sxm"].nvlink_gb_s
        assert ("is NVLink of 450 GB/s" in said(name)) == differs
        assert "is NVLink" not in said(name, "20,100")
    assert "and a100-80gb has one of 300: give --link" in said("a100-80gb")
    assert "and l40s has none: give --link" in said("l40s")


def test_messages_beyond_the_timed_sizes_are_named():
    outcome = invoke("plan", "--shape", "8b", *H100[:2], "--link", "nccl_pcie", "--tp-size", "4", "--layout", "dense")
    assert "extrapolated beyond the sizes that nccl_pcie was timed at with 4 ranks: messages of 8.39 MB" in (
        outcome.stderr
    )


def test_the_hosts_part_of_a_wait_is_the_same_over_all_links():
    waits = set()
    for link in ("nvlink", "nccl_nvlink_h100", "nvls_multimem_h100"):
        where = ("--shape", "8b", *H100[:2], "--link", link, "--tp-size", "8")
        waits.add(round(planned(*where).rows[0].communication["prefill"].exposed_ms, 6))
        assert "ms of prefill wait are what the host takes" in " ".join(
            invoke("plan", *where, "--explain").stdout.split()
        )
    assert len(waits) == 1


def test_a_checkpoint_that_is_called_like_a_layout_is_a_row_of_its_own(dense, tmp_path, monkeypatch):
    """Its speed-ups over other all-reduces were those of the layout."""
    assert invoke("convert", dense, tmp_path / "ladder", "--ladder", "0:1", "--no-verify").code == 0
    monkeypatch.chdir(tmp_path)
    options = PlanOptions("h100-sxm", (4,), "nccl_nvlink_h100", prompt_len=8, output_len=8)
    found = ladderize.plan_layouts(PlanModel("ladder", layout="ladder"), options)
    assert [row.model for row in found.rows] == ["dense", "checkpoint ladder", "ladder"]
    assert found.rows[1].speedup_over_vllm != found.rows[2].speedup_over_vllm


def test_the_list_names_everything():
    outcome = invoke("plan", "--list")
    assert outcome.code == 0
    for name in (*known_devices(), *known_engines(), "nvlink", "nccl_pcie", "70b"):
        assert name in outcome.stdout
    tables = outcome.stdout.partition("\nEngines")[0]
    assert max(map(len, tables.splitlines())) <= 80
    known = json.loads(invoke("plan", "--list", "--json").stdout)
    assert {"devices", "links", "engines", "shapes"} <= known.keys()
    assert "--link has no effect with --list" in one_sentence(invoke("plan", "--list", "--link", "nvlink"))


def test_a_file_and_json_alone_on_stdout(tmp_path):
    outcome = invoke("plan", "--shape", "1b", *H100, "--json", "--out", tmp_path / "plan.json")
    assert json.loads(outcome.stdout) == json.loads((tmp_path / "plan.json").read_text())


def test_a_plan_of_a_shape_imports_no_torch():
    code = f"import sys; sys.argv = ['ladderize', 'plan', '--shape', '70b', *{H100!r}]\n"
    code += "from ladderize.cli import main\nmain()\nassert not {'torch', 'transformers'} & set(sys.modules)"
    outcome = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert outcome.returncode == 0, outcome.stderr
    assert "8 x h100-sxm over nvlink, batch 1 (predicted)" in outcome.stdout


def test_the_next_command_is_of_the_same_model():
    outcome = invoke("plan", "--shape", "8b", "--num-layers", "3", "--dtype", "float16", *H100)
    assert "bench --random-weights 8b --num-layers 3 --dtype float16 --tp-size 8" in outcome.stdout
    rows = ("--layout", "spd=1:,parallel,ladder,no-comm", "--sync-tp-size", "16")
    outcome = invoke("plan", "--shape", "8b", *rows, *H100)
    told = "--layout dense,spd=1:,ladder --sync-tp-size 16 --baselines parallel,no-comm --tp-size 8"
    assert f"bench --random-weights 8b {told}" in outcome.stdout


# ---- what it refuses ----


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--shape", "8b"), "--hardware is missing"),
        (("--shape", "8b", "--hardware", "h100-sxm"), "--tp-size is missing"),
        (("--shape", "8b", "--hardware", "h1000", "--tp-size", "1"), "--hardware h1000 is neither one of"),
        (("--shape", "8c", *H100), "--shape 8c is neither one of"),
        (H100, "name a checkpoint, or a shape with --shape, and not both"),
        (("model", "--shape", "8b", *H100), "and not both"),
        (("model", "--num-layers", "2", *H100), "--num-layers goes with --shape"),
        (("--shape", "8b", "--revision", "x", *H100), "--revision has no effect with --shape"),
        (("--shape", "8b", *H100, "--layout", "rungs"), "--layout rungs is not one of dense, ladder, spd, spd+ladder,"),
        (("--shape", "8b", *H100, "--layout", "ladder,ladder"), "or one twice"),
        (("--shape", "8b", *H100, "--layout", "ladder=40:"), "out of range for a model of 32 layers"),
        (("--shape", "8b", *H100, "--layout", "ladder", "--sync-tp-size", "8"), "--sync-tp-size has no effect"),
        (("--shape", "8b", *H100, "--sync-tp-size", "4"), "--tp-size 8 does not divide the 4 virtual ranks"),
        (("--shape", "8b", *H100[:-1], "3"), "--tp-size 3 does not divide the 32 attention heads"),
        (("--shape", "8b", *H100[:-1], "0"), "not a comma-separated list of positive integers"),
        (("--shape", "8b", *H100[:-1], "32"), "--link nvlink was measured with 2, 4 and 8 ranks, not 32"),
        (("--shape", "8b", *H100[:-1], "1"), "--link has no effect with one rank"),
        (("--shape", "8b", *H100[:2], "--tp-size", "8"), "8 ranks send messages: give --link"),
        (("--shape", "8b", *H100[:2], "--tp-size", "8", "--link", "wire"), "--link 'wire' is neither"),
        (("--shape", "8b", *H100, "--engine", "rocket"), "--engine rocket is not one of published"),
        (("--shape", "8b", *H100, "--prompt-len", "140000"), "over the model's 131072 positions"),
        (("--shape", "8b", *H100, "--batch-size", "9" * 400), "--batch-size must be at most 1,048,576"),
        (("--shape", "8b", *H100, "--recipe-out", "r.yaml"), "--recipe-out has no effect where no layout is chosen"),
        (("--shape", "8b", *H100, "--threads", "2"), "--threads has no effect where no layout is chosen"),
        (("--shape", "8b", *H100, "--device", "cpu"), "--device has no effect where no layout is chosen"),
        (("--shape", "8b", *H100, "--phase", "decode"), "--phase has no effect where no layout is chosen"),
        (("--shape", "8b", *H100, "--max-ppl-increase", "2%"), "give --sensitivity FILE"),
        (CHOOSING, "give --max-ppl-increase or --min-speedup"),
        ((*CHOOSING, "--min-speedup", "1.1", "--max-ppl-increase", "2%"), "give one of them"),
        ((*CHOOSING, "--max-ppl-increase", "much"), "is not an increase"),
        (
            (*CHOOSING, "--min-speedup", "2", "--out", "p", "--recipe-out", "./p"),
            "--out and --recipe-out name one file",
        ),
        ((*CHOOSING, "--min-speedup", "0.9"), "must be a number above 1"),
        ((*CHOOSING, "--min-speedup", "1.1", "--data", "x"), "--data has no effect without --verify"),
        ((*CHOOSING, "--min-speedup", "1.1", "--verify", "1"), "--verify 1 is too few"),
        (
            (*CHOOSING, "--min-speedup", "1.1", "--batch-size", "1,2"),
            "a layout is chosen for one group and one workload",
        ),
        (("--shape", "8b", *H100, "--out", "no/such/plan.json"), "does not exist"),
    ],
)
def test_what_is_refused(arguments, message):
    assert message in one_sentence(invoke("plan", *arguments))


@pytest.mark.parametrize(
    ("key", "changes", "message"),
    [
        ("device", {"kernel_us": "fast"}, "kernel_us is 'fast', but must be of type float"),
        ("device", {"matmul_tflop_s": {"float16": 9.0}}, "no matmul_tflop_s for bfloat16"),
        (
            "link",
            {"contention": None},
            "contention is None, but must be of type float; correct the file, or give --link",
        ),
        ("link", {"contention": 2.0}, "contention is 2"),
    ],
)
def test_a_file_with_absurd_figures_is_one_sentence(hardware, key, changes, message):
    edited(hardware, key, **changes)
    assert message in one_sentence(invoke("plan", "--shape", "8b", "--hardware", hardware, "--tp-size", "2"))


def test_a_device_without_a_link_needs_one(hardware):
    content = yaml.safe_load(hardware.read_text())
    hardware.write_text(yaml.safe_dump({"device": content["device"]}))
    error = one_sentence(invoke("plan", "--shape", "8b", "--hardware", hardware, "--tp-size", "2"))
    assert "has no link" in error
    assert "or give --link" in error


def test_a_link_without_figures_for_the_ranks_names_some(hardware):
    """Which are taken: those of a ring of its links."""
    row = yaml.safe_load(hardware.read_text())["link"]["rows"][0]
    edited(hardware, "link", rows=[row])
    where = ("--shape", "8b", "--hardware", hardware, "--tp-size", "8")
    error = one_sentence(invoke("plan", *where))
    found = re.search("such as --link ([0-9.e+]+),([0-9.e+-]+), a guess from its 2 ranks as of a ring", error)
    alpha, beta = found.groups()
    assert (float(alpha), float(beta)) == pytest.approx((row["alpha_us"] * 4, row["bus_gb_s"] * 8 / 14), rel=0.01)
    assert planned(*where, "--link", f"{alpha},{beta}").rows


def test_python_gives_the_same(tmp_path):
    result = ladderize.plan_layouts(
        PlanModel(shape="1b"), PlanOptions("h100-sxm", (2, 4), "nvlink", batch_sizes=(1, 8))
    )
    assert result == planned("--shape", "1b", *H100[:4], "--tp-size", "2,4", "--batch-size", "1,8")
    with pytest.raises(ladderize.UsageError, match="--batch-size"):
        PlanOptions("h100-sxm", (2,), "nvlink", batch_sizes=())


# ---- from a plan to a converted model ----


@pytest.fixture(scope="module")
def costs(dense, tmp_path_factory):
    """What the sync points of the dense model cost, with 4 virtual ranks, on random ids."""
    folder = tmp_path_factory.mktemp("costs")
    ids = torch.randint(3, SHAPE["vocab_size"], (12, 24)).numpy().astype(np.uint16)
    np.save(folder / "ids.npy", ids)
    how = ("--sync-tp-size", "4", "--samples", "4")
    outcome = invoke("sensitivity", dense, "--data", folder / "ids.npy", *how, "--out", folder / "s.json")
    assert outcome.code == 0, outcome
    return folder / "s.json"


def choice_of(model, costs, *more, ranks="4"):
    return invoke("plan", model, *H100[:4], "--tp-size", ranks, *TINY, "--sensitivity", costs, *more)


def test_plan_recipe_convert_bench(dense, costs, tmp_path):
    """One story: what is chosen and verified is converted as it was planned, and runs."""
    recipe, out = tmp_path / "recipe.yaml", tmp_path / "model"
    budget = ("--max-ppl-increase", "500%", "--verify", "3")
    outcome = choice_of(dense, costs, *budget, "--recipe-out", recipe, "--out", tmp_path / "plan.json")
    assert outcome.code == 0, outcome
    choice = PlanResult.from_dict(json.loads((tmp_path / "plan.json").read_text()), "plan.json").choice
    assert choice.verification.made <= 3
    assert outcome.stderr.count("loading torch") == 1
    assert choice.statement in outcome.stdout
    assert f"speed {choice.chosen.speedup:.3f}x" in " ".join(outcome.stdout.partition("Measured")[2].split())
    assert f"convert {dense} dense-planned --recipe {recipe}" in outcome.stdout
    assert not list(tmp_path.glob("*-measured-*"))
    assert invoke("convert", dense, out, "--recipe", recipe, "--no-verify").code == 0
    assert Layout.from_config(read_config(out)) == choice.chosen.as_layout
    timed = invoke(
        "bench", dense, out, "--repeat", "1", "--warmup", "1", *TINY, "--baselines", "", "--json", "--dtype", "float32"
    )
    assert timed.code == 0, timed
    assert json.loads(timed.stdout)["rows"][1]["attention_sync"] == choice.chosen.attention_sync


def test_what_is_wrong_with_the_rows_is_found_before_measuring(dense, costs, tmp_path):
    budget = ("--max-ppl-increase", "500%", "--verify", "3", "--out", tmp_path / "plan.json")
    for layout in ("rungs", "ladder=40:"):
        outcome = choice_of(dense, costs, *budget, "--layout", layout)
        one_sentence(outcome)
        assert "of 3:" not in outcome.stderr
    assert choice_of(dense, costs, *budget, "--layout", "dense", "--sync-tp-size", "4").code == 0


def test_what_was_measured_is_kept_until_the_plan_is_written(dense, costs, tmp_path, monkeypatch):
    def full(path, document):
        raise UserError("the disk is full")

    budget = ("--max-ppl-increase", "500%", "--verify", "3", "--out", tmp_path / "plan.json")
    with monkeypatch.context() as patch:
        patch.setattr(run, "write_json", full)
        assert "the disk is full" in one_sentence(choice_of(dense, costs, *budget))
    assert list(tmp_path.glob("plan-measured-*"))
    with monkeypatch.context() as patch:
        patch.setattr(measure, "window_nlls", None)  # nothing is computed again
        assert choice_of(dense, costs, *budget).code == 0
    assert not list(tmp_path.glob("*-measured-*"))


def test_a_hub_id_whose_weights_are_not_here_yet(dense, costs, tmp_path, monkeypatch):
    light = tmp_path / "light"
    light.mkdir()
    (light / "config.json").write_text((dense / "config.json").read_text())
    monkeypatch.setattr(reading, "_snapshot", lambda *_, allow_patterns=None, **__: light if allow_patterns else dense)
    assert choice_of("org/tiny", costs, "--min-speedup", "1.02").code == 0


def test_the_choice_is_a_row_with_the_speed_that_it_was_chosen_for(dense, costs):
    for phase in ("end_to_end", "prefill", "decode"):
        outcome = choice_of(dense, costs, "--min-speedup", "1.02", "--phase", phase, "--json")
        assert outcome.code == 0, outcome
        result = PlanResult.from_dict(json.loads(outcome.stdout), "plan.json")
        (row,) = [row for row in result.rows if row.model == "chosen"]
        speedup, (low, _) = row.speedup(phase)
        assert result.choice.chosen.speedup == pytest.approx(speedup)
        assert result.choice.chosen.speedup >= 1.02
        assert result.choice.statement == "not verified"
        assert "not verified" not in outcome.stderr
        assert ("includes 1: it may not be faster" in outcome.stderr) == (low <= 1)
    assert "\ndense " in choice_of(dense, costs, "--min-speedup", "1.02").stdout


def test_choices_that_are_refused(dense, costs, tmp_path):
    assert "--tp-size 8 does not divide; measure it with --sync-tp-size 8" in one_sentence(
        choice_of(dense, costs, "--min-speedup", "1.02", ranks="8")
    )
    assert "no layout reaches --min-speedup 50; the fastest is" in one_sentence(
        choice_of(dense, costs, "--min-speedup", "50")
    )
    other = save_llama(tmp_path / "other", seed=int(torch.randint(1, 1 << 20, ())))
    assert "was measured on another model" in one_sentence(choice_of(other, costs, "--min-speedup", "1.02"))
    ladder = tmp_path / "ladder"
    ladderize.convert_checkpoint(dense, ladder, Layout.from_layers(4, ladder=range(4)), verify=False)
    assert "is not dense (4 layers: ladder 0:4); a layout is chosen for the dense model" in one_sentence(
        choice_of(ladder, costs, "--min-speedup", "1.02")
    )
    shape = ("--shape", dense, *H100[:4], "--tp-size", "4", *TINY, "--sensitivity", costs, "--min-speedup", "1.02")
    assert "a shape has no weights, so" in invoke("plan", *shape).stdout
    assert "--shape has no weights; name the checkpoint" in one_sentence(invoke("plan", *shape, "--verify", "3"))
    assert "--sync-tp-size 8" in one_sentence(choice_of(dense, costs, "--min-speedup", "1.02", "--sync-tp-size", "8"))
