"""What the tests of training data share: a tokenizer, chat templates, an own cache."""

import datasets
import pytest

from ladderize.modeling import load_tokenizer
from tests.adapt_data.rows import DEMO


@pytest.fixture(scope="session")
def tokenizer():
    return load_tokenizer(DEMO)


@pytest.fixture
def chat(tokenizer):

    def use(template):
        tokenizer.chat_template = template
        return tokenizer

    yield use
    tokenizer.chat_template = None


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch):
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "hf")
