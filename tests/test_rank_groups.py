"""More processes than virtual ranks: groups that sum among themselves at once, against the oracle."""

import math

import pytest
import torch

from ladderize.errors import LadderizeError
from ladderize.runtime import launch
from ladderize.runtime.collectives.choose import choose
from ladderize.runtime.collectives.links import SLICED_BYTES
from ladderize.runtime.shards import check_runnable
from tests.groups import run_all_models
from tests.helpers import SHAPE, fresh_rng, make_layout, make_model, random_ids
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


def sums_of_random_parts(group, seed):
    """Sums within groups and across them, of messages of either size, against all ranks' messages."""
    collectives, _ = choose("auto", group, max_bytes=1 << 20)
    split, numbers = collectives.split(2), torch.Generator().manual_seed(seed)
    worst = 0.0
    for size in (SLICED_BYTES // 64, SLICED_BYTES // 4, SLICED_BYTES // 4 + 1):  # short, in slices, and of no slices
        parts = torch.randn(group.size, size, generator=numbers)
        own = split.within.all_reduce(parts[group.rank].clone())
        groups = parts.unflatten(0, (-1, 2)).sum(1)
        worst = max(worst, float((own - groups[group.rank // 2]).abs().max()))
        handles = [split.across.all_reduce_async(own.clone()) for _ in range(2)]  # as in Domino's parts
        worst = max(worst, *(float((handle.wait() - parts.sum(0)).abs().max()) for handle in handles))
    assert collectives.split(2) is split
    collectives.settle()
    return worst


def test_sums_within_groups_and_across_them():
    seed = int(fresh_rng().integers(1 << 30))
    assert launch.run(sums_of_random_parts, seed, tp_size=RANKS, device="cpu", threads=1) < 1e-5


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


def test_which_sizes_run():
    config, layout = {"model_type": "llama", **SHAPE}, make_layout("delayed all 2")
    for ranks in (1, 2, 4, 8):
        check_runnable(config, layout, ranks, in_groups=True)
    with pytest.raises(LadderizeError, match="--tp-size 4 does not divide the 2 virtual ranks"):
        check_runnable(config, layout, 4)
