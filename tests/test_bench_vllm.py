"""bench --engine vllm, as far as it goes without vLLM: what is refused and served, the ranks' environment, rows."""

import dataclasses
import importlib
import json
import multiprocessing
import os
import random
import re
import statistics

import pytest
import torch

from ladderize.console import Console
from ladderize.errors import UsageError, UserError
from ladderize.files.documents import read_document, write_json
from ladderize.layout import Layout, LayoutError
from ladderize.ranks.environment import Place, environment_with
from ladderize.ranks.group import Ranks
from ladderize.runtime.bench.document import environment
from ladderize.runtime.bench.harness import Timed, TimedVariant
from ladderize.runtime.bench.options import ModelChoice
from ladderize.runtime.bench.rows import BASELINE_ROW, MODEL_ROW, PHASES
from ladderize.runtime.launch import reporting_errors
from ladderize.runtime.spec import checkpoint_spec, shape_spec
from ladderize.serving.vllm import environment as vllm_environment
from ladderize.serving.vllm.bench import processes
from ladderize.serving.vllm.bench.document import (
    ServedVariant,
    VllmBenchDocument,
    plot_vllm_bench,
    show_vllm_bench,
    vllm_rows,
)
from ladderize.serving.vllm.bench.options import VllmBenchOptions, check_vllm_usage
from ladderize.serving.vllm.bench.processes import rank_environment
from ladderize.serving.vllm.bench.served import PLUGIN_ROW, served_models, vllm_config
from ladderize.serving.vllm.environment import configuration_refusal
from tests.helpers import ROOT, SHAPE, invoke, one_sentence, save_llama

LAYERS = SHAPE["num_hidden_layers"]


# ---- what is refused ----


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--backend", "gloo"], "--backend has no effect with --engine vllm; LADDERIZE_VLLM_BACKEND"),
        (["--train"], "--train has no effect with --engine vllm, which does not train"),
        (["--emulate-tp", "2", "--link", "20,1"], "--emulate-tp has no effect with --engine vllm; LADDERIZE_VLLM"),
        (["--device", "cpu"], "--device has no effect with --engine vllm, which computes on what it was built for"),
        (["--compile"], "--compile has no effect with --engine vllm, which compiles by itself"),
        (["--schedule", "domino"], "--schedule has no effect with --engine vllm"),
        (["--domino-chunks", "2"], "--domino-chunks has no effect with --engine vllm"),
        (["--replicate-vocab"], "--replicate-vocab has no effect with --engine vllm"),
        (["--no-check"], "--no-check has no effect with --engine vllm, whose tokens are not compared"),
        (["--seq-len", "8"], "--seq-len has no effect with --engine vllm"),
        (["--baselines", "no-comm"], "--baselines no-comm is not for --engine vllm; it takes plugin"),
        (["--baselines", "unfused,unfused"], "--baselines names unfused twice"),
        (["--baselines", "plugin,plugin"], "--baselines names plugin twice"),
        (["--baselines", "replicas", "--tp-size", "3"], "--baselines replicas needs an even number of ranks"),
        (["--baselines", "replicas"], "half for each of two, and --tp-size is 1"),
        (["--batch-size", "1,x"], "--batch-size '1,x' is not a comma-separated list"),
    ],
)
def test_what_vllm_has_no_use_for(arguments, words):
    done = invoke("bench", "--engine", "vllm", "--random-weights", "1b", *arguments)
    assert done.code == 2
    assert words in one_sentence(done)


def test_options_from_python_are_checked():
    shape = ModelChoice(random_weights="1b")
    for wrong, words in (
        (VllmBenchOptions(output_len=1), "--output-len must be an integer of at least 2"),
        (VllmBenchOptions(repeat=0), "--repeat must be"),
        (VllmBenchOptions(tp_size=0), "--tp-size must be"),
        (VllmBenchOptions(batch_sizes=()), "--batch-size"),
        (VllmBenchOptions(batch_sizes=(0,)), "--batch-size"),
    ):
        with pytest.raises(UsageError, match=words):
            check_vllm_usage(shape, wrong)
    with pytest.raises(UsageError, match="name checkpoints, or a shape"):
        check_vllm_usage(ModelChoice(), VllmBenchOptions())
    check_vllm_usage(shape, VllmBenchOptions(baselines=("plugin",)))


def test_an_engine_that_is_not_known(monkeypatch, tmp_path):
    monkeypatch.setattr(vllm_environment, "installed_version", lambda: "0.33.0")
    done = invoke("bench", "--engine", "vllm", "--random-weights", "1b", "--out", tmp_path / "o.json")
    assert done.code == 1
    assert "and this is vLLM 0.33.0" in one_sentence(done)
    assert not (tmp_path / "o.json").exists()


# ---- what is served ----


def layouts():
    every = range(LAYERS)
    return {
        "dense": Layout.dense(LAYERS),
        "ladder": Layout.from_layers(LAYERS, ladder=every),
        "spd": Layout.from_layers(LAYERS, spd=every, sync_tp_size=2),
    }


def specs(names=("dense", "ladder", "spd")):
    return [
        shape_spec({**SHAPE, "model_type": "llama"}, layouts()[name], name=name, tp_size=2, dtype="float32")
        for name in names
    ]


def test_each_layout_is_a_folder_that_vllm_opens(tmp_path):
    served = served_models(specs(), VllmBenchOptions(tp_size=2, baselines=("plugin",)), tmp_path)
    assert [row.name for row in served] == ["dense", PLUGIN_ROW, "ladder", "spd"]
    assert [row.baseline for row in served] == [None, "plugin", None, None]
    configs = [json.loads((row.folder / "config.json").read_text()) for row in served]
    assert [config["architectures"] for config in configs] == [
        ["LlamaForCausalLM"],
        *[["LadderizedLlamaForCausalLM"]] * 3,
    ]
    assert "attention_sync" not in configs[0]
    for row, config in zip(served[1:], configs[1:], strict=True):
        assert config["model_type"] == "ladderized_llama"
        assert Layout.from_config(config) == row.spec.layout
    assert all("auto_map" not in config and config["vocab_size"] == SHAPE["vocab_size"] for config in configs)


def test_a_checkpoint_is_linked_to_and_not_copied(tmp_path):
    source = save_llama(tmp_path / "dense")
    (tmp_path / "work").mkdir()
    spec = checkpoint_spec(str(source), tp_size=1)
    first, plugin = served_models([spec], VllmBenchOptions(baselines=("plugin",)), tmp_path / "work")
    for row in (first, plugin):
        assert row.spec.folder == spec.folder
        weights = row.folder / "model.safetensors"
        assert weights.is_symlink()
        assert weights.resolve() == (source / "model.safetensors").resolve()
        assert not (row.folder / "config.json").is_symlink()
    assert json.loads((source / "config.json").read_text())["model_type"] == "llama"


def test_baselines_come_behind_the_first_model_in_the_order_given(tmp_path):
    served = served_models(specs(), VllmBenchOptions(tp_size=2, baselines=("plugin", "unfused")), tmp_path)
    assert [one.name for one in served[:3]] == [specs()[0].name, PLUGIN_ROW, "dense, norms not fused"]
    assert [one.baseline for one in served[:3]] == [None, "plugin", "unfused"]
    assert served[0].architecture == served[2].architecture != served[1].architecture
    assert all(one.spec is served[0].spec for one in served[:3])


def test_replicas_share_the_ranks_and_the_batch(tmp_path):
    options = VllmBenchOptions(tp_size=2, baselines=("replicas",), repeat=3)
    first, replicas = served_models(specs(("dense",)), options, tmp_path)
    assert (first.replicas, replicas.replicas) == (1, 2)
    assert [(first.part(batch), replicas.part(batch)) for batch in (1, 2, 5)] == [(1, 1), (2, 1), (5, 3)]
    assert (replicas.name, replicas.architecture) == ("dense, 2 replicas", first.architecture)
    timed = [
        ServedVariant(one.name, one.spec, TimedBefore(3), one.architecture, replicas=one.replicas)
        for one in (first, replicas)
    ]
    rows = vllm_rows(timed, options, 5)
    assert [(row.tp_size, row.batch_size) for row in rows] == [(2, 5), (1, 5)]
    assert rows[1].output_tokens_per_s == pytest.approx(5e3 / rows[1].decode_ms_per_token)


def test_replicas_are_of_a_model_that_half_of_the_ranks_can_run(tmp_path):
    config = {**SHAPE, "model_type": "llama", "num_attention_heads": 24, "num_key_value_heads": 4}
    config |= {"hidden_size": 96, "head_dim": 4, "intermediate_size": 48}
    spec = shape_spec(config, layouts()["dense"], name="dense", tp_size=12, dtype="float32")
    with pytest.raises(LayoutError, match="half of --tp-size, 6 "):
        served_models([spec], VllmBenchOptions(tp_size=12, baselines=("replicas",)), tmp_path)


def test_the_plugin_baseline_is_of_a_dense_model(tmp_path):
    with pytest.raises(UserError, match="--baselines plugin needs a dense model as the first one, and ladder"):
        served_models(specs(("ladder", "dense")), VllmBenchOptions(baselines=("plugin",)), tmp_path)


def test_a_config_says_whose_class_it_is():
    config = {
        **SHAPE,
        "model_type": "ladderized_llama",
        "auto_map": {"AutoConfig": "x"},
        **layouts()["spd"].to_config(),
    }
    assert (
        not {"auto_map", "attention_sync", "sync_tp_size"}
        & vllm_config(config, layouts()["dense"], plugin=False).keys()
    )
    assert vllm_config(config, layouts()["ladder"], plugin=True)["sync_tp_size"] is None
    assert TimedVariant("/a/b c/x+y@z", None, None).stem == "x+y_z"


# ---- the ranks' processes ----


def environment_of(monkeypatch, rank, *, cores=(0, 1, 2, 3), threads=None, device="cpu", size=2, local=None, **said):
    monkeypatch.setattr(processes, "cores", lambda: set(cores))
    here = size if local is None else local
    return rank_environment(Place(rank, size, rank % here, here), device, threads, said)


def test_ranks_share_the_cores_as_vllm_binds_them(monkeypatch):
    first, second = (environment_of(monkeypatch, rank) for rank in (0, 1))
    assert (first["OMP_PLACES"], second["OMP_PLACES"]) == ("{0,1}", "{2,3}")
    assert first["OMP_NUM_THREADS"] == "2"
    assert (second["RANK"], second["WORLD_SIZE"], second["LOCAL_RANK"]) == ("1", "2", "1")
    assert first["VLLM_ENABLE_V1_MULTIPROCESSING"] == "0"
    assert environment_of(monkeypatch, 1, threads=1)["OMP_PLACES"] == "{1}"
    bound = environment_of(monkeypatch, 1, VLLM_CPU_OMP_THREADS_BIND="0|2-3")
    assert (bound["OMP_PLACES"], bound["OMP_NUM_THREADS"]) == ("{2,3}", "2")
    assert environment_of(monkeypatch, 0, VLLM_LOGGING_LEVEL="INFO")["VLLM_LOGGING_LEVEL"] == "INFO"


def test_a_rank_alone_on_its_host_keeps_the_interface_that_was_said(monkeypatch):
    apart = environment_of(monkeypatch, 1, local=1, GLOO_SOCKET_IFNAME="vb", VLLM_CPU_OMP_THREADS_BIND="1")
    assert "GLOO_SOCKET_IFNAME" not in apart  # as it was
    assert apart["OMP_PLACES"] == "{1}"
    assert environment_of(monkeypatch, 0)["GLOO_SOCKET_IFNAME"] in ("lo", "lo0")


def test_openmp_is_loaded_once(monkeypatch):
    monkeypatch.setattr(processes, "_openmp", lambda: "/torch/libgomp.so")
    assert environment_of(monkeypatch, 0)["LD_PRELOAD"] == "/torch/libgomp.so"
    assert environment_of(monkeypatch, 0, LD_PRELOAD="/x/libtcmalloc.so")["LD_PRELOAD"].endswith(":/torch/libgomp.so")
    assert environment_of(monkeypatch, 0, LD_PRELOAD="/x/libiomp5.so")["LD_PRELOAD"] == "/x/libiomp5.so"
    assert "LD_PRELOAD" not in environment_of(monkeypatch, 0, device="cuda")


@pytest.mark.parametrize(
    ("said", "words"),
    [
        ({"VLLM_CPU_OMP_THREADS_BIND": "0"}, "names the cores of 1 ranks, and 2 run here"),
        ({"VLLM_CPU_OMP_THREADS_BIND": "0|9"}, "names core 9, which this process may not use"),
        ({"VLLM_CPU_OMP_THREADS_BIND": "0|a"}, "is no list of cores"),
        ({"VLLM_CPU_OMP_THREADS_BIND": "0|1", "threads": 2}, "--threads 2 contradicts VLLM_CPU_OMP_THREADS_BIND=0|1"),
        ({"threads": 3}, "need more than the 4 cores here"),
    ],
)
def test_cores_that_are_not_there(monkeypatch, said, words):
    with pytest.raises(UserError, match=words.replace("|", r"\|")):
        environment_of(monkeypatch, 1, **said)


def test_variables_are_put_back(monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "7")
    monkeypatch.delenv("OMP_PLACES", raising=False)
    with environment_with({"OMP_NUM_THREADS": "1", "OMP_PLACES": "{0}"}):
        assert os.environ["OMP_PLACES"] == "{0}"
    assert os.environ["OMP_NUM_THREADS"] == "7"
    assert "OMP_PLACES" not in os.environ


class Wrapped(Exception):
    def errors(self):
        return [{"msg": "Value error, tp 3 does not divide it"}]


def test_of_vllms_report_on_all_options_the_wrong_one_is_told():
    assert configuration_refusal(Wrapped("1 validation error for ...")) == "tp 3 does not divide it"
    assert configuration_refusal(ValueError("plain")) is None


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (torch.OutOfMemoryError("no room"), "out of memory: no room; a smaller --batch-size, .* take less"),
        (Wrapped("out of memory, on another line"), "rank 1 failed: Wrapped: tp 3 does not divide it"),
        (ValueError("plain"), "rank 1 failed: ValueError: plain"),
        (UserError("a sentence"), "a sentence"),
    ],
)
def test_a_rank_reports_one_sentence_and_ends(error, words, monkeypatch):
    ours, theirs = multiprocessing.Pipe(duplex=False)
    ends = []
    with monkeypatch.context() as patch:
        patch.setattr(os, "_exit", ends.append)
        with reporting_errors(theirs, Place(1, 2, 1, 2), configuration_refusal):
            raise error
    kind, (_, found) = ours.recv()
    assert (kind, ends, type(found)) == ("error", [1], UserError)
    assert re.fullmatch(words, str(found))


# ---- rows ----


class TimedBefore(Timed):
    parts = PHASES

    def __init__(self, rounds):
        super().__init__()
        for seconds in self.seconds.values():
            seconds += [random.uniform(0.01, 0.02) for _ in range(rounds)]

    def sample(self):
        raise NotImplementedError


def timed_rows(rounds=5, batch=3):
    kinds = {"dense": MODEL_ROW, PLUGIN_ROW: BASELINE_ROW, "ladder": MODEL_ROW, "spd": MODEL_ROW}
    models = specs(("dense", "dense", "ladder", "spd"))
    timed = [
        ServedVariant(name, spec, TimedBefore(rounds), "LlamaForCausalLM", kind=kind)
        for (name, kind), spec in zip(kinds.items(), models, strict=True)
    ]
    options = VllmBenchOptions(tp_size=2, repeat=rounds, output_len=11, baselines=("plugin",))
    return timed, options, vllm_rows(timed, options, batch)


def test_rows_compare_within_a_round(tmp_path):
    timed, _, rows = timed_rows()
    assert [row.kind for row in rows] == [MODEL_ROW, BASELINE_ROW, MODEL_ROW, MODEL_ROW]
    for row, of in zip(rows, timed, strict=True):
        for phase in ("prefill", "decode"):
            pairs = zip(of.timed.seconds[phase], timed[0].timed.seconds[phase], strict=True)
            assert row.ratio(phase) == pytest.approx(statistics.median(a / b for a, b in pairs))
            assert row.samples_ms[phase] == pytest.approx([1e3 * s for s in of.timed.seconds[phase]])
            low, high = row.quartiles_ms[phase]
            assert low <= row.total_ms(phase) <= high
        assert row.output_tokens_per_s == pytest.approx(3e3 / row.decode_ms_per_token)
        assert row.end_to_end_ms == pytest.approx(row.prefill_ms + 10 * row.decode_ms_per_token)
    assert (rows[0].ratio_prefill, rows[0].speedup_decode) == (1.0, 1.0)


def document_of(options, rows):
    return VllmBenchDocument(
        engine="vllm",
        complete=True,
        emulated=False,
        options=options,
        vllm="0.32.0",
        backend="gloo over vb",
        messages="gloo",
        environment=environment(Ranks(0, 1, torch.device("cpu")), settings=("VLLM_",)),
        rows=rows,
    )


def test_the_document_comes_back_and_is_shown(tmp_path, capsys):
    _, options, rows = timed_rows()
    document = document_of(options, rows)
    out = tmp_path / "bench.json"
    write_json(out, document.to_dict())
    assert VllmBenchDocument.from_dict(read_document(out, "benchmark"), out) == document
    for named, words in ((out, "is of bench --engine vllm, which no report shows"), (tmp_path, "nothing to report on")):
        assert words in one_sentence(invoke("report", named, "--out", tmp_path / "report.html"))
    capsys.readouterr()
    show_vllm_bench(document, Console())
    shown = capsys.readouterr().out
    assert "vLLM 0.32.0, 2 ranks, gloo over vb, messages in flight by gloo; prompt 128, output 11, medians" in shown
    assert PLUGIN_ROW in shown
    assert "only the times are meaningful" in shown


def test_the_picture_has_a_panel_for_each_batch_size_and_phase(tmp_path):
    _, options, rows = timed_rows()
    document = document_of(options, [*rows, *(dataclasses.replace(row, batch_size=8) for row in rows)])
    for path in plot_vllm_bench(document, tmp_path / "picture"):
        assert path.stat().st_size > 1000


# ---- the picture of a trace ----


@pytest.fixture
def picture(monkeypatch):
    pytest.importorskip("matplotlib")
    monkeypatch.syspath_prepend(str(ROOT / "docs"))
    return importlib.import_module("draw_serving_trace")


def traced_prefill(picture, *, in_flight, layers=6):
    """Events of a made-up run in microseconds: products of 1000, all-reduces of 1500, and what is to be drawn of them.

    in_flight: each all-reduce begins after the second product of a sub-module and is waited for after the next one's.
    """
    events, time, modules, messages, pending = [], 0.0, [], [], None

    def event(name, start, duration, cat="cpu_op"):
        events.append({"ph": "X", "name": name, "cat": cat, "ts": start, "dur": duration})

    for number in range(2 * layers):
        modules.append((time, time + 2000.0))
        for _ in range(2):
            event(random.choice(picture.PRODUCTS), time, 1000.0)
            time += 1000.0
        if pending is not None:
            arrived = pending + random.choice((1500.0, 2400.0))  # under compute, or later
            event(picture.ARRIVAL, pending - 5000.0, arrived - pending + 5000.0, "user_annotation")
            event(picture.WAIT, time, max(1.0, arrived - time), "user_annotation")
            messages.append((pending, min(time, arrived), arrived))
            time = max(time + 1.0, arrived)
            pending = None
        if in_flight and number < 2 * layers - 1:
            event(picture.START, time, 10.0, "user_annotation")
            pending = time
            time += 10.0
        elif not in_flight:
            event(picture.BLOCKING[0], time, 1500.0, "user_annotation")
            messages.append((time, time, time + 1500.0))
            time += 1500.0
    event(picture.PRODUCTS[0], time, 500.0)  # the LM head
    events.append({"ph": "X", "name": "prefill", "cat": "user_annotation", "ts": -1.0, "dur": time + 1000.0})
    random.shuffle(events)
    return events, modules, messages


@pytest.mark.parametrize("in_flight", [True, False])
def test_what_is_drawn_is_what_the_trace_says(picture, in_flight, tmp_path):
    events, modules, messages = traced_prefill(picture, in_flight=in_flight)
    path = tmp_path / "trace.json"
    path.write_text(json.dumps({"traceEvents": events}))
    row = picture.reduced(path)
    first, count = 2 * picture.FIRST_LAYER, 2 * picture.LAYERS
    zero, end = modules[first][0], modules[first + count][0]
    drawn = modules[first : first + count + 1]
    assert [(each["start"], each["end"]) for each in row["modules"]] == [
        pytest.approx(((a - zero) / 1e3, (b - zero) / 1e3)) for a, b in drawn
    ]
    assert [each["label"] for each in row["modules"]] == ["A2", "M2", "A3", "M3", "A4"]
    assert row["end"] == pytest.approx((end - zero) / 1e3)
    wanted = [tuple((t - zero) / 1e3 for t in each) for each in messages if each[0] < end and each[2] > zero]
    assert [(each["start"], each["waited"], each["end"]) for each in row["messages"]] == [
        pytest.approx(each, abs=1e-3) for each in wanted
    ]


def test_the_kept_trace_is_what_serving_md_shows(picture):
    rows = json.loads(picture.KEPT.read_text())["rows"]
    assert list(rows) == ["dense", "ladder"]
    assert rows["ladder"]["end"] < rows["dense"]["end"]
    assert all(sent["waited"] == sent["start"] for sent in rows["dense"]["messages"])
    assert all(sent["waited"] > sent["start"] for sent in rows["ladder"]["messages"])
    assert (ROOT / "docs" / "serving_trace.svg").is_file()
