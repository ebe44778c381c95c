"""The one formula of what a training takes, against the peak of a whole run on the simulated GPU."""

import numpy as np
import pytest

from ladderize.adapt.train.task import OTHER_BYTES
from ladderize.convert.pipeline import convert_checkpoint
from ladderize.convert.recipe import Recipe
from tests.helpers import invoke_json, invoke_well, listing, save_llama
from tests.simulated_gpu.device import SimulatedGpu
from tests.simulated_gpu.groups import seed

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


def command(larger, model, out, *more):
    sizes = ("--max-steps", 2, "--batch-size", 2 * ROWS, "--micro-batch-size", ROWS, "--seq-len", TOKENS)
    data = ("--data", larger / "ids.npy", "--heldout", 0, "--distill-from", larger / "dense")
    return ("adapt", larger / model, out, *sizes, *data, "--write", "last", "--no-verify", *more)


@pytest.mark.parametrize(
    ("model", "more"),
    [
        ("ladder", ("--gradient-checkpointing", "--train", "all")),
        ("upper", ()),
        ("spd", ("--micro-batch-size", 2)),
        ("spd", ("--method", "lora", "--gradient-checkpointing")),
        ("upper", ("--teacher-cache", "answers")),
    ],
)
def test_the_estimate_is_the_peak(larger, tmp_path, monkeypatch, model, more):
    monkeypatch.setenv("HF_DEACTIVATE_ASYNC_LOAD", "1")  # transformers' own threads do not see the simulated GPU
    monkeypatch.chdir(tmp_path)
    words = command(larger, model, tmp_path / "out", *more, "--device", "cuda")
    with SimulatedGpu(seed()) as gpu:
        expected = invoke_json(*words, "--dry-run")["memory_bytes"] - OTHER_BYTES
        invoke_well(*words)
    assert 0.7 * gpu.peak <= expected <= 1.6 * gpu.peak


def test_a_dry_run(larger, tmp_path):
    """In bfloat16 what is trained has a second copy of its weights, and the teacher takes half."""
    wide, narrow = (
        invoke_json(*command(larger, "ladder", tmp_path / "out", "--train", "all", "--dtype", dtype, "--dry-run"))
        for dtype in ("float32", "bfloat16")
    )
    assert wide["memory_bytes"] == sum(wide["memory_parts"].values())
    shares = {name: narrow["memory_parts"][name] / bytes for name, bytes in wide["memory_parts"].items()}
    assert {name: shares[name] for name in ("weights", "gradients", "moments", "teacher")} == {
        "weights": 1.5, "gradients": 1, "moments": 1, "teacher": 0.5,
    }  # fmt: skip
    assert listing(tmp_path) == []
