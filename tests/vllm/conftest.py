"""Fixtures of the tests that run vLLM. They have an environment of their own: ``make test-vllm``."""

import importlib.util
import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.vllm.engines import Engines

# Processes of vLLM are imported and compiled for long on two cores; a job has its own limit (engines.py).
TIMEOUT = 2400
# Two workers share the files, in this order. Files that are not named come next.
# Who takes test_tokens.py has engines when he comes to test_features.py.
LONG_FILES = ["test_tokens.py", "test_eval.py", "test_bench.py", "test_features.py", "test_server.py", "test_plugin.py"]


def pytest_configure(config: pytest.Config) -> None:
    if importlib.util.find_spec("vllm") is None:
        raise pytest.UsageError("vLLM is not installed here: `make test-vllm` runs tests/vllm in .venv-vllm")


@pytest.hookimpl(trylast=True)  # after that of tests/conftest.py, which knows other files by the same names
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    places = {name: place for place, name in enumerate(LONG_FILES)}
    items.sort(key=lambda item: places.get(item.path.name, len(LONG_FILES)))  # stable: a file's own order stays
    for item in items:
        if not item.get_closest_marker("timeout"):
            item.add_marker(pytest.mark.timeout(TIMEOUT))


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("vllm")


@pytest.fixture(scope="session", autouse=True)
def _caches(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    """For all processes of vLLM: what they keep on disk is new in this run, and small is what they keep in memory."""
    # vLLM otherwise wants nearly all of the machine's memory for the caches of one engine, free at its start
    os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")  # GiB
    os.environ["VLLM_CACHE_ROOT"] = str(folder / "cache")
    base = tmp_path_factory.getbasetemp()
    kernels = (base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / "kernels"  # workers share them
    kernels.mkdir(exist_ok=True)
    os.environ["LADDERIZE_TEST_KERNELS"] = str(kernels)
    os.environ["CXX"] = str(Path(__file__).with_name("kept_g++"))


@pytest.fixture(scope="session")
def engines(folder: Path) -> Iterator[Callable[[int], Engines]]:
    """``engines(ranks)``: the group of that many ranks, which starts with its first job."""
    groups = {ranks: Engines(ranks, folder) for ranks in (1, 2)}
    yield groups.__getitem__
    for group in groups.values():
        group.end()
