"""bench --engine vllm, as far as it goes without vLLM: what is refused and served."""

import json

import pytest

from ladderize.errors import UserError
from ladderize.layout import Layout
from ladderize.runtime.bench.options import BenchOptions
from ladderize.runtime.spec import checkpoint_spec, shape_spec
from ladderize.vllm import environment as vllm_environment
from ladderize.vllm.environment import configuration_refusal
from ladderize.vllm.served import PLUGIN_ROW, served_models
from tests.helpers import SHAPE, refusal, save_llama

LAYERS = SHAPE["num_hidden_layers"]


def test_an_engine_that_is_not_known(monkeypatch, tmp_path):
    monkeypatch.setattr(vllm_environment, "installed_version", lambda: "0.31.0")
    assert "and this is vLLM 0.31.0" in refusal(
        "bench", "--engine", "vllm", "--random-weights", "1b", "--out", tmp_path / "o.json"
    )
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
