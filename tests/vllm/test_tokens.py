"""Tokens and log-probabilities of every kind of layout against transformers, on one and two ranks, eager and
compiled."""

import pytest
import torch

from ladderize.layout import Layout
from tests.helpers import edit_json
from tests.vllm.jobs import Carrier, Generate, Streams
from tests.vllm.models import CASES, SHAPE, check, make, random_prompts

LENGTHS = (1, 2, 7, 31, 32, 33, 90)
OTHER_FAMILIES = [name for name, case in CASES.items() if case.family != "llama"]  # one of each


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("name", CASES)
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


@pytest.mark.parametrize(
    ("ranks", "name"), [*((1, name) for name in ("drawn", *OTHER_FAMILIES)), *((2, name) for name in CASES)]
)
def test_compiled(engines, tmp_path, name, ranks):
    model = make(name, tmp_path)
    prompts = random_prompts(*LENGTHS)
    alone, together = engines(ranks).run(tmp_path, Generate(prompts[3:4]), Generate(prompts))
    check(model, prompts[3:4], alone)
    check(model, prompts, together)


@pytest.mark.parametrize("name", OTHER_FAMILIES)
def test_bfloat16(engines, tmp_path, name):
    """Rounding moves log-probabilities by less than 0.05 on average, single ones by 0.4 and, of a rare model, more. The
    dense layout's are 0.4 away on average at least."""
    model = make(name, tmp_path)
    prompts = random_prompts(*LENGTHS)
    (result,) = engines(1).run(tmp_path, Generate(prompts), dtype="bfloat16", enforce_eager=True)
    check(model.bfloat16().float(), prompts, result, tolerance=1.0, average=0.1)


@pytest.mark.parametrize(
    ("backend", "name", "eager"), [("gloo", "drawn", False), ("gloo", "mixed", True), ("vllm", "ladder all", True)]
)
def test_other_messages(engines, tmp_path, name, backend, eager):
    """What carries the messages does not matter; shared memory, as above, is the choice where all ranks share a
    host."""
    model = make(name, tmp_path)
    prompts = random_prompts(2, 33, 80)
    environment = {"LADDERIZE_VLLM_BACKEND": backend}
    result, carrier = engines(2).run(
        tmp_path, Generate(prompts), Carrier(), environment=environment, enforce_eager=eager
    )
    check(model, prompts, result)
    assert carrier == backend


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
