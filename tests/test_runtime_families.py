"""The tensor-parallel runtime on families that are no Llamas, against transformers' own classes: prompts longer than a
sliding window, padding, pieces of texts, shared prefixes, ranks."""

import pytest
import torch

from ladderize.ranks.group import Ranks
from ladderize.runtime.collectives.base import Collectives
from ladderize.runtime.decode import FixedStep, Generator
from ladderize.runtime.requests.continuous import ContinuousBatch, Prompt
from ladderize.runtime.requests.reading import TextReader
from ladderize.runtime.schedule import Schedule
from tests.families import make_family_model
from tests.groups import make_generator
from tests.helpers import FAMILIES, fresh_rng, random_ids
from tests.oracle import assert_likeliest

ALONE = Ranks(0, 1, torch.device("cpu"))
TOKENS, SHORT = 26, 11  # windows are shorter than either
LIMITS = {"rtol": 1e-4, "atol": 1e-4}


@pytest.fixture(scope="module", params=FAMILIES)
def opened(request, tmp_path_factory):
    """A model of transformers, a generator of the same weights, ids, and what the model makes of them."""
    folder = tmp_path_factory.mktemp("model")
    model = make_family_model(request.param)
    model.save_pretrained(folder)
    ids = random_ids(2, TOKENS)
    with torch.inference_mode():
        logits = model(ids).logits
        yield model, make_generator(folder, ALONE, Collectives(), 2, 40), ids, logits


def test_reading_and_decoding(opened):
    _, generator, ids, expected = opened
    torch.testing.assert_close(generator.model.logits(generator.read(ids)), expected, **LIMITS)
    generator.read(ids[:, :4])
    for place in range(4, TOKENS):
        torch.testing.assert_close(generator.decode_one_token(ids[:, place]), expected[:, place], **LIMITS)


def test_padding_and_the_step_that_cuda_graphs_capture(opened):
    _, generator, ids, expected = opened
    first, second = 20, SHORT
    for fixed in (False, True):
        found = generator.prefill([ids[0, :first].tolist(), ids[1, :second].tolist()])
        step = FixedStep(generator, 40)
        for more in range(TOKENS - first):
            torch.testing.assert_close(found[0], expected[0, first + more - 1], **LIMITS)
            torch.testing.assert_close(found[1], expected[1, second + more - 1], **LIMITS)
            tokens = torch.stack((ids[0, first + more], ids[1, second + more]))
            step.set(tokens, first + more, generator.padding)
            found = step.run() if fixed else generator.decode_one_token(tokens)


@pytest.mark.parametrize(("rows", "chunks"), [(2, 2), (1, 3)])
def test_parts_of_a_schedule(opened, rows, chunks):
    _, generator, ids, expected = opened
    parts = Generator(
        generator.model, generator.rope, generator.cache.batch_rows(0, rows), schedule=Schedule("domino", chunks)
    )
    found = generator.model.logits(parts.read(ids[:rows]))
    torch.testing.assert_close(found, expected[:rows], **LIMITS)


@pytest.mark.parametrize("budget", [200, 40, 7], ids=["one tree", "two rows", "pieces"])
def test_texts_with_a_common_beginning(opened, budget):
    model, generator, ids, _ = opened
    rows = ids.numpy()
    texts = [rows[0], rows[1]]
    texts += [fresh_rng().integers(3, 97, TOKENS - 3) for _ in range(2)]
    texts[2][:12], texts[3][:15] = rows[0, :12], rows[0, :15]
    reader, seen = TextReader(generator.model, generator.rope, budget, torch.float32), []
    for hidden, places in reader.read(texts):
        for number, path in places.items():
            expected = model(torch.from_numpy(texts[number])[None]).logits[0]
            torch.testing.assert_close(generator.model.logits(hidden[torch.from_numpy(path)]), expected, **LIMITS)
            seen.append(number)
    assert sorted(seen) == [0, 1, 2, 3]


def test_continuous_batching(opened):
    """Rows of different lengths, prompts read in pieces, texts that enter when others end."""
    model, generator, _, _ = opened
    prompts = [Prompt(number, random_ids(n).tolist(), 14 - n // 3) for number, n in enumerate((20, 3, 11, 7, 1))]
    reader = TextReader(generator.model, generator.rope, 8, torch.float32)
    batch = ContinuousBatch(reader, rows=3, longest_prompt=20, longest_text=34, eos=(), tokenizer=None)
    for prompt, tokens in zip(prompts, batch.run(prompts), strict=True):
        assert len(tokens) == prompt.max_new_tokens
        assert_likeliest(lambda ids: model(torch.tensor([ids])).logits[0], prompt.ids, tokens)
