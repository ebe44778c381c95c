"""More processes than virtual ranks: groups that sum among themselves at once, against the oracle."""

import math

import pytest

from ladderize.runtime import launch
from ladderize.runtime.collectives.links import SLICED_BYTES
from tests.groups import run_all_models
from tests.helpers import SHAPE, make_layout, make_model, random_ids
from tests.test_runtime import assert_computed

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
