"""Loading: every rank reads its own slices, memory holds those and no more, the files are read as they are."""

import json
import subprocess
import sys

import pytest
import torch

from ladderize.checkpoint.config import parameter_count
from ladderize.checkpoint.opening import read_checkpoint
from ladderize.choices import SHAPE_NAMES
from ladderize.layout import Layout
from ladderize.runtime.loader import CheckpointSource
from ladderize.runtime.shards import Slice, known_shapes
from ladderize.runtime.spec import WeightCache, shape_spec
from tests.helpers import ROOT, SHAPE, all_tensors, save_llama
from tests.warm import PATIENCE

CPU = torch.device("cpu")


@pytest.mark.parametrize("shards", [1, 3])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_slices_are_those_of_the_tensor(tmp_path, shards, dtype):
    save_llama(tmp_path / "m", shards=shards, dtype=dtype, seed=int(torch.randint(1 << 30, ())))
    whole = all_tensors(tmp_path / "m")
    reader = CheckpointSource(read_checkpoint(tmp_path / "m"), torch.float32, CPU)
    for name, tensor in whole.items():
        assert torch.equal(reader.read(Slice(name)), tensor.float())
        for dim in range(tensor.ndim):
            start, stop = sorted(torch.randint(0, tensor.shape[dim] + 1, (2,)).tolist())
            part = reader.read(Slice(name, dim, start, stop))
            assert torch.equal(part, tensor.narrow(dim, start, stop - start).float())
    padded = reader.read(Slice("model.embed_tokens.weight", 0, 90, 97, rows=10))
    assert torch.equal(padded[:7], whole["model.embed_tokens.weight"][90:].float())
    assert not padded[7:].any()


SCRIPT = """
import sys, torch, json
from pathlib import Path
from ladderize.memory import resident
from ladderize.runtime.spec import WeightCache, checkpoint_spec
folder, tp_size, rank = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
torch.set_num_threads(1)
torch.randn(8, 8) @ torch.randn(8, 8)
spec = checkpoint_spec(folder, tp_size=tp_size)
mapped = resident("RssFile")
Path("/proc/self/clear_refs").write_text("5")  # the high-water mark begins anew
before = resident("VmRSS")
_, weights = WeightCache(torch.device("cpu"), pack=len(sys.argv) > 4).get(spec, tp_size, rank)
rise, mapped = resident("VmHWM") - before, resident("RssFile") - mapped
from tests.helpers import held_bytes
print(json.dumps([rise, held_bytes(weights), mapped]))
"""


@pytest.mark.parametrize(("rank", "pack"), [(0, False), (3, True)])
def test_a_rank_never_holds_the_whole_model(tmp_path, rank, pack):
    """Peak memory of one of 4 ranks: its weights, and on the way at most two of its fused tensors and a mapped one."""
    save_llama(
        tmp_path / "m", dtype=torch.bfloat16, hidden_size=512, intermediate_size=2048, num_hidden_layers=12,
        vocab_size=4096, num_attention_heads=8,
    )  # fmt: skip
    size = (tmp_path / "m" / "model.safetensors").stat().st_size
    arguments = [sys.executable, "-c", SCRIPT, tmp_path / "m", "4", str(rank), *(["pack"] if pack else [])]
    # not forked: what a child shares with its parent would be counted when it is first touched
    outcome = subprocess.run(arguments, capture_output=True, text=True, cwd=ROOT, timeout=PATIENCE)
    assert outcome.returncode == 0, outcome.stderr
    rise, held, mapped = json.loads(outcome.stdout)
    assert held < 0.3 * size
    assert rise < 0.55 * size
    assert mapped < 0.12 * size  # pages of libraries: a file is mapped only while a tensor is read from it


def test_random_weights_and_bundled_shapes():
    shapes = known_shapes()
    assert ", ".join(shapes) == SHAPE_NAMES.removesuffix(" or a config.json")
    # as the model cards count them
    billions = {"1b": 1.24, "3b": 3.21, "8b": 8.03, "70b": 70.6, "405b": 405.9}
    billions |= {"qwen3-32b": 32.8, "qwen2.5-72b": 72.7, "mistral-small": 23.6, "granite-8b": 8.17}
    for name, config in shapes.items():
        assert parameter_count(config) / 1e9 == pytest.approx(billions[name], rel=0.01)
        assert shape_spec(config, Layout.dense(config["num_hidden_layers"]), name=name, tp_size=8).dtype == "bfloat16"
    config = {**SHAPE, "model_type": "llama"}
    cache = WeightCache(CPU, pack=False)
    layouts = (Layout.dense(4), Layout.from_layers(4, ladder=[1]))
    specs = [shape_spec(config, layout, name=str(layout), tp_size=2, dtype="float32") for layout in layouts]
    (shape, first), (_, second) = (cache.get(spec, 2, 1) for spec in specs)
    assert first is second
    assert shape.own_heads == 4
    assert 0.5 < float(first.sublayers[1].row_parallel[0].weight.std()) * 48**0.5 < 1.5
