"""The one formula of what a training takes, against the peaks of real steps, and what --dry-run says of it."""

import dataclasses
import json
import random

import numpy as np
import pytest

import ladderize
from ladderize.adapt.data_specs import parse_specs
from ladderize.adapt.train.memory import estimate_training
from ladderize.adapt.train.options import Budget, Objective, RetrainOptions
from ladderize.convert.pipeline import convert_checkpoint
from ladderize.convert.recipe import Recipe
from ladderize.runtime import launch
from tests.helpers import invoke_well, listing, one_sentence, save_llama
from tests.train.commands import CPU, adapt, arguments
from tests.train.peaks import peak_and_estimate

ROWS, TOKENS = 4, 192  # of a micro-batch


@pytest.fixture(scope="module")
def larger(tmp_path_factory):
    """Models of which layers, ends and activations all count, and their data."""
    folder = tmp_path_factory.mktemp("larger")
    shape = {"hidden_size": 128, "intermediate_size": 448, "num_hidden_layers": 4, "vocab_size": 1024}
    save_llama(folder / "dense", **shape, max_position_embeddings=TOKENS, num_attention_heads=4, head_dim=32)
    recipes = {"ladder": Recipe(ladder="all"), "upper": Recipe(ladder="2:")}
    for name, recipe in {**recipes, "spd": Recipe(spd="all", sync_tp_size=4)}.items():
        convert_checkpoint(str(folder / "dense"), folder / name, recipe, verify=False)
    np.save(folder / "ids.npy", np.random.randint(3, 1000, (80, TOKENS // 2)))  # two of which share a row
    return folder


def options(larger, **more):
    given = {"budget": Budget(steps=2), "batch_size": 2 * ROWS, "micro_batch_size": ROWS, "seq_len": TOKENS}
    given |= {"distill_from": str(larger / "dense"), "objective": Objective(1.0), "heldout": 0, "write": "last"}
    return RetrainOptions(data=parse_specs([str(larger / "ids.npy")]), device="cpu", **{**given, **more})


@pytest.mark.parametrize(
    ("model", "more"),
    [
        ("ladder", {"gradient_checkpointing": True, "train": "all"}),
        ("upper", {"objective": Objective(1.0, 1.0)}),
        ("spd", {"micro_batch_size": 2}),
        ("spd", {"method": "lora", "gradient_checkpointing": True}),
    ],
)
def test_the_estimate_is_the_peak_of_a_step(larger, tmp_path, model, more):
    dtype = random.choice(["float32", "bfloat16"])
    peak, expected = peak_and_estimate(CPU, larger / model, tmp_path / "out", options(larger, dtype=dtype, **more))
    assert peak <= expected <= 1.5 * peak, dtype


def test_the_estimate_is_the_peak_of_a_rank(larger, tmp_path):
    run = options(larger, dtype="bfloat16", batch_size=4 * ROWS, tp_size=2)
    job = larger / "ladder", tmp_path / "out", run
    peak, expected = launch.run(peak_and_estimate, *job, tp_size=2, device="cpu", threads=1)
    assert peak <= expected <= 1.5 * peak


def test_memory_is_counted_in_parts(larger):
    found = estimate_training(str(larger / "upper"), options(larger, dtype="bfloat16"))
    sizes = {name: own.numel() for name, own in ladderize.load(larger / "dense").named_parameters()}
    numbers = sum(sizes.values())
    trained = sum(size for name, size in sizes.items() if name.startswith(("model.layers.2.", "model.layers.3.")))
    assert (found.parameters, found.trained_parameters) == (numbers, trained)
    assert found.memory_parts["weights"] == 4 * trained + 2 * (numbers - trained)
    assert found.memory_parts["moments"] == 2 * found.memory_parts["gradients"] == 8 * trained
    assert found.memory_parts["teacher"] == 2 * trained  # what is frozen is held once
    assert found.memory_bytes == sum(found.memory_parts.values())
    assert found.state_bytes == (3 * 12 + 4) * trained


def test_an_aligned_base_is_not_the_teacher_s(larger):
    asked = options(larger, method="lora", dtype="bfloat16")
    before, after = (
        estimate_training(str(larger / "upper"), dataclasses.replace(asked, align=align)).memory_parts["teacher"]
        for align in (False, True)
    )
    own = ladderize.load(larger / "dense").named_parameters()
    upper = sum(value.numel() for name, value in own if name.startswith(("model.layers.2.", "model.layers.3.")))
    assert before == 0
    assert after >= 2 * upper


def test_a_sharded_model_is_gathered(larger, monkeypatch):
    whole = estimate_training(str(larger / "upper"), options(larger)).memory_parts
    monkeypatch.setenv("ACCELERATE_USE_FSDP", "true")
    assert estimate_training(str(larger / "upper"), options(larger)).memory_parts["gathered"] > whole["gathered"] == 0


def test_what_a_dry_run_says(place, tmp_path):
    given = [*arguments(place, None, model="upper", steps=3), "--dry-run", "--distill-from", place / "dense"]
    said = invoke_well(*given).stdout
    assert said.startswith("full: ")
    assert ", 3 steps of 4 rows of 48 tokens, 4 at once. Memory of each process (1 in all): about 5" in said
    assert "The data were not read" in " ".join(said.split())
    document = json.loads(invoke_well(*given, "--json").stdout)
    assert document["memory_bytes"] == sum(document["memory_parts"].values())
    wrong = one_sentence(adapt(place, None, "--dry-run", "--data", tmp_path / "none.jsonl"))
    assert "none.jsonl" in wrong
    assert listing(tmp_path) == []
