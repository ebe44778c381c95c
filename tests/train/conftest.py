"""The models and data of the tests of retraining."""

import numpy as np
import pytest

from ladderize.convert.pipeline import convert_checkpoint
from ladderize.convert.recipe import Recipe
from tests.helpers import SHAPE, save_llama
from tests.train.commands import LENGTH, ROWS


@pytest.fixture(scope="session")
def place(tmp_path_factory):
    return furnish(tmp_path_factory.mktemp("retrain"), "llama")


@pytest.fixture(scope="session")
def qwen3(tmp_path_factory):
    return furnish(tmp_path_factory.mktemp("qwen3"), "qwen3")


def furnish(folder, model_type):
    save_llama(folder / "dense", model_type=model_type)
    recipes = {"both": Recipe(ladder="all", spd="all", sync_tp_size=4), "upper": Recipe(ladder="2:")}
    for name, recipe in recipes.items():
        convert_checkpoint(str(folder / "dense"), folder / name, recipe, verify=False)
    ids = np.random.default_rng(0).integers(3, SHAPE["vocab_size"], (ROWS, LENGTH))
    np.save(folder / "ids.npy", ids)
    np.save(folder / "eval.npy", ids[:3])
    return folder
