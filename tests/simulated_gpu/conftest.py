from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.simulated_gpu.models import LAYOUTS, save_model
from tests.simulated_gpu.pinned import pinned_memory


@pytest.fixture(scope="session")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A random model of each layout; only to be read."""
    return {name: save_model(name, tmp_path_factory.mktemp("simulated") / name) for name in LAYOUTS}


@pytest.fixture(autouse=True)
def _pinned_memory() -> Iterator[None]:
    with pinned_memory():
        yield
