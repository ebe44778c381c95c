"""The tensor-parallel runtime against the oracle and the Hugging Face model: every layout and family, ranks, backends,
dtypes, batches."""

import math
from typing import NamedTuple

import pytest
import torch

from ladderize.errors import UserError
from ladderize.runtime import launch
from ladderize.runtime import launch as distributed
from ladderize.runtime.collectives.links import SLICED_BYTES
from ladderize.runtime.decode import FixedPass, Generator
from ladderize.runtime.schedule import Schedule
from tests.groups import make_generator, run_all_models, run_models
from tests.helpers import FAMILIES, LAYOUTS, LLAMA_3_ROPE, SHAPE, make_layout, make_model, random_ids
from tests.oracle import Oracle, assert_likeliest


class Run(NamedTuple):
    name: str
    family: str
    dtype: str
    tp_size: int
    backend: str

    @property
    def case(self):
        return self[:3]


# a vocabulary of 97 is divided by no number of ranks here, so padding is always tested
GROUPS = [(1, "auto"), (2, "shm"), (2, "gloo")]
# All pairs of (layout, group), (layout, dtype) and (group, dtype), not the whole product: every layout runs in every
# group, in bfloat16 in one of them, a group further for each next layout, and in float32 in the other two.
RUNS = [
    Run(name, "llama", "bfloat16" if place == index % len(GROUPS) else "float32", *group)
    for index, name in enumerate(LAYOUTS)
    for place, group in enumerate(GROUPS)
]
# Of other families every pair of (family, layout), and every family and every layout on both groups that it runs on.
RUNS += [
    Run(name, family, "float32", *((2, "shm"), (4, "gloo"))[0 if name == "mixed" else (number + place) % 2])
    for number, family in enumerate(FAMILIES)
    for place, name in enumerate(("dense", "ladder all", "spd all 4", "mixed", "same layer"))
]


def each(condition):
    chosen = [run for run in RUNS if condition(run)]
    return pytest.mark.parametrize("run", chosen, ids=[" ".join(map(str, run)) for run in chosen])


@pytest.fixture(scope="module")
def cases(tmp_path_factory):
    """(layout, family, dtype) -> a model and what to run of it; fresh random weights and ids each time."""
    folder, found = tmp_path_factory.mktemp("models"), {}
    for number, (name, family, dtype) in enumerate(dict.fromkeys(run.case for run in RUNS)):
        model = make_model(name, model_type=family, max_position_embeddings=128).to(getattr(torch, dtype))
        model.save_pretrained(folder / str(number))
        prompts = [random_ids(12).tolist(), random_ids(3).tolist()]  # windows are shorter
        steps = 64 if family == "llama" else 16
        steps = 2 if dtype == "bfloat16" else steps  # rounding decides its later tokens
        found[name, family, dtype] = model, (folder / str(number), random_ids(2, 14), prompts, steps)
    return found


def exact_logits(model, ids):
    return Oracle({key: value.float() for key, value in model.state_dict().items()}, model.config)(ids)[0]


def assert_computed(model, item, result):
    """Logits are the oracle's, and tokens those of transformers, of prompts of different lengths in one batch."""
    _, ids, prompts, steps = item
    exact = exact_logits(model, ids)
    torch.testing.assert_close(torch.from_numpy(result["logits"]), exact, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(torch.from_numpy(result["last"]), exact[:, -1], rtol=1e-4, atol=1e-4)
    with torch.no_grad():
        for prompt, tokens in zip(prompts, result["tokens"], strict=True):
            assert len(tokens) == steps
            assert_likeliest(lambda text: model(torch.tensor([text])).logits[0], prompt, tokens)


def sums(model):
    """The number of all-reduces of a pass behind the embedding's."""
    return sum(mode != "dropped" for mode in (*model.config.attention_sync, *model.config.mlp_sync))


# also run with a replicated vocabulary, over shm
REPLICATED = [("mixed", "llama", "float32"), ("same layer with biases", "llama", "float32")]


@pytest.fixture(scope="module")
def results(cases):
    """What a group of ranks computed; each group is started once, for all that it runs."""
    done = {}

    def of(tp_size, backend, replicate_vocab=False):
        if (tp_size, backend) not in done:
            jobs = [({run.case for run in RUNS if run[3:] == (tp_size, backend)}, False)]
            if (tp_size, backend) == (2, "shm"):
                jobs.append((set(REPLICATED), True))
            jobs = [({name: cases[name][1] for name in cases if name in names}, more) for names, more in jobs]
            how = {"tp_size": tp_size, "device": "cpu", "threads": 1}
            done[tp_size, backend] = distributed.run(run_all_models, jobs, backend, **how)
        return done[tp_size, backend][int(replicate_vocab)]

    return of


@each(lambda run: run.dtype == "float32")
def test_float32_is_the_oracles_and_transformers(cases, results, run):
    result = results(run.tp_size, run.backend)[run.case]
    assert result["backend"].startswith("one rank" if run.tp_size == 1 else run.backend)
    assert_computed(*cases[run.case], result)


@each(lambda run: run.dtype == "bfloat16")
def test_bfloat16_stays_within_the_tolerance(cases, results, run):
    """Logits within 0.3 standard deviations of the exact ones (the bench's own rule) and close on average."""
    (model, item), result = cases[run.case], results(run.tp_size, run.backend)[run.case]
    whole = exact_logits(model, item[1])
    for found, exact in ((result["logits"], whole), (result["last"], whole[:, -1])):
        error = torch.from_numpy(found) - exact
        assert error.abs().max() < 0.3 * whole.std()
        assert error.std() < 0.05 * whole.std()


@each(lambda run: run.tp_size > 1)
def test_all_reduces_are_those_of_the_layout_and_waited_for_once(cases, results, run):
    result = results(run.tp_size, run.backend)[run.case]
    assert result["all_reduces"] == 1 + sums(cases[run.case][0])  # one for the embedding
    assert result["started"] == result["waited"]
    assert result["in_flight"] == 1


def test_replicated_vocabulary(cases, results):
    """The option that spares the embedding's all-reduce changes nothing else."""
    found = results(2, "shm", replicate_vocab=True)
    assert list(found) == REPLICATED
    for name, result in found.items():
        assert_computed(*cases[name], result)
        assert result["all_reduces"] == sums(cases[name][0])


YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16}
ROPES = [LLAMA_3_ROPE, {"rope_type": "linear", "factor": 2.0}, YARN]


@pytest.mark.parametrize("rope", ROPES, ids=lambda rope: rope["rope_type"])
def test_rope_scaling_and_tied_embeddings(tmp_path, rope):
    model = make_model("mixed", rope_parameters={"rope_theta": 10000.0, **rope}, tie_word_embeddings=True, head_dim=8)
    model.save_pretrained(tmp_path / "m")
    ids = random_ids(2, 40)
    with torch.no_grad():
        expected = model(ids).logits
    items = {"m": (tmp_path / "m", ids, [[3], [5, 7]], 2)}
    (result,) = distributed.run(run_models, items, "auto", tp_size=1, device="cpu", threads=1).values()
    torch.testing.assert_close(torch.from_numpy(result["logits"]), expected, rtol=1e-4, atol=1e-4)


def test_longrope_of_a_phi3_up_to_its_first_length(tmp_path):
    """Half of a head rotates, by the short factors and a scale of both; behind the first length all would change."""
    factors = {"short_factor": [1.0, 1.7], "long_factor": [2.0, 8.0], "partial_rotary_factor": 0.5}
    rope = {"rope_type": "longrope", "rope_theta": 10000.0, "original_max_position_embeddings": 48, **factors}
    sizes = {"num_attention_heads": 4, "head_dim": 8, "max_position_embeddings": 192}  # 4 times the first length
    model = make_model(
        "mixed",
        model_type="phi3",
        original_max_position_embeddings=48,
        rope_parameters=rope,
        sliding_window=None,
        **sizes,
    )
    model.save_pretrained(tmp_path)
    ids = random_ids(2, 40)
    with torch.no_grad():
        expected = model(ids).logits
    assert model.model.rotary_emb.attention_scaling > 1.1
    generator = make_generator(tmp_path, 2, 48)
    found = generator.model.logits(generator.read(ids))
    torch.testing.assert_close(found, expected, **LIMITS)
    with pytest.raises(UserError, match="changes with the length of the text behind 48 tokens"):
        make_generator(tmp_path, 2, 49)


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


RANKS, STEPS = 4, 24
# two virtual ranks of two processes each; (layout, family)
CASES = [
    ("delayed all 2", "llama"),
    ("spd all 2", "llama"),
    ("mixed", "llama"),
    ("same layer with biases", "llama"),
    ("same layer delayed with biases", "llama"),
    ("delayed all 2", "granite"),
    ("same layer delayed with biases", "qwen3"),
]
WIDE = (8, 40)  # rows and tokens whose sums are sent in slices; those of a few tokens are sent whole


@pytest.fixture(scope="module")
def computed(tmp_path_factory):
    folder, items, models = tmp_path_factory.mktemp("models"), {}, {}
    for name, family in CASES:
        model = make_model(name, model_type=family, max_position_embeddings=128)
        path = folder / f"{name} {family}".replace(" ", "_")
        model.save_pretrained(path)
        prompts = [random_ids(7).tolist(), random_ids(4).tolist()]
        models[name, family] = model
        items[name, family] = (path, random_ids(2, 9), prompts, STEPS)
        items[name, family, "wide"] = (path, random_ids(*WIDE), prompts * 4, 1)
    assert math.prod(WIDE) * SHAPE["hidden_size"] * 4 >= SLICED_BYTES
    found = launch.run(run_all_models, [(items, False)], "auto", tp_size=RANKS, device="cpu", threads=1)
    return models, items, found[0]


@pytest.mark.parametrize("case", CASES)
def test_logits_and_tokens_are_those_of_the_virtual_ranks(computed, case):
    models, items, found = computed
    for key in (case, (*case, "wide")):
        assert_computed(models[case], items[key], found[key])


def test_messages_that_cross_the_slow_link(computed):
    """Of dropped sums nothing does; sums of all ranks are counted apart from those across groups."""
    modes = {name: make_layout(name) for name, _ in CASES}
    for (name, family), result in ((key, found) for key, found in computed[2].items() if len(key) == 2):
        sent = [*modes[name].attention_sync, *modes[name].mlp_sync]
        assert result["all_reduces"] == 1 + sum(mode in ("blocking", "overlapped") for mode in sent), (name, family)
