"""Tokens and log-probabilities of every kind of layout against transformers, on one and two ranks, eager and
compiled."""

import pytest
import torch

from tests.helpers import edit_tensors
from tests.vllm.jobs import Carrier, Generate, Streams
from tests.vllm.models import SHAPE, check, make, random_prompts

LENGTHS = (1, 2, 7, 31, 32, 33, 90)
# each on the ranks where it shows most: one or two virtual ranks in a process, or four; test_features.py has the others
EAGER = [(1, "dense with norms of heads"), (2, "dense"), (2, "ladder upper half"), (1, "spd 4"), (1, "drawn"),
         (2, "fewer KV heads than ranks"), (2, "delayed 2"), (1, "delayed and spd"),
         (1, "fused, delayed and spd"), (2, "fused, delayed and spd"), (2, "dense with norms behind sums"),
         (1, "ladder with two rotations"), (1, "ladder with norms behind sums"),
         (2, "ladder with norms behind sums"), (1, "neighbours rotate, delayed and spd"),
         (2, "neighbours rotate, ladder")]  # fmt: skip
# what carries the messages does not matter; shared memory is the choice where all ranks share a host
GLOO = {"LADDERIZE_VLLM_BACKEND": "gloo"}


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


@pytest.mark.parametrize(
    ("ranks", "name", "environment"),
    [
        (1, "spd and ladder", {}),
        (2, "drawn", GLOO),
        (2, "delayed and spd", {}),
        (2, "ladder with two rotations", {}),
    ],
)
def test_compiled(engines, tmp_path, name, ranks, environment):
    model = make(name, tmp_path)
    prompts = random_prompts(*LENGTHS)
    alone, together, carrier = engines(ranks).run(
        tmp_path, Generate(prompts[3:4]), Generate(prompts), Carrier(), environment=environment
    )
    check(model, prompts[3:4], alone)
    check(model, prompts, together)
    assert carrier == "gloo" or environment != GLOO


def test_rounded_factor_of_the_embedding(engines, tmp_path):
    """In bfloat16 what enters the first layer is transformers', to the last bit."""
    model = make("ladder with two rotations", tmp_path).bfloat16()
    (prompt,) = random_prompts(90)
    (streams,) = engines(1).run(tmp_path, Streams(prompt, [0]), dtype="bfloat16", enforce_eager=True)
    assert streams[0] == model.get_input_embeddings()(torch.tensor(prompt)).tolist()


def test_bfloat16(engines, tmp_path):
    """Rounding moves single log-probabilities by 0.4 and, of a rare model, more. Norms that are stored in float32 are
    cast when they are loaded, as transformers casts them: kernels that want weights of the dtype of their input never
    see them. ``benchmarks/gpu_vllm_norms.py`` asks the same of a GPU's kernels."""
    model = make("spd 2", tmp_path)
    prompts = random_prompts(*LENGTHS)

    def answer(kept):
        """Of the model with all weights in bfloat16 but those whose names hold ``kept``."""
        edit_tensors(tmp_path, lambda own: own.update({name: own[name].bfloat16() for name in own if kept not in name}))
        (result,) = engines(1).run(tmp_path, Generate(prompts), dtype="bfloat16", enforce_eager=True)
        return result

    result = answer("norm")
    check(model.bfloat16().float(), prompts, result, tolerance=1.0)
    assert answer("nothing") == result
