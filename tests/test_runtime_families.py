"""The tensor-parallel runtime on families that are no Llamas, against transformers' classes and the oracle: prompts
longer than a sliding window, padding, pieces of texts, common beginnings, ranks."""

import pytest
import torch

from ladderize.runtime import launch
from ladderize.runtime.decode import FixedStep, Generator
from ladderize.runtime.schedule import Schedule
from tests.groups import make_generator, run_models
from tests.helpers import FAMILIES, make_model, random_ids
from tests.oracle import Oracle, assert_likeliest

TOKENS, SHORT = 26, 11  # windows are shorter than either
LIMITS = {"rtol": 1e-4, "atol": 1e-4}


@pytest.fixture(scope="module", params=FAMILIES)
def opened(request, tmp_path_factory):
    """A model of transformers, a generator of the same weights, ids, and what the model makes of them."""
    folder = tmp_path_factory.mktemp("model")
    model = make_model("same layer", model_type=request.param)
    model.save_pretrained(folder)
    ids = random_ids(2, TOKENS)
    with torch.inference_mode():
        logits = model(ids).logits
        yield model, make_generator(folder, 2, 40), ids, logits


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


# ---- ranks ----

LAYOUTS = ("dense", "ladder all", "spd all 4", "mixed", "same layer")
GROUPS = [(2, "shm"), (4, "gloo")]
# Every pair of (family, layout), and both groups with every family and every layout that runs on them, not the whole
# product: a family is in the next group for each next layout.
RUNS = [
    (family, layout, *GROUPS[0 if layout == "mixed" else (number + place) % 2])  # mixed is of two virtual ranks
    for number, family in enumerate(FAMILIES)
    for place, layout in enumerate(LAYOUTS)
]
STEPS = 16


@pytest.fixture(scope="module")
def cases(tmp_path_factory):
    """(family, layout) -> a model, and what to run of it."""
    folder, found = tmp_path_factory.mktemp("models"), {}
    for number, (family, layout) in enumerate((family, layout) for family in FAMILIES for layout in LAYOUTS):
        model = make_model(layout, model_type=family)
        model.save_pretrained(folder / str(number))
        prompts = [random_ids(12).tolist(), random_ids(3).tolist()]
        found[family, layout] = model, (folder / str(number), random_ids(2, 14), prompts, STEPS)
    return found


@pytest.fixture(scope="module")
def results(cases):
    """What a group of ranks computed; each group is started once, for all that it runs."""
    done = {}

    def of(tp_size, backend):
        if (tp_size, backend) not in done:
            items = {run[:2]: cases[run[:2]][1] for run in RUNS if run[2:] == (tp_size, backend)}
            done[tp_size, backend] = launch.run(run_models, items, backend, tp_size=tp_size, device="cpu", threads=1)
        return done[tp_size, backend]

    return of


@pytest.mark.parametrize(("family", "layout", "tp_size", "backend"), RUNS)
def test_ranks_compute_what_the_oracle_and_transformers_do(cases, results, family, layout, tp_size, backend):
    model, (_, ids, prompts, _) = cases[family, layout]
    result = results(tp_size, backend)[family, layout]
    assert result["backend"].startswith(backend)
    assert result["started"] == result["waited"]
    with torch.no_grad():
        exact, _ = Oracle(model.state_dict(), model.config)(ids)
        torch.testing.assert_close(torch.from_numpy(result["logits"]), exact, **LIMITS)
        torch.testing.assert_close(torch.from_numpy(result["last"]), exact[:, -1], **LIMITS)
        for prompt, tokens in zip(prompts, result["tokens"], strict=True):
            assert len(tokens) == STEPS
            assert_likeliest(lambda text: model(torch.tensor([text])).logits[0], prompt, tokens)
