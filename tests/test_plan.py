"""``ladderize plan``: its figures are those of its passes, what it says, and what it refuses."""

import json
import random
from unittest import mock

import numpy as np
import pytest
import torch
import yaml

import ladderize
from ladderize.checkpoint.opening import read_checkpoint, read_config
from ladderize.errors import UserError
from ladderize.files.documents import read_yaml
from ladderize.layout import Layout
from ladderize.plan import measure, run
from ladderize.plan.hardware import known_devices, known_engines, own_links, read_device
from ladderize.plan.passes import Serving
from ladderize.plan.rows import measured_loss
from ladderize.plan.run import PlanResult
from ladderize.ranks.device import DEVICE_TABLE, known_gpu
from ladderize.runtime.bench.options import named_layout
from ladderize.runtime.shards import read_shape
from tests.helpers import ROOT, SHAPE, blocks_of, fresh_rng, invoke, invoke_json, invoke_well, one_sentence, save_llama
from tests.quantised import save_quantised
from tests.test_sensitivity import oracle_nll

H100 = ("--hardware", "h100-sxm", "--link", "nvlink", "--tp-size", "8")
TINY = ("--prompt-len", "12", "--output-len", "9")


@pytest.fixture(scope="module")
def dense(tmp_path_factory):
    return save_llama(tmp_path_factory.mktemp("plan") / "dense")


@pytest.fixture
def hardware(tmp_path):
    """A file of a device and a link with random figures, which were "calibrated" with 2 and 4 ranks."""
    uniform, calibrated = random.uniform, {"calibrated": True, "source": "a test"}
    device = {
        "name": "box", "memory_bandwidth_gb_s": uniform(10, 3000), "memory_gib": 1.0, "relative_error": 0.05,
        "matmul_tflop_s": {"float32": uniform(0.1, 100), "bfloat16": uniform(0.1, 900)}, "kernel_us": uniform(0, 5),
        "bandwidth_share": uniform(0.3, 1), "matmul_share": uniform(0.3, 1), "thin_us": uniform(0, 5),
        "launch_us": uniform(0, 5), "speeds": random.choice(list(known_engines())), **calibrated,
    }  # fmt: skip
    rows = [{"ranks": ranks, "alpha_us": uniform(1, 90), "bus_gb_s": uniform(0.1, 300)} for ranks in (2, 4)]
    link = {"name": "wire", "rows": rows, "contention": uniform(0, 0.5), "relative_error": 0.1, **calibrated}
    path = tmp_path / "box.yaml"
    path.write_text(yaml.safe_dump({"device": device, "link": link}))
    return path


def results(name):
    return json.loads((ROOT / "benchmarks" / "results" / f"{name}.json").read_text())


def planned(*arguments):
    return PlanResult.from_dict(invoke_json("plan", *arguments), "plan.json")


def test_a_quantised_checkpoint_is_planned_as_fp8(tmp_path):
    source = save_quantised(tmp_path / "fp8", fresh_rng().choice(["FP8 dynamic", "FP8 blocks", "modelopt"]))
    planned(source, *H100[:-1], "2", *TINY, "--dtype", "bfloat16")
    other = save_quantised(tmp_path / "others", "W4A16")
    assert "(compressed-tensors pack-quantized)" in one_sentence(invoke("plan", other, *H100[:-1], "2", *TINY))
    # compute gets shorter and messages do not: ladder wins more of a large model, whose weights need half
    shape = tmp_path / "config.json"
    shape.write_text(json.dumps({**read_shape("70b"), "quantization_config": {"quant_method": "fp8"}}))
    before, after = (planned("--shape", name, *H100, "--layout", "ladder").rows[:2] for name in ("70b", shape))
    projections = 80 * (2 * 8192 * 8192 + 2 * 8192 * 1024 + 3 * 8192 * 28672) // 8
    for one, other in zip(before, after, strict=True):
        assert other.decode_ms_per_token < one.decode_ms_per_token
        assert one.memory_need_bytes - other.memory_need_bytes == projections
    assert after[1].speedup > before[1].speedup


def test_rows_and_bands_of_a_known_shape():
    result = planned("--shape", "70b", *H100, "--batch-size", "1,16")
    shares = ["ladder=40:80", "delayed=40:80", "spd=24:80"]
    names = ["dense", *shares, "ladder", "delayed", "spd", "no-comm"]
    for group in result.groups():
        rows = {row.name: row for row in group}
        assert list(rows)[: len(names)] == names
        assert [row.kind for row in group[:9]] == ["layout"] * 7 + ["bound", "exact"]
        dense = rows["dense"]
        assert (dense.speedup_low, dense.speedup, dense.speedup_high) == (1, 1, 1)
        assert all(rows[name].speedup <= rows["no-comm"].speedup for name in names)
        assert rows["no-comm"].waiting_share == 0
        for row in rows.values():
            assert row.speedup_low <= row.speedup <= row.speedup_high
            assert row.basis == "predicted"
        # what is known of accuracy is of layouts on such shares of the layers
        losses = {name: row.loss for name, row in rows.items() if row.loss is not None}
        assert list(losses) == [*shares, "ladder", "delayed"]
        assert [loss.needs_long_training for loss in losses.values()] == [False] * 3 + [True] * 2
    # what 3 virtual ranks cannot run is left out; a layout that is named is refused
    rows = planned("--shape", "70b", *H100, "--sync-tp-size", "3").rows
    assert [row.name for row in rows[:4]] == ["dense", "ladder=40:80", "ladder", "no-comm"]


def test_losses_are_those_that_were_measured():
    models = {model["name"]: model for file in ("real_sweep", "real_few") for model in results(file)["models"]}
    measured = {"spd=20:29": "spd-few+align", "spd=8:30": "spd+align"}
    for kind in ("ladder", "delayed"):
        measured |= {f"{kind}=20:29": f"{kind}-few+align", f"{kind}=15:30": f"{kind}-upper+align"}
        measured[kind] = f"{kind}-all+align"
    for name, model in measured.items():
        loss, points = measured_loss(named_layout(name, 30, 3)), models[model]["points"]
        assert [loss.points, loss.low, loss.high] == pytest.approx([*points.values()][:3], abs=0.051)
    both = Layout.from_layers(30, spd=range(8, 30), delayed=range(15, 30), sync_tp_size=3)
    assert measured_loss(both).points == pytest.approx(models["spd-delayed+align"]["points"]["value"])
    for unknown in ("spd", "spd+ladder", "ladder=8:30", "dense"):
        assert measured_loss(named_layout(unknown, 30, 3)) is None


@pytest.mark.parametrize(
    ("device", "engine", "ranks", "links"),
    [
        ("h100-sxm", "vllm", 8, {"nccl_nvlink_h100", "nvls_multimem_h100", "one_shot_nvlink_h100"}),
        ("a100-80gb", "vllm", 8, {"nccl_nvlink_h100", "one_shot_nvlink_h100"}),  # its switch sums nothing
        ("h100-sxm", "published", 8, {"nvlink"}),
        ("l40s", "vllm", 2, {"nccl_pcie4", "one_shot_pcie"}),
        ("l40s", "vllm", 4, {"nccl_pcie4"}),  # vLLM's own kernel takes two cards over PCIe
        ("v100-pcie", "vllm", 4, {"nccl_pcie"}),
        ("rtx-pro-6000", "vllm", 8, {"nccl_pcie5"}),
        ("rtx-4090", "vllm", 2, {"nccl_host"}),
        ("b200", "vllm", 8, {"nccl_nvlink_b300", "nvls_multimem_b300", "one_shot_nvlink_b300"}),
        ("mi300x", "vllm", 8, {"nccl_xgmi", "one_shot_xgmi"}),
    ],
)
def test_an_engine_takes_its_fastest_all_reduce(device, engine, ranks, links):
    spec, facts = read_device(device), known_engines()[engine]
    own = [link for link in own_links(spec, facts) if ranks <= link.most_ranks]
    assert {link.name for link in own} == links
    dtype = "float16" if device.startswith("v100") else "bfloat16"
    served = Serving(read_shape("8b"), dtype, False, spec, facts, own_links(spec, facts), ranks, 1, 1024, 8)
    for size in (1 << 12, 1 << 18, 1 << 25):
        assert served.fastest(size).seconds(size) == min(link.at(ranks).seconds(size) for link in own)
    row = planned("--shape", "8b", "--hardware", device, "--tp-size", ranks, "--speeds", engine).rows[0]
    assert set(row.all_reduces.values()) <= links


def test_a_card_is_known_by_the_name_that_torch_gives_it():
    named = {known_gpu(row["torch_name"])["source"] for row in read_yaml(DEVICE_TABLE).values()}
    assert named == {device.source for device in known_devices().values()}
    assert known_gpu("NVIDIA H200")["memory_bandwidth_gb_s"] == 4800
    assert known_gpu("NVIDIA H100 PCIe") == {}  # not as fast as the one that is known


def test_every_known_card_is_planned_without_a_link():
    for name in known_devices():
        for group in planned("--shape", "8b", "--hardware", name, "--tp-size", "2,4,8", "--layout", "ladder").groups():
            assert group[0].fits
            assert set(group[0].all_reduces) == {"prefill", "decode"}
            assert 1 <= group[1].speedup < 2


def test_memory_is_that_of_the_tensors(dense, hardware):
    """One rank's dense weights, keys and values of all its heads, and the activations of a layer."""
    where = ("--hardware", hardware, "--tp-size", "1", "--layout", "dense", "--prompt-len", "12")
    served = [planned(dense, *where, "--batch-size", "3", "--output-len", length) for length in ("9", "10")]
    need, longer = (one.rows[0].memory_need_bytes for one in served)
    stored = sum(tensor.nbytes for tensor in read_checkpoint(dense).tensors.values())
    one_token = 2 * 4 * SHAPE["num_key_value_heads"] * 4 * 3 * 4  # keys, values; layers, heads, head_dim, batch, bytes
    assert longer - need == one_token
    assert need > stored + 21 * one_token
    assert served[0].rows[0].fits
    # 8 virtual ranks that read a delayed MLP apart have keys and values of their own, of 4 heads
    layouts = ("delayed,spd", "--sync-tp-size", "8")
    rows = planned(dense, *where[:5], *layouts, *where[6:], "--batch-size", "3", "--output-len", "9").rows
    needs = {row.name: row.memory_need_bytes for row in rows}
    assert needs["delayed"] - needs["spd"] == (12 + 9) * one_token


@pytest.mark.parametrize(
    ("arguments", "worth", "sentence"),
    [
        (("70b", "--link", "500,1", "--tp-size", 4), "yes", "Worth trying: spd 24:80 gives {best}."),
        (("70b", "--link", "500,1", "--tp-size", 4, "--layout", "ladder"), "yes", "{best} after a long training."),
        (("70b", "--tp-size", 8), "no", "Not worth it: {rival:.2f}x without any change by vLLM's fused all-reduces;"),
        (("70b", "--tp-size", 8, "--layout", "ladder"), "perhaps", "gives {best} after a long training, but"),
        (("8b", "--link", "500,1", "--tp-size", 2), "no", "{rival:.2f}x without any change by 1 of 2 ranks; spd"),
        (("8b", "--tp-size", 2), "no", "Not worth it: ladder 16:32 gives {best}."),
        (("70b", "--link", "60,300", "--tp-size", 4), "perhaps", "gives {best}, so that it may be slower than dense."),
    ],
)
def test_verdicts(arguments, worth, sentence):
    """A layout has to gain more than a little, more than what changes no result, and surely."""
    where = ("--hardware", "l40s" if "--link" in arguments or "8b" in arguments else "h100-sxm", "--shape", *arguments)
    result = planned(*where)
    (verdict,), rows = result.verdicts, {row.name: row for row in result.rows}
    best = rows[verdict.layout or next(name for name in rows if name.startswith("ladder"))]
    rival = max([rows["dense"], *(row for row in result.rows if row.kind == "exact")], key=lambda row: row.speedup)
    expected = sentence.format(
        best=f"{best.speedup:.2f}x ({best.speedup_low:.2f} to {best.speedup_high:.2f})", rival=rival.speedup
    )
    assert expected in verdict.sentence
    assert verdict.worth == worth
    shown = " ".join(invoke("plan", *where).stdout.split())
    assert verdict.sentence in shown
    kind, _, ranges = best.name.partition("=")
    options = f"--{kind} {ranges or 'all'}{' --sync-tp-size 4' if kind == 'spd' else ''}"
    assert shown.endswith(f"next: ladderize convert MODEL OUT {options}") == (worth != "no")
    by_speed = best.speedup >= 1.05 and best.speedup > rival.speedup
    surely = best.speedup_low > max(1, rival.speedup_high if rival.name != "dense" else 1)
    assert (by_speed, by_speed and surely) == (worth != "no", worth == "yes")


def test_what_does_not_fit_has_no_speeds():
    where = ("--shape", "405b", "--hardware", "h100-sxm", "--tp-size", "4")
    lines = invoke("plan", *where).stdout.splitlines()
    assert lines[2].endswith("the smallest --tp-size that fits is 16.")
    assert not [line for line in lines if "speed-up" in line]
    assert planned(*where[:-1], "16", "--outer-link", "20,100").rows[0].fits


def test_a_figure_is_calibrated_where_device_and_link_are(dense, hardware):
    def basis(ranks, *more):
        return {row.basis for row in planned(dense, "--hardware", hardware, "--tp-size", ranks, *TINY, *more).rows}

    timed = read_device(str(hardware)).speeds
    assert planned(dense, "--hardware", hardware, "--tp-size", "2", *TINY).speeds == timed
    assert planned("--shape", "8b", *H100).speeds == "vllm"
    for engine in known_engines():
        assert basis("2", "--speeds", engine) == {"calibrated" if engine == timed else "predicted"}
    content = yaml.safe_load(hardware.read_text())
    for key in ("link", "device"):
        hardware.write_text(yaml.safe_dump({**content, key: {**content[key], "calibrated": False}}))
        assert basis("2") == {"predicted"}


def test_what_others_measured():
    """Times of all-reduces and of decoding that others published, which no figure was fitted to."""
    h100, pro = read_device("h100-sxm"), read_device("rtx-pro-6000")
    vllm = known_engines()["vllm"]
    # one exposed sum more in each of about 40 layers of a 120B at TP4: 0.57 ms (vLLM pull request 52301)
    times = sorted(link.at(4).seconds(1 << 12) for link in own_links(h100, vllm))
    assert times[0] < 0.57e-3 / 40 < times[-1]
    # NCCL among four cards, 8 KB: 15.2 us (gardenlinux issue 4556)
    nccl = next(link for link in own_links(pro, vllm) if link.kernel == "nccl")
    assert nccl.at(4).seconds(1 << 13) == pytest.approx(15.2e-6, rel=0.15)
    # one request on RTX 6000 Ada, 59 tokens/s on one card and 89 on two, if that was an 8B
    rows = planned("--shape", "8b", "--hardware", "rtx-6000-ada", "--tp-size", "1,2").rows
    speeds = [1e3 / row.decode_ms_per_token for row in rows if row.name == "dense"]
    assert speeds == pytest.approx([59, 89], rel=0.2)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--hardware", "h1000", "--tp-size", "1"), "--hardware h1000 is neither one of"),
        ((*H100, "--layout", "rungs"), "--layout rungs is not one of dense, ladder, delayed, spd,"),
        ((*H100, "--sync-tp-size", "3", "--layout", "spd"), "neither divides nor is a multiple of the 3"),
        ((*H100[:-1], "16"), "16 h100-sxm are no machine: it has 8 at most. Give --outer-link"),
        ((*H100, "--link", "nccl_two_nodes_ib_ndr"), "joins machines"),
        ((*H100[:2], "--tp-size", "8", "--speeds", "runtime-cpu"), "examples/hardware/my-card.yaml"),
        ((*H100, "--verify", "3"), "a choice needs the costs of layers and a budget"),
        ((*H100, "--recipe-out", "r.yaml"), "a choice needs the costs of layers and a budget"),
        ((*H100, "--outer-link", "40,25"), "--outer-link joins machines of 8 ranks: give"),
    ],
)
def test_what_is_refused(arguments, message):
    assert message in one_sentence(invoke("plan", "--shape", "8b", *arguments))


@pytest.fixture(scope="module")
def costs(dense, tmp_path_factory):
    """What the sync points of the dense model cost, with 4 virtual ranks, on random ids."""
    folder = tmp_path_factory.mktemp("costs")
    np.save(folder / "ids.npy", fresh_rng().integers(3, SHAPE["vocab_size"], (12, 24), dtype=np.uint16))
    words = ("--data", folder / "ids.npy", "--sync-tp-size", "4", "--samples", "4", "--out", folder / "s.json")
    invoke_well("sensitivity", dense, *words)
    return folder / "s.json"


ANY = ("--max-ppl-increase", "500%")


def choice_of(model, costs, *more):
    words = (*H100[:4], "--tp-size", "4", *TINY, "--sensitivity", costs, *ANY)
    return invoke("plan", *(model if isinstance(model, tuple) else (model,)), *words, *more)


def check_measured(dense, ids, chosen):
    """Its costs are the oracle's, in nats per token, of the 4 windows that were chosen by and of 4 others."""
    windows = np.load(ids)[np.random.default_rng(0).permutation(12)].astype(np.int64)
    for cost, scored in ((chosen.measured, windows[:4]), (chosen.held_out, windows[4:8])):
        if cost is not None:
            nll, before = (
                oracle_nll(blocks_of(dense), layout, scored) for layout in (chosen.as_layout, Layout.dense(4))
            )
            increase = (nll - before) / (scored.shape[1] - 1)
            expected = [increase.mean(), increase.std(ddof=1) / len(scored) ** 0.5, len(scored)]
            assert [*vars(cost).values()] == pytest.approx(expected, abs=1e-5, rel=1e-5)


def test_plan_recipe_convert_bench(dense, costs, tmp_path):
    """One story: what is chosen and verified is converted as it was planned, and runs."""
    recipe, out = tmp_path / "recipe.yaml", tmp_path / "model"
    files = ("--recipe-out", recipe, "--out", tmp_path / "plan.json")
    outcome = choice_of(dense, costs, "--verify", "3", *files)
    assert outcome.code == 0, outcome
    result = PlanResult.from_dict(json.loads((tmp_path / "plan.json").read_text()), "plan.json")
    choice = result.choice
    assert [row.speedup for row in result.rows if row.name == "chosen"] == [pytest.approx(choice.chosen.speedup)]
    assert not list(tmp_path.glob("measured-*"))
    check_measured(dense, costs.with_name("ids.npy"), choice.chosen)
    invoke_well("convert", dense, out, "--recipe", recipe, "--no-verify")
    assert Layout.from_config(read_config(out)) == choice.chosen.as_layout
    quick = ("--repeat", "1", "--warmup", "1", *TINY, "--baselines", "", "--dtype", "float32")
    assert invoke_json("bench", dense, out, *quick)["rows"][1]["attention_sync"] == choice.chosen.attention_sync


def test_what_was_measured_is_kept_until_the_plan_is_written(dense, costs, tmp_path):
    budget = ("--verify", "3", "--out", tmp_path / "plan.json")
    with mock.patch.object(run, "write_json", side_effect=UserError("the disk is full")):
        assert "the disk is full" in one_sentence(choice_of(dense, costs, *budget))
    assert list(tmp_path.glob("measured-plan-*"))
    with mock.patch.object(measure.LayerwiseScores, "__call__", None):  # nothing is computed again
        assert choice_of(dense, costs, *budget).code == 0
    assert not list(tmp_path.glob("measured-*"))


def test_choices_that_are_refused(dense, costs, tmp_path):
    unlike, others, ladder = tmp_path / "unlike.json", tmp_path / "others.npy", tmp_path / "ladder"
    document = json.loads(costs.read_text())
    unlike.write_text(json.dumps(document).replace('"sync_tp_size": 4', '"sync_tp_size": 3'))
    ladderize.convert_checkpoint(dense, ladder, Layout.from_layers(4, ladder=range(4)), verify=False)
    other = save_llama(tmp_path / "other", seed=int(torch.randint(1, 1 << 20, ())))
    for model, file, message in (
        (dense, unlike, "is neither a divisor nor a multiple; measure it with --sync-tp-size 4"),
        (other, costs, "was measured on another model"),
        (ladder, costs, "is not dense (4 layers: ladder 0:4); a layout is chosen for the dense model"),
    ):
        assert message in one_sentence(choice_of(model, file))
    np.save(others, fresh_rng().integers(3, 90, (12, 24)))
    document["data"]["file"] = str(others)
    unlike.write_text(json.dumps(document))
    refused = one_sentence(choice_of(dense, unlike, "--verify", "3"))
    assert "is not the data that the costs were measured on" in refused
    assert choice_of(("--shape", dense), costs).code == 0
    refused = one_sentence(choice_of(("--shape", dense), costs, "--verify", "3"))
    assert "--shape has no weights; name the checkpoint" in refused


def test_groups_of_ranks_that_a_slow_link_joins():
    """Two machines of 8: what is late or dropped crosses the link between them less, and sums within one do not."""
    slow = random.uniform(2, 20)
    machines = ("--hardware", "h100-sxm", "--link", "nvlink", "--tp-size", "8,16", "--sync-tp-size", 2)
    plans = [
        planned("--shape", "70b", *machines, "--batch-size", 2, "--outer-link", outer).groups()
        for outer in (f"40,{slow}", f"40,{2 * slow}")
    ]
    inside = [[row.speedup for row in alone] for alone, _ in plans]
    assert inside[0] == inside[1]  # of one machine
    slower, faster = ({row.name: row for row in joined} for _, joined in plans)
    for name in ("dense", "ladder", "delayed", "spd"):
        assert slower[name].prefill_ms > faster[name].prefill_ms
    assert slower["2 replicas"].prefill_ms == faster["2 replicas"].prefill_ms  # each on a machine of its own
    for rows in (slower, faster):  # a dropped sum is waited for within a machine, a whole one between them, too
        assert rows["spd"].decode_ms_per_token < rows["dense"].decode_ms_per_token
