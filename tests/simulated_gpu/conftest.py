from pathlib import Path

import pytest

from tests.simulated_gpu.groups import LAYOUTS, save_model


@pytest.fixture(scope="session")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A random model of each layout; only to be read."""
    return {name: save_model(name, tmp_path_factory.mktemp("simulated") / name) for name in LAYOUTS}
