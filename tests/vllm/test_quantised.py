"""A converted int8 checkpoint: tokens are those of its layout, whose ranks quantise what they read, computed slowly."""

import pytest
import torch

from ladderize import convert_checkpoint
from ladderize.convert.recipe import Recipe
from ladderize.families.registry import family_of
from ladderize.modeling import ladderized_class
from tests.oracle import Oracle
from tests.quantised import dequantised, save_quantised
from tests.vllm.jobs import Generate
from tests.vllm.models import SHAPE, random_prompts

RECIPES = [
    (1, Recipe(ladder="all"), "qwen3"),
    (2, Recipe(ladder="1:", spd="all", sync_tp_size=2), "granite"),
]
# Without these, x86 has only products of pairs of bytes whose sum saturates at 16 bits: vLLM's int8 products (oneDNN's)
# are then off by a tenth and more, of the dense model, too.
EXACT = ("avx512_vnni", "avx_vnni")


def int8_tokens(x):
    """What vLLM's CPU kernel makes of each token that a projection reads."""
    scale = x.abs().amax(-1, keepdim=True) / 127
    return torch.round(x / scale) * scale


@pytest.mark.skipif(
    not any(torch.cpu.get_capabilities().get(name) for name in EXACT),
    reason="this processor has no VNNI: the sums in vLLM's int8 products saturate",
)
@pytest.mark.parametrize(("ranks", "recipe", "model_type"), RECIPES)
def test_int8(engines, tmp_path, ranks, recipe, model_type):
    shape = {key: value for key, value in SHAPE.items() if key not in ("vocab_size", "intermediate_size")}
    seed = int(torch.randint(1 << 30, ()))
    shape |= {"vocab_size": 384, "intermediate_size": 192, "model_type": model_type}
    source = save_quantised(tmp_path / "src", "int8", seed=seed, **shape)
    convert_checkpoint(source, tmp_path / "out", recipe, verify=False)
    config = ladderized_class(family_of({"model_type": model_type}), "Config").from_pretrained(tmp_path / "out")
    # what is summed is quantised by each virtual rank where sums are dropped, elsewhere by each process
    parts = config.sync_tp_size or ranks
    weights = dequantised(source, "int8")
    reference, exact = Oracle(weights, config, parts, int8_tokens), Oracle(weights, config, parts)
    # many, and no token begins them all: where one is rounded otherwise, all that comes after it moves
    prompts = [prompt[1:] for prompt in random_prompts(*(3, 8, 32, 34) * 4)]
    (result,) = engines(ranks).run(tmp_path / "out", Generate(prompts, tokens=6), enforce_eager=True)
    errors, others = [], []
    for prompt, completion in zip(prompts, result["completions"], strict=True):
        text = torch.tensor([prompt + completion["tokens"]])
        expected, unquantised = (
            oracle(text)[0].log_softmax(-1)[0, len(prompt) - 1 : -1] for oracle in (reference, exact)
        )
        for place, (token, values) in enumerate(zip(completion["tokens"], completion["logprobs"], strict=True)):
            assert expected[place, token] >= expected[place].max() - 1.5
            for other, value in values.items():
                errors.append(abs(value - float(expected[place, int(other)])))
                others.append(abs(value - float(unquantised[place, int(other)])))
    # a number between two steps may be rounded to the other one, which moves what comes after it a little
    assert max(errors) < 1.5
    assert sum(errors) < 0.5 * sum(others), (sum(errors) / len(errors), sum(others) / len(others))
