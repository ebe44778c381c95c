import os
from pathlib import Path

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

import pytest
import torch

from tests.helpers import STORIES, save_llama

torch.set_num_threads(1)


@pytest.fixture
def llama(tmp_path: Path) -> Path:
    """A small random Llama on disk: 4 layers, GQA 8/4, one safetensors file, float32."""
    return save_llama(tmp_path / "src")


@pytest.fixture(scope="session")
def stories() -> Path:
    """The trained Llama beside the repository; tests may use it, never require it."""
    if not STORIES.is_dir():
        pytest.skip("../shared/fixtures is not here")
    return STORIES
