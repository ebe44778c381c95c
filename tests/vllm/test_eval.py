"""`ladderize eval --engine vllm` against transformers: log-likelihoods, perplexities and texts; one JSON document."""

import contextlib
import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from lm_eval.api.instance import Instance

from ladderize.demo.command import MODEL, TASKS
from ladderize.eval.model import HFModel
from ladderize.eval.options import EvalOptions
from ladderize.ranks.group import Ranks
from ladderize.vllm.eval_model import open_vllm
from tests.helpers import edit_tensors, fresh_rng
from tests.vllm.engines import ladderize
from tests.vllm.models import make

POSITIONS = 128
WORDS = ("the", "cat", "dog", "sees", "and", "a", "red", "small", "old", "likes", "to", "run", "far", "with", "one")
SIZES = {"vocab_size": 768, "bos_token_id": 0, "eos_token_id": 1, "max_position_embeddings": POSITIONS}
SHARED = {"models": ("model",), "dtype": "float32", "tasks": ("demo_copying",), "batch_size": 4}


def model_with_tokenizer(name: str, folder: Path, **more: object) -> Path:
    """A random model with the tokenizer of the demo."""
    make(name, folder, **{**SIZES, **more})
    for file in MODEL.glob("tokenizer*"):
        shutil.copy(file, folder)
    return folder


@pytest.fixture(scope="module")
def pair(tmp_path_factory):
    """The same model in transformers and in vLLM's two processes. It ties its ends, but stores two that differ."""
    folder = model_with_tokenizer("mixed", tmp_path_factory.mktemp("eval") / "model")
    edit_tensors(folder, lambda tensors: tensors.update({"lm_head.weight": torch.randn(768, 128) * 0.1}))
    hf = HFModel("hf", folder, EvalOptions(**SHARED), Ranks(0, 1, torch.device("cpu")))
    options = EvalOptions(**SHARED, engine="vllm", tp_size=2)
    with contextlib.closing(open_vllm("vllm", folder, options, enforce_eager=True)) as model:
        yield hf, model


def answers(pair, kind: str, arguments: list[tuple]) -> list[list]:
    asked = [Instance(kind, {}, given, number) for number, given in enumerate(arguments)]
    return [getattr(one.harness(), kind)(asked, disable_tqdm=True) for one in pair]


def test_log_likelihoods(pair):
    rng = fresh_rng()

    def text(words: int) -> str:
        return " ".join(rng.choice(WORDS, words))

    arguments = [(text(int(rng.integers(1, 20))), " " + text(int(rng.integers(1, 4)))) for _ in range(12)]
    theirs, ours = answers(pair, "loglikelihood", arguments)
    np.testing.assert_allclose([total for total, _ in ours], [total for total, _ in theirs], atol=1e-3)
    assert [greedy for _, greedy in ours] == [greedy for _, greedy in theirs]


def test_windows_of_ids(pair):
    """Also one as long as the model's positions."""
    hf, model = pair
    assert model.positions == hf.positions == POSITIONS
    windows = [fresh_rng().integers(3, 768, length) for length in (2, 9, 40, POSITIONS)]
    scores = [one.score(windows, lambda count: None) for one in (model, hf)]
    ours, theirs = ([score.nll for score in each] for each in scores)
    np.testing.assert_allclose(ours, theirs, rtol=1e-4, atol=1e-3)


def test_longrope_rotates_short_texts_as_in_transformers(tmp_path):
    """The model promises more positions than its first length, with which vLLM would rotate all texts otherwise."""
    folder = model_with_tokenizer("fused, delayed and spd", tmp_path / "model", max_position_embeddings=256)
    hf = HFModel("hf", folder, EvalOptions(**SHARED), Ranks(0, 1, torch.device("cpu")))
    windows = [fresh_rng().integers(3, 768, length) for length in (9, 40, 190)]
    with contextlib.closing(open_vllm("vllm", folder, EvalOptions(**SHARED, engine="vllm"), enforce_eager=True)) as own:
        ours, theirs = ([score.nll for score in one.score(windows, lambda count: None)] for one in (own, hf))
    np.testing.assert_allclose(ours, theirs, rtol=1e-4, atol=1e-3)


def test_generated_texts(pair):
    wish = {"until": ["\n"], "max_gen_toks": 8, "do_sample": False}
    rng = fresh_rng()
    theirs, ours = answers(pair, "generate_until", [(" ".join(rng.choice(WORDS, 6)), wish) for _ in range(4)])
    # lm-eval's vLLM model keeps special tokens; vLLM leaves out what is no whole character at a text's end
    for special in pair[0].tokenizer.all_special_tokens:
        ours = [text.replace(special, "") for text in ours]
    ours, theirs = ([text.strip().rstrip("\ufffd") for text in texts] for texts in (ours, theirs))
    same = sum(one == other for one, other in zip(ours, theirs, strict=True))
    assert same >= 3  # rounding may turn one


def test_the_command(tmp_path):
    """One document on stdout, and a comparison of two models."""
    models = [model_with_tokenizer(name, tmp_path / name) for name in ("dense", "mixed")]
    (tmp_path / "text.txt").write_text("the cat sees the dog and the dog sees the cat")
    command = ["eval", *models, "--engine", "vllm", "--tasks", "demo_agreement", "--include-path", TASKS, "--json"]
    command += ["--limit", 6, "--perplexity", tmp_path / "text.txt", "--dtype", "float32"]
    document = json.loads(ladderize(*command))
    for entry in document["models"]:
        assert entry["ladderize"]["backend"] == "vllm"
        assert entry["results"]["demo_agreement"]["alias"]
    assert len(document["comparisons"]) == 1
