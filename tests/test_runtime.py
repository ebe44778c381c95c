"""The tensor-parallel Llama against the oracle and the Hugging Face model: every layout, ranks, backends, dtypes,
batches."""

import pytest
import torch

from ladderize.errors import UserError
from ladderize.runtime import launch as distributed
from ladderize.runtime.decode import FixedStep
from tests.groups import make_generator, run_all_models, run_models
from tests.helpers import LAYOUTS, make_model, random_ids
from tests.oracle import Oracle, assert_likeliest

STEPS = 64
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
# a vocabulary of 97 is divided by no number of ranks here, so padding is always tested
GROUPS = [(1, "auto"), (2, "shm"), (2, "gloo")]
# All pairs of (layout, group), (layout, dtype) and (group, dtype), not the whole product: every layout runs in every
# group, in bfloat16 in one of them, a group further for each next layout, and in float32 in the other two.
RUNS = [
    (name, tp_size, backend, "bfloat16" if place == index % len(GROUPS) else "float32")
    for index, name in enumerate(LAYOUTS)
    for place, (tp_size, backend) in enumerate(GROUPS)
]


def runs(dtype):
    return [(name, tp_size, backend) for name, tp_size, backend, run_dtype in RUNS if run_dtype == dtype]


@pytest.fixture(scope="module")
def cases(tmp_path_factory):
    """name -> what to run, and what must come out of it; fresh random weights and ids each time."""
    folder = tmp_path_factory.mktemp("models")
    found = {}
    for dtype_name, dtype in DTYPES.items():
        for name in LAYOUTS:
            model = make_model(name, max_position_embeddings=128).to(dtype)
            path = folder / f"{name} {dtype_name}".replace(" ", "_")
            model.save_pretrained(path)
            ids = random_ids(2, 9)
            prompts = [random_ids(7).tolist(), random_ids(4).tolist()]
            exact, _ = Oracle({key: value.float() for key, value in model.state_dict().items()}, model.config)(ids)
            steps = STEPS if dtype == torch.float32 else 2  # rounding decides bfloat16's later tokens
            found[f"{name} {dtype_name}"] = {"item": (path, ids, prompts, steps), "exact": exact, "model": model}
    return found


REPLICATED = ["mixed float32", "same layer with biases float32"]  # also run with a replicated vocabulary, over shm


@pytest.fixture(scope="module")
def results(cases):
    """What a group of ranks computed; each group is started once, for all that it runs."""
    done = {}

    def of(tp_size, backend, replicate_vocab=False):
        if (tp_size, backend) not in done:
            jobs = [({f"{name} {dtype}" for name, *group, dtype in RUNS if group == [tp_size, backend]}, False)]
            if backend == "shm":
                jobs.append((set(REPLICATED), True))
            done[tp_size, backend] = distributed.run(
                run_all_models,
                [({name: case["item"] for name, case in cases.items() if name in names}, more) for names, more in jobs],
                backend,
                tp_size=tp_size,
                device="cpu",
                threads=1,
            )
        return done[tp_size, backend][int(replicate_vocab)]

    return of


@pytest.mark.parametrize(("name", "tp_size", "backend"), runs("float32"))
def test_float32_logits_equal_the_oracle(cases, results, name, tp_size, backend):
    case, result = cases[f"{name} float32"], results(tp_size, backend)[f"{name} float32"]
    assert result["backend"].startswith("one rank" if tp_size == 1 else backend)
    torch.testing.assert_close(torch.from_numpy(result["logits"]), case["exact"], rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(torch.from_numpy(result["last"]), case["exact"][:, -1], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(("name", "tp_size", "backend"), runs("float32"))
def test_float32_tokens_are_those_of_transformers(cases, results, name, tp_size, backend):
    """64 greedy steps of two prompts of different lengths in one batch, token by token."""
    model, prompts = cases[f"{name} float32"]["model"], cases[f"{name} float32"]["item"][2]
    with torch.no_grad():
        for prompt, tokens in zip(prompts, results(tp_size, backend)[f"{name} float32"]["tokens"], strict=True):
            assert len(tokens) == STEPS
            assert_likeliest(lambda ids: model(torch.tensor([ids])).logits[0], prompt, tokens)


@pytest.mark.parametrize(("name", "tp_size", "backend"), runs("bfloat16"))
def test_bfloat16_stays_within_the_tolerance(cases, results, name, tp_size, backend):
    """Logits within 0.3 standard deviations of the exact ones (the bench's own rule) and close on average."""
    case, result = cases[f"{name} bfloat16"], results(tp_size, backend)[f"{name} bfloat16"]
    for found, exact in ((result["logits"], case["exact"]), (result["last"], case["exact"][:, -1])):
        error = torch.from_numpy(found) - exact
        assert error.abs().max() < 0.3 * case["exact"].std()
        assert error.std() < 0.05 * case["exact"].std()


@pytest.mark.parametrize(("name", "dtype"), [(name, dtype) for name, _, backend, dtype in RUNS if backend == "shm"])
def test_all_reduces_are_those_of_the_layout_and_waited_for_once(cases, results, name, dtype):
    config = cases[f"{name} {dtype}"]["model"].config
    result = results(2, "shm")[f"{name} {dtype}"]
    modes = [*config.attention_sync, *config.mlp_sync]
    assert result["all_reduces"] == 1 + sum(mode != "dropped" for mode in modes)  # one for the embedding
    assert result["started"] == result["waited"]
    assert result["in_flight"] == 1


def test_replicated_vocabulary(cases, results):
    """The option that spares the embedding's all-reduce changes nothing else."""
    found = results(2, "shm", replicate_vocab=True)
    assert list(found) == REPLICATED
    for name, result in found.items():
        torch.testing.assert_close(torch.from_numpy(result["logits"]), cases[name]["exact"], rtol=1e-4, atol=1e-4)
        modes = [*cases[name]["model"].config.attention_sync, *cases[name]["model"].config.mlp_sync]
        assert result["all_reduces"] == sum(mode != "dropped" for mode in modes)


def test_the_step_that_cuda_graphs_capture(tmp_path):
    """Positions and padding from buffers, a fixed number of columns in view: the same logits as the step that knows
    them."""
    make_model("mixed", max_position_embeddings=128).save_pretrained(tmp_path / "m")
    known, fixed = (make_generator(tmp_path / "m", 2, 24) for _ in range(2))
    prompts = [random_ids(6).tolist(), random_ids(3).tolist()]
    with torch.inference_mode():
        for rows in (prompts, [prompts[0], prompts[0]]):  # with padding and without
            assert torch.equal(known.prefill(rows), fixed.prefill(rows))
            step = FixedStep(fixed, 16)
            for where in range(6, 16):
                tokens = random_ids(2)
                step.set(tokens, where, fixed.padding)
                torch.testing.assert_close(step.run(), known.decode_one_token(tokens), rtol=1e-4, atol=1e-5)


def test_a_batch_of_another_size_than_the_cache(tmp_path):
    make_model("dense").save_pretrained(tmp_path / "m")
    generator = make_generator(tmp_path / "m", 2, 8)
    with pytest.raises(ValueError, match="1 prompts for a cache of 2 rows"):
        generator.prefill([[3, 4]])
    with pytest.raises(UserError, match="a prompt of 9 tokens does not fit a cache of 8"):
        generator.prefill([[3] * 9, [4]])
    generator.prefill([[3] * 8, [4]])
    with pytest.raises(UserError, match="the cache of 8 positions is full"):
        generator.decode_one_token(torch.tensor([3, 4]))


@pytest.mark.parametrize(
    "rope",
    [
        {
            "rope_type": "llama3",
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 16,
        },
        {"rope_type": "linear", "factor": 2.0},
        {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16},
    ],
    ids=lambda rope: rope["rope_type"],
)
def test_rope_scaling_and_tied_embeddings(tmp_path, rope):
    model = make_model("mixed", rope_parameters={"rope_theta": 10000.0, **rope}, tie_word_embeddings=True, head_dim=8)
    model.save_pretrained(tmp_path / "m")
    ids = random_ids(2, 40)
    with torch.no_grad():
        expected = model(ids).logits
    (result,) = distributed.run(
        run_models, {"m": (tmp_path / "m", ids, [[3], [5, 7]], 2)}, "auto", tp_size=1, device="cpu", threads=1
    ).values()
    torch.testing.assert_close(torch.from_numpy(result["logits"]), expected, rtol=1e-4, atol=1e-4)
