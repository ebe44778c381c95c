"""Fixtures of the tests that run vLLM. They have an environment of their own: ``make test-vllm``."""

import importlib.util
import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.vllm.engines import Engines

# Processes of vLLM are imported and compiled for long on two cores; a job has its own limit (engines.py).
TIMEOUT = 900
LAST = "test_harness.py"  # it ends a group of ranks


def pytest_configure(config: pytest.Config) -> None:
    if importlib.util.find_spec("vllm") is None:
        raise pytest.UsageError("vLLM is not installed here: `make test-vllm` runs tests/vllm in .venv-vllm")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    items.sort(key=lambda item: item.path.name == LAST)  # stable: otherwise as pytest has them
    for item in items:
        if not item.get_closest_marker("timeout"):
            item.add_marker(pytest.mark.timeout(TIMEOUT))


@pytest.fixture(scope="session", autouse=True)
def _small_caches() -> None:
    """vLLM otherwise wants nearly all of the machine's memory for the caches of one engine, free at its start."""
    os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")  # GiB


@pytest.fixture(scope="session")
def engines(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[int], Engines]]:
    """``engines(ranks)``: the group of that many ranks. They share a cache of compiled models, new in this run."""
    folder: Path = tmp_path_factory.mktemp("engines")
    groups = {ranks: Engines(ranks, folder) for ranks in (1, 2)}
    for group in groups.values():
        group.start()
    yield groups.__getitem__
    for group in groups.values():
        group.end()
