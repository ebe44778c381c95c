"""bench --engine vllm, as far as it goes without vLLM: what is served."""

import json

from ladderize.layout import Layout
from ladderize.runtime.bench.options import BenchOptions
from ladderize.runtime.spec import checkpoint_spec, shape_spec
from ladderize.vllm.served import PLUGIN_ROW, served_models
from tests.helpers import SHAPE, save_llama

LAYERS = SHAPE["num_hidden_layers"]


def test_each_layout_is_a_folder_that_vllm_opens(tmp_path):
    every = range(LAYERS)
    layouts = {
        "dense": Layout.dense(LAYERS),
        "ladder": Layout.from_layers(LAYERS, ladder=every),
        "spd": Layout.from_layers(LAYERS, spd=every, sync_tp_size=2),
    }
    config = {**SHAPE, "model_type": "llama"}
    specs = [shape_spec(config, layout, name=name, tp_size=2, dtype="float32") for name, layout in layouts.items()]
    served = served_models(specs, BenchOptions(tp_size=2, baselines=("plugin",)), tmp_path)
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
