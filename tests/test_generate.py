"""Sampling, stopping, streaming, and the command line of ``ladderize generate``."""

import json
import shutil
import subprocess
import sys

import pytest
import torch

from ladderize import load
from ladderize.demo.command import MODEL
from ladderize.runtime.decode import Sampling, sample
from ladderize.runtime.generate import GenerateDocument
from ladderize.runtime.spec import checkpoint_spec, eos_ids
from tests import warm
from tests.helpers import ROOT, edit_json, invoke, invoke_well, refusal

GREEDY = "Once upon a time, there was a little girl named Lily. She loved to play outside in the park."


def distribution(logits, sampling):
    """What sampling promises, the slow way: the probability of each token."""
    scaled = logits / sampling.temperature
    if sampling.top_k:
        scaled = scaled.masked_fill(scaled < scaled.topk(sampling.top_k).values[-1], -torch.inf)
    probabilities = scaled.softmax(-1)
    kept, total = torch.zeros_like(probabilities), 0.0
    for index in probabilities.argsort(descending=True):
        if total >= sampling.top_p and total:
            break
        kept[index] = probabilities[index]
        total += float(probabilities[index])
    return kept / kept.sum()


@pytest.mark.parametrize(
    "sampling", [Sampling(1.0), Sampling(1.0, top_p=0.6), Sampling(1.5, top_k=7, top_p=0.8), Sampling(1.0, top_p=0.0)]
)
def test_samples_have_the_promised_distribution(sampling):
    logits = torch.randn(12)
    draws = (torch.arange(20000) + 0.5) / 20000  # every part of the unit interval alike: no chance in this test
    found = torch.bincount(sample(logits.expand(20000, -1), sampling, draws), minlength=12) / 20000
    torch.testing.assert_close(found, distribution(logits, sampling), atol=2e-4, rtol=0)


@pytest.mark.parametrize("temperature", [1e-38, 1e-45, 1e-46, 5e-324])
@pytest.mark.parametrize("limits", [{}, {"top_k": 3}, {"top_p": 0.5}])
def test_a_tiny_temperature_is_greedy(temperature, limits):
    logits = torch.randn(4, 50) * 10
    assert torch.equal(sample(logits, Sampling(temperature, **limits), torch.rand(4)), logits.argmax(-1))


def test_logits_of_16_bits_keep_their_order():
    """Two that differ, and whose differences from the best are the same number in bfloat16."""
    logits = torch.tensor([[20.0, 0.1001, 0.1021, 0.0]], dtype=torch.bfloat16)
    drawn = sample(logits.expand(9, -1), Sampling(100.0, top_k=2), torch.linspace(0, 0.99, 9))
    assert set(drawn.tolist()) == {0, 2}


def test_eos_ids_are_all_of_generation_config(llama):
    edit_json(llama / "config.json", eos_token_id=5)
    (llama / "generation_config.json").unlink(missing_ok=True)
    spec = checkpoint_spec(str(llama), tp_size=1)
    assert eos_ids(spec) == (5,)
    (llama / "generation_config.json").write_text(json.dumps({"eos_token_id": [7, 8]}))
    assert eos_ids(spec) == (7, 8)


# ---- the command ----


def test_weights_that_are_no_numbers(tmp_path):
    model = load(MODEL)
    with torch.no_grad():
        model.lm_head.weight[7] = torch.nan
    model.save_pretrained(tmp_path / "m")
    for path in MODEL.glob("tokenizer*"):
        shutil.copy(path, tmp_path / "m")
    words = ("-p", "the cat", "--max-new-tokens", 4)
    assert "the model's logits are NaN or infinite" in refusal("generate", tmp_path / "m", *words)


def test_generate_streams_the_models_text(stories):
    outcome = invoke_well("generate", stories, "--prompt", "", "--max-new-tokens", 40)
    assert outcome.stdout.startswith(GREEDY)


def test_joins_a_group_that_torchrun_started(tmp_path):
    launcher = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--standalone", "-m"]
    command = ["generate", MODEL, "-p", "the cat", "-p", "a", "--max-new-tokens", "6", "--dtype", "float32", "--json"]
    words, how = [*launcher, "ladderize", *command, "--tp-size", "2"], {"timeout": warm.PATIENCE, "cwd": ROOT}
    outcome = subprocess.run(words, capture_output=True, text=True, **how)
    assert outcome.returncode == 0, outcome.stderr
    document, alone = json.loads(outcome.stdout), json.loads(invoke(*command).stdout)  # one document: rank 0's
    assert [text["new_ids"] for text in document["texts"]] == [text["new_ids"] for text in alone["texts"]]
    assert document["tp_size"] == 2
    assert GenerateDocument.from_dict(document, "stdout").to_dict().items() <= document.items()


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (["--top-k", "4"], 2, "--top-k has no effect with --temperature 0"),
        (["--max-new-tokens", "5000"], 1, "exceed the model's"),
    ],
)
def test_bad_arguments(arguments, code, message):
    assert message in refusal("generate", MODEL, "-p", "the cat", *arguments, code=code)
