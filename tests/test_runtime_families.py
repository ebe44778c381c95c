"""The tensor-parallel runtime on every family, against transformers' classes: prompts longer than a sliding window,
padding, pieces of texts. Ranks are those of test_runtime.py."""

import pytest
import torch

from ladderize.runtime.decode import FixedPass, Generator
from ladderize.runtime.schedule import Schedule
from tests.groups import make_generator
from tests.helpers import FAMILIES, make_model, random_ids

TOKENS, SHORT = 26, 11  # windows are shorter than either
LIMITS = {"rtol": 1e-4, "atol": 1e-4}


@pytest.fixture(scope="module", params=["llama", *FAMILIES])
def opened(request, tmp_path_factory):
    """A model of transformers, a generator of the same weights, ids, and what the model makes of them."""
    folder = tmp_path_factory.mktemp("model")
    model = make_model("same layer", model_type=request.param)
    model.save_pretrained(folder)
    ids = random_ids(2, TOKENS)
    with torch.inference_mode():
        logits = model(ids).logits
        yield model, make_generator(folder, 2, 40), ids, logits


def test_padding_and_the_step_that_cuda_graphs_capture(opened):
    _, generator, ids, expected = opened
    first, second = 20, SHORT
    for fixed in (False, True):
        found = generator.prefill([ids[0, :first].tolist(), ids[1, :second].tolist()])
        step = FixedPass(generator, 40)
        for more in range(TOKENS - first):
            torch.testing.assert_close(found[0], expected[0, first + more - 1], **LIMITS)
            torch.testing.assert_close(found[1], expected[1, second + more - 1], **LIMITS)
            tokens = torch.stack((ids[0, first + more], ids[1, second + more]))
            step.set(tokens[:, None], first + more, generator.padding)
            found = step.run() if fixed else generator.decode_one_token(tokens)


@pytest.mark.parametrize(("rows", "chunks"), [(2, 2), (1, 3)])
def test_parts_of_a_schedule(opened, rows, chunks):
    _, generator, ids, expected = opened
    cache = generator.cache.batch_rows(0, rows)
    parts = Generator(generator.model, generator.rope, cache, schedule=Schedule("domino", chunks))
    found = generator.model.logits(parts.read(ids[:rows]))
    torch.testing.assert_close(found, expected[:rows], **LIMITS)
