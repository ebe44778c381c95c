"""Block-to-block distillation: what the loss is, that it helps, and what stops it."""

import json
from unittest.mock import patch

import pytest
import torch

from ladderize.adapt.layers.distill import BlockTrainer, teacher_pass
from ladderize.adapt.layers.layer_files import LayerFiles, LayerJob
from ladderize.adapt.layers.options import BlockwiseOptions
from ladderize.adapt.layers.windows import Windows
from ladderize.convert.remote_code.modeling_ladderized import LadderizedLlamaForCausalLM
from ladderize.layout import Layout
from tests.groups import ALONE
from tests.helpers import (
    LAYOUTS,
    SHAPE,
    blocks_of,
    changed_tensors,
    epochs,
    invoke,
    invoke_json,
    listing,
    make_layout,
    one_sentence,
    record_bars,
    save_llama,
)

LAYERS = SHAPE["num_hidden_layers"]


def streams(blocks, layout, ids):
    """The complete streams of a whole transformers model, before every layer and after the last, not normed."""
    model = LadderizedLlamaForCausalLM(blocks.model_config(layout)).eval()
    model.load_state_dict({name: blocks.read(name) for name in blocks.checkpoint.tensors})
    model.model.norm = torch.nn.Identity()
    with torch.no_grad():
        return model(input_ids=ids, output_hidden_states=True).hidden_states


@pytest.mark.parametrize("name", [name for name in LAYOUTS if name != "dense"])
def test_the_loss_is_that_of_whole_models(tmp_path, name):
    """Block i alone converted, in a whole model: what leaves it differs from the dense stream by what the trainer calls
    its loss."""
    blocks = blocks_of(save_llama(tmp_path / "m", seed=int(torch.randint(1 << 30, ())), **LAYOUTS[name][3]))
    ids = torch.randint(3, SHAPE["vocab_size"], (5, 12))
    layout = make_layout(name)
    layers = layout.converted_layers
    dense = streams(blocks, Layout.dense(LAYERS), ids)
    windows = Windows(ids[:3], ids[3:])
    weights, files = blocks.weights, LayerFiles(tmp_path)
    job = LayerJob(blocks, blocks, layout, tuple(layers), weights, weights, windows, ALONE, files)
    passed = []
    for index, before, after in teacher_pass(blocks, ids, layers, layout, blocks.device):
        passed.append(index)
        if index not in layers:
            continue
        kinds = layout.layer_name(index).split("+")
        ranks = None if kinds == ["ladder"] else layout.sync_tp_size
        alone = Layout.from_layers(LAYERS, **{kind: [index] for kind in kinds}, sync_tp_size=ranks)
        expected = (streams(blocks, alone, ids)[index + 1] - dense[index + 1]).square().mean()
        trainer = BlockTrainer(job, index, before, after, BlockwiseOptions("a.npy", lr=1.0))
        with torch.no_grad():
            assert float(trainer.loss(torch.arange(5))) == pytest.approx(float(expected), rel=1e-4)
            added = (dense[index + 1] - dense[index])[3:].square().mean()
            assert trainer._heldout_mean(trainer.added) == pytest.approx(float(added), rel=1e-4)
        assert expected > 1e-4
    assert passed == list(range(max(layers) + 1))


@pytest.fixture(autouse=True)
def small_steps(monkeypatch):
    monkeypatch.setattr("ladderize.adapt.layers.distill.TOKENS_PER_STEP", 64)


def adapt(pair, out, *options, most=3):
    dense, model = pair
    sizes = ["--lr", 1e-3, "--samples", 64, "--heldout", 8]
    what = ["--method", "blocks", "--distill-from", dense, "--data", dense.parent / "ids.npy", "--no-verify"]
    write = ["--write", "last"]  # random models need not get better on other data
    with epochs(most):
        return invoke("adapt", model, out, *what, *sizes, *write, *options)


def test_every_block_gets_better(pair, tmp_path, monkeypatch):
    bars = record_bars(monkeypatch)
    document = json.loads(adapt(pair, tmp_path / "out", "--json").stdout)
    assert all(sum(bar.steps) == bar.total for bar in bars)
    assert [block["layer"] for block in document["layers"]] == [1, 2, 3]
    for block in document["layers"]:
        assert block["loss_after"] < 0.9 * block["loss_before"]
        assert block["loss_after"] == pytest.approx(min(value for _, value in block["curve"]), rel=1e-5)
    # of noise; test_spd.py has a trained model's
    assert list(document["heldout_perplexity"]) == ["dense", "before", "after"]
    # the output: the same layout, block 0 and the ends untouched, the others the ones that were measured
    assert {name.split(".")[2] for name in changed_tensors(pair[1], tmp_path / "out")} == {"1", "2", "3"}
    (scored,) = invoke_json("eval", tmp_path / "out", "--perplexity", pair[0].parent / "ids.npy")["models"]
    assert scored["ladderize"]["layout"] == document["layout"] == "4 layers: spd 1:4 (sync_tp_size 4)"
    assert "distillation.json" in listing(tmp_path / "out")
    assert "out.ladderize-work" not in listing(tmp_path)


def test_training_that_does_not_help_changes_nothing(pair, tmp_path):
    blocks = json.loads(adapt(pair, tmp_path / "out", "--lr", 30, "--json", most=9).stdout)["layers"]  # absurd, finite
    for block in blocks:
        assert block["loss_after"] <= block["loss_before"]
        assert block["best_step"] or block["loss_after"] == block["loss_before"]
        assert block["stopped_early"] == (block["steps"] < 9 * 16)
    kept = [block["layer"] for block in blocks if not block["best_step"]]
    assert kept
    assert not {int(name.split(".")[2]) for name in changed_tensors(pair[1], tmp_path / "out")} & set(kept)


def test_a_loss_of_nan_is_said_and_nothing_is_written(pair, tmp_path):
    def wrong(self, rows, loss=BlockTrainer.loss):
        return loss(self, rows) * (torch.nan if self.index == 2 and torch.is_grad_enabled() else 1)

    with patch.object(BlockTrainer, "loss", wrong):
        outcome = adapt(pair, tmp_path / "out")
    assert "block 2: the loss is NaN or infinite after 0 steps" in one_sentence(outcome)
    assert listing(tmp_path / "out.ladderize-work") == ["layer-00001.safetensors", "run.json"]
    assert "out" not in listing(tmp_path)
    assert adapt(pair, tmp_path / "out").code == 0
