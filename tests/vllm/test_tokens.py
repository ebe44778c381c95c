"""Tokens and log-probabilities of every kind of layout against transformers, on one and two ranks, eager and
compiled."""

import json
import os
import subprocess
import sys

import pytest
import torch

from ladderize.layout import Layout
from tests.helpers import ROOT, edit_json
from tests.vllm.jobs import Carrier, Generate, Streams
from tests.vllm.models import SHAPE, check, make, random_prompts
from tests.warm import PATIENCE

LENGTHS = (1, 2, 7, 31, 32, 33, 90)
# each on the ranks where it shows most: one or two virtual ranks in a process, or four
EAGER = [(1, "dense"), (1, "spd 4"), (2, "spd 4"), (1, "drawn"), (2, "drawn"), (1, "spd and ladder"), (1, "mixed"),
         (2, "ladder upper half"), (2, "spd 2"), (2, "spd below ladder"), (2, "fewer KV heads than ranks"),
         (2, "delayed 2"), (1, "delayed and spd"), (2, "delayed and spd")]  # fmt: skip


@pytest.mark.parametrize(("ranks", "name"), EAGER)
def test_eager(engines, tmp_path, name, ranks):
    """Also what drafters are given that read hidden states: the stream entering each layer, with what is still on its
    way there."""
    model = make(name, tmp_path)
    prompts = random_prompts(*LENGTHS)
    (unseen,) = random_prompts(33)  # nothing of it lies in the prefix cache
    layers = list(range(SHAPE["num_hidden_layers"]))
    alone, together, streams = engines(ranks).run(
        *(tmp_path, Generate(prompts[3:4]), Generate(prompts), Streams(unseen, layers)), enforce_eager=True
    )
    check(model, prompts[3:4], alone)
    check(model, prompts, together)
    with torch.no_grad():
        expected = model(torch.tensor([unseen]), output_hidden_states=True).hidden_states
    for layer in layers:
        torch.testing.assert_close(torch.tensor(streams[layer]), expected[layer][0], rtol=1e-4, atol=2e-4)


@pytest.mark.parametrize(("ranks", "name"), [(1, "spd and ladder"), (2, "drawn"), (2, "spd 4"), (2, "delayed and spd")])
def test_compiled(engines, tmp_path, name, ranks):
    model = make(name, tmp_path)
    prompts = random_prompts(*LENGTHS)
    alone, together = engines(ranks).run(tmp_path, Generate(prompts[3:4]), Generate(prompts))
    check(model, prompts[3:4], alone)
    check(model, prompts, together)


def test_bfloat16(engines, tmp_path):
    """Rounding moves single log-probabilities by 0.4 and, of a rare model, more."""
    model = make("spd 2", tmp_path)
    prompts = random_prompts(*LENGTHS)
    (result,) = engines(1).run(tmp_path, Generate(prompts), dtype="bfloat16", enforce_eager=True)
    check(model.bfloat16().float(), prompts, result, tolerance=1.0)


def test_norms_that_are_stored_in_32_bits(tmp_path):
    """Kernels that want weights of the dtype of their input never see them: they are cast when they are loaded, as
    transformers casts them. By what asks the same of a GPU's kernels."""
    out = tmp_path / "norms.json"
    command = [sys.executable, ROOT / "benchmarks" / "gpu_vllm_norms.py", "--device", "cpu", "--eager"]
    done = subprocess.run(
        [*command, "--hidden-size", "256", "--out", out],
        cwd=ROOT,
        env=os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=PATIENCE,
    )
    assert done.returncode == 0, done.stderr
    document = json.loads(out.read_text())
    assert document["largest_difference_of_cast_before"] == 0
    assert document["environment"]["torch"] == torch.__version__


def test_messages_over_gloo(engines, tmp_path):
    """What carries the messages does not matter; shared memory, as above, is the choice where all ranks share a
    host."""
    model = make("drawn", tmp_path)
    prompts = random_prompts(2, 33, 80)
    result, carrier = engines(2).run(
        tmp_path, Generate(prompts), Carrier(), environment={"LADDERIZE_VLLM_BACKEND": "gloo"}
    )
    check(model, prompts, result)
    assert carrier == "gloo"


def test_the_dense_layout_is_vllms_own_model(engines, tmp_path):
    """Of a family with norms of heads; vLLM's own Qwen3 heeds no windows."""
    model = make("ladder upper half", tmp_path, use_sliding_window=False, layer_types=None, attention_bias=False)
    edit_json(tmp_path / "config.json", **Layout.dense(SHAPE["num_hidden_layers"]).to_config())
    prompts = random_prompts(*LENGTHS)
    stock = {"hf_overrides": {"architectures": ["Qwen3ForCausalLM"]}}
    (ours,), (theirs,) = (
        engines(1).run(tmp_path, Generate(prompts), enforce_eager=True, **more) for more in ({}, stock)
    )
    dense = type(model).from_pretrained(tmp_path, dtype=torch.float32).eval()
    check(dense, prompts, ours)
    check(dense, prompts, theirs)
    with torch.no_grad():
        dense.model.layers[3].self_attn.o_proj.weight.mul_(1.01)
    with pytest.raises(AssertionError, match=r"^(log-probabilities|token \d+ of)"):  # another model is noticed
        check(dense, prompts, ours)
