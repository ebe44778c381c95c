import gc
import json
import os
import random
import shutil
import zlib
from collections.abc import Iterator
from pathlib import Path

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

import numpy as np
import pytest
import torch

from ladderize.convert.pipeline import convert_checkpoint
from ladderize.convert.recipe import Recipe
from tests import warm
from tests.helpers import SHAPE, STORIES, save_llama

torch.set_num_threads(1)

SEED = "LADDERIZE_TEST_SEED"
# The longest files, the longest first: two workers then end together (--dist loadfile with --no-loadscope-reorder
# takes them in this order).
LONG_FILES = [
    "demo", "domino_gradients", "align_command", "eval", "report_browser", "generate", "tensor_parallel",
    "eval_ranks", "docs", "report", "promotion", "examples", "api",
    "aligned_sensitivity", "spd", "runtime", "sweep_keys", "sweep_killed", "sweep", "sweep_file",
    "bench", "bench_training", "calibrate", "plan", "plan_choice", "planning_model", "model",
    "distill", "house", "compare",
]  # fmt: skip


# These have an environment of their own (`make test-vllm`), and are collected only where they are named.
VLLM_TESTS = Path(__file__).parent / "vllm"


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    if collection_path != VLLM_TESTS:
        return None
    named = [(config.invocation_params.dir / argument.partition("::")[0]).resolve() for argument in config.args]
    return True if not any(path.is_relative_to(VLLM_TESTS) for path in named) else None


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    places = {f"test_{name}.py": place for place, name in enumerate(LONG_FILES)}
    items.sort(key=lambda item: places.get(item.path.name, len(places)))  # stable: a file's own order stays


def pytest_collection_finish(session: pytest.Session) -> None:
    """What was imported until here stays: the garbage collector, which commands call by name too, need not walk through
    a million objects of it each time."""
    gc.collect()
    gc.freeze()


def pytest_configure(config: pytest.Config) -> None:
    os.environ.setdefault(SEED, str(random.SystemRandom().randrange(1 << 31)))  # xdist's workers inherit it
    config.addinivalue_line("markers", "own_process: the verifying child is started as users have it, not forked")


def pytest_report_header() -> str:
    return f"{SEED}={os.environ[SEED]}"


def set_seeds(name: str) -> None:
    """Seed what tests draw from, for something that has a name: it draws the same whatever ran before it."""
    value = zlib.crc32(f"{os.environ[SEED]} {name}".encode())
    random.seed(value)
    np.random.seed(value)
    torch.manual_seed(value)


@pytest.hookimpl(tryfirst=True)
def pytest_fixture_setup(fixturedef: pytest.FixtureDef[object]) -> None:
    if fixturedef.scope != "function":  # what is made once does not depend on the test that asks first
        set_seeds(f"{fixturedef.baseid}::{fixturedef.argname}")


@pytest.fixture(autouse=True)
def seed(request: pytest.FixtureRequest) -> None:
    """Each test draws from a seed of its own, made of LADDERIZE_TEST_SEED, which the report of a failure shows."""
    request.node.add_report_section("setup", "seed", f"{SEED}={os.environ[SEED]}")
    set_seeds(request.node.nodeid)


@pytest.fixture(autouse=True)
def quick_verification(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """The child that verifies a checkpoint is forked from a process that has imported transformers already; it runs
    the same script, without ladderize."""
    if request.node.get_closest_marker("own_process") is None:
        monkeypatch.setattr("ladderize.convert.verify.subprocess", warm.SUBPROCESS)


@pytest.fixture(autouse=True)
def one_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    """Commands give this process all cores; two workers that do so on two cores wait for each other a hundredfold."""
    set_num_threads = torch.set_num_threads
    monkeypatch.setattr(torch, "set_num_threads", lambda threads: set_num_threads(1))
    set_num_threads(1)


@pytest.fixture(scope="session", autouse=True)
def warm_python_ends() -> Iterator[None]:
    yield
    if warm.warm_python.cache_info().currsize:
        warm.warm_python().close()


@pytest.fixture(scope="session")
def made_llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_llama(tmp_path_factory.mktemp("llama") / "src")


@pytest.fixture
def llama(made_llama: Path, tmp_path: Path) -> Path:
    """A small random Llama on disk, for this test alone: 4 layers, GQA 8/4, one safetensors file, float32."""
    return Path(shutil.copytree(made_llama, tmp_path / "src"))


@pytest.fixture(scope="session")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a dense model, one of layout spd 0,2, ids to train on, and others to evaluate; only to be read."""
    folder = tmp_path_factory.mktemp("place")
    save_llama(folder / "dense")
    convert_checkpoint(folder / "dense", folder / "spd", Recipe(spd="0,2", sync_tp_size=2), verify=False)
    np.save(folder / "ids.npy", np.random.default_rng(0).integers(3, SHAPE["vocab_size"], (24, 16)))
    np.save(folder / "heldout.npy", np.random.randint(3, SHAPE["vocab_size"], (6, 16)))
    return folder


@pytest.fixture(scope="session")
def made_pair(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("pair")
    save_llama(folder / "dense", seed=5)
    convert_checkpoint(folder / "dense", folder / "spd", Recipe(spd="1:", sync_tp_size=4), verify=False)
    np.save(folder / "ids.npy", np.random.default_rng(0).integers(3, SHAPE["vocab_size"], (72, 16)))
    return folder


@pytest.fixture
def pair(made_pair: Path, tmp_path: Path) -> tuple[Path, Path]:
    """A dense model and its conversion in ``tmp_path``, for this test alone; beside them ids.npy, 72 windows."""
    shutil.copytree(made_pair, tmp_path, dirs_exist_ok=True)
    return tmp_path / "dense", tmp_path / "spd"


@pytest.fixture
def ids(tmp_path: Path) -> Path:
    """Windows of random ids as a file: 12 x 16."""
    path = tmp_path / "ids.npy"
    np.save(path, np.random.randint(3, SHAPE["vocab_size"], (12, 16)))
    return path


@pytest.fixture
def shape(tmp_path: Path) -> Path:
    path = tmp_path / "config.json"
    path.write_text(json.dumps({**SHAPE, "model_type": "llama"}))
    return path


@pytest.fixture(scope="session")
def stories() -> Path:
    """The trained Llama beside the repository; tests may use it, never require it."""
    if not STORIES.is_dir():
        pytest.skip("../shared/fixtures is not here")
    return STORIES
