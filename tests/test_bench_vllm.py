"""bench --engine vllm, as far as it goes without vLLM: what is refused and served, rows."""

import importlib
import json
import random
import statistics
from types import SimpleNamespace

import pytest
import torch

from ladderize.console import Console
from ladderize.errors import UsageError, UserError
from ladderize.files.documents import read_document, write_json
from ladderize.layout import Layout
from ladderize.ranks.group import Ranks
from ladderize.runtime.bench.document import (
    BASELINE_ROW,
    MODEL_ROW,
    PHASES,
    BenchDocument,
    BenchRow,
    environment,
    inference_figures,
)
from ladderize.runtime.bench.options import BenchOptions, ModelChoice, check_vllm_usage
from ladderize.runtime.bench.report import show_bench
from ladderize.runtime.bench.rounds import Variant
from ladderize.runtime.spec import checkpoint_spec, shape_spec
from ladderize.vllm import environment as vllm_environment
from ladderize.vllm.environment import configuration_refusal
from ladderize.vllm.served import PLUGIN_ROW, served_models
from tests.helpers import ROOT, SHAPE, invoke, one_sentence, save_llama

LAYERS = SHAPE["num_hidden_layers"]


# ---- what is refused ----


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--backend", "gloo"], "--backend has no effect with --engine vllm; LADDERIZE_VLLM_BACKEND"),
        (["--train"], "--train has no effect with --engine vllm"),
        (["--emulate-tp", "2", "--link", "20,1"], "--emulate-tp has no effect with --engine vllm; LADDERIZE_VLLM"),
        (["--device", "cpu"], "--device has no effect with --engine vllm"),
        (["--schedule", "domino"], "--schedule has no effect with --engine vllm"),
        (["--no-check"], "--no-check has no effect with --engine vllm, whose tokens are not compared"),
        (["--seq-len", "8"], "--seq-len has no effect with --engine vllm"),
        (["--baselines", "no-comm"], "--baselines no-comm is not one of plugin"),
    ],
)
def test_what_vllm_has_no_use_for(arguments, words):
    done = invoke("bench", "--engine", "vllm", "--random-weights", "1b", *arguments)
    assert done.code == 2
    assert words in one_sentence(done)


def test_options_from_python_are_checked():
    shape = ModelChoice(random_weights="1b")
    for wrong, words in (
        (BenchOptions(output_len=1), "--output-len must be an integer of at least 2"),
        (BenchOptions(repeat=0), "--repeat must be"),
        (BenchOptions(batch_sizes=(0,)), "--batch-size"),
    ):
        with pytest.raises(UsageError, match=words):
            check_vllm_usage(shape, wrong)
    with pytest.raises(UsageError, match="name checkpoints, or a shape"):
        check_vllm_usage(ModelChoice(), BenchOptions())
    check_vllm_usage(shape, BenchOptions(baselines=("plugin",)))


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
    served = served_models(specs(), BenchOptions(tp_size=2, baselines=("plugin",)), tmp_path)
    assert [row.name for row in served] == ["dense", PLUGIN_ROW, "ladder", "spd"]
    assert [row.is_baseline for row in served] == [False, True, False, False]
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
    first, plugin = served_models([spec], BenchOptions(baselines=("plugin",)), tmp_path / "work")
    for row in (first, plugin):
        assert row.spec.folder == spec.folder
        weights = row.folder / "model.safetensors"
        assert weights.is_symlink()
        assert weights.resolve() == (source / "model.safetensors").resolve()
        assert not (row.folder / "config.json").is_symlink()
    assert json.loads((source / "config.json").read_text())["model_type"] == "llama"


def test_the_plugin_baseline_is_of_a_dense_model(tmp_path):
    with pytest.raises(UserError, match="--baselines plugin needs a dense model as the first one, and ladder"):
        served_models(specs(("ladder", "dense")), BenchOptions(baselines=("plugin",)), tmp_path)


class Wrapped(Exception):
    def errors(self):
        return [{"msg": "Value error, tp 3 does not divide it"}]


def test_of_vllms_report_on_all_options_the_wrong_one_is_told():
    assert configuration_refusal(Wrapped("1 validation error for ...")) == "tp 3 does not divide it"
    assert configuration_refusal(ValueError("plain")) is None


# ---- rows ----


def timed_rows(folder, batch=3, rounds=5):
    """Rows as an engine makes them, of random times."""
    options = BenchOptions(tp_size=2, repeat=rounds, output_len=11, baselines=("plugin",))
    rows, first = [], None
    for served in served_models(specs(), options, folder):
        seconds = {phase: [random.uniform(0.01, 0.02) for _ in range(rounds)] for phase in PHASES}
        first = first or seconds
        timed = SimpleNamespace(peak_memory_bytes=None, samples_ms=lambda seconds=seconds: seconds)
        kind = BASELINE_ROW if served.is_baseline else MODEL_ROW
        rows.append(
            BenchRow(
                **Variant(served.name, served.spec, timed).row_figures(2, batch),
                **inference_figures(seconds, first, options.decode_steps, batch),
                **{"kind": kind, "weight_bytes": 7, "kv_cache_bytes": 7},
                architecture=served.architecture,
                fused_norm=False,
            )
        )
        median = statistics.median(seconds["decode"])
        assert rows[-1].speedup("decode")[0] == pytest.approx(statistics.median(first["decode"]) / median)
        assert rows[-1].output_tokens_per_s == pytest.approx(batch / median)
        assert rows[-1].end_to_end_ms == pytest.approx(rows[-1].prefill_ms + 10 * rows[-1].decode_ms_per_token)
    return options, rows


def test_the_document_comes_back_and_is_shown(tmp_path, capsys):
    (tmp_path / "work").mkdir()
    options, rows = timed_rows(tmp_path / "work")
    document = BenchDocument(
        engine="vllm",
        complete=True,
        options=options,
        backend="gloo over vb",
        messages="gloo",
        environment=environment(Ranks(0, 1, torch.device("cpu")), settings=("VLLM_",), vllm="0.32.0"),
        rows=rows,
        failed={},
        link=None,
        alone_ms={},
    )
    out = tmp_path / "bench.json"
    write_json(out, document.to_dict())
    assert BenchDocument.from_dict(read_document(out, "benchmark"), out) == document
    capsys.readouterr()
    show_bench(document, Console())
    shown = capsys.readouterr().out
    assert "vLLM 0.32.0, 2 ranks, gloo over vb, messages in flight by gloo; prompt 128, output 11, medians" in shown
    assert PLUGIN_ROW in shown
    assert "only the times are meaningful" in shown
    assert "waited ms" not in shown


# ---- the picture of a trace ----


@pytest.fixture
def picture(monkeypatch):
    pytest.importorskip("matplotlib")
    monkeypatch.syspath_prepend(str(ROOT / "docs"))
    return importlib.import_module("draw_serving_trace")


def test_the_kept_trace_is_what_serving_md_shows(picture):
    rows = json.loads(picture.KEPT.read_text())["rows"]
    assert list(rows) == ["dense", "ladder"]
    assert rows["ladder"]["end"] < rows["dense"]["end"]
    assert all(sent["waited"] == sent["start"] for sent in rows["dense"]["messages"])
    assert all(sent["waited"] > sent["start"] for sent in rows["ladder"]["messages"])
    assert (ROOT / "docs" / "serving_trace.svg").is_file()
