"""`ladderize eval --backend vllm` against `--backend hf`: the same log-likelihoods, perplexities and texts; one JSON
document on stdout; and no process that is left."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from lm_eval.api.instance import Instance

from ladderize.demo.inputs import MODEL, TASKS
from ladderize.errors import UserError
from ladderize.eval.hf import HFModel
from ladderize.eval.options import EvalOptions
from ladderize.layout import LayoutError
from ladderize.ranks.group import Ranks
from ladderize.vllm.engine import CHUNK_TOKENS, chunks_of
from ladderize.vllm.eval_model import open_vllm
from tests.helpers import ROOT, edit_tensors, fresh_rng
from tests.vllm.models import make
from tests.warm import PATIENCE, wait_until

POSITIONS = 128
WORDS = (
    *("the", "cat", "dog", "sees", "and", "a", "red", "small", "old", "likes"),
    *("to", "run", "far", "with", "no", "one", "near", "two", "of", "many"),
)
# more than a window of texts, and no room for longer ones
SIZES = {"vocab_size": 768, "bos_token_id": 0, "eos_token_id": 1, "max_position_embeddings": POSITIONS}


def model_with_tokenizer(name: str, folder: Path, **extra: object) -> Path:
    """A random model with the tokenizer of the demo."""
    make(name, folder, **SIZES, **extra)
    for file in MODEL.glob("tokenizer*"):
        shutil.copy(file, folder)
    return folder


def text(rng: np.random.Generator, words: int) -> str:
    return " ".join(rng.choice(WORDS, words))


def instances(kind: str, arguments: list[tuple]) -> list[Instance]:
    return [Instance(kind, {}, given, number) for number, given in enumerate(arguments)]


@pytest.fixture(scope="module", params=[("dense", 1), ("mixed", 2)], ids=["dense-1", "mixed-2"])
def pair(request, tmp_path_factory):
    """The same model in transformers and in vLLM's processes. "mixed" ties its ends, but stores two that differ."""
    name, tp_size = request.param
    folder = model_with_tokenizer(name, tmp_path_factory.mktemp("eval") / "model")
    if name == "mixed":
        edit_tensors(folder, lambda tensors: tensors.update({"lm_head.weight": torch.randn(768, 128) * 0.1}))
    shared = {"dtype": "float32", "tasks": ("demo_copying",), "batch_size": 4}
    hf = HFModel.open("hf", folder, EvalOptions(**shared), Ranks(0, 1, torch.device("cpu")))
    options = EvalOptions(**shared, backend="vllm", tp_size=tp_size)
    with open_vllm("vllm", folder, options, enforce_eager=True) as model:
        yield hf, model, options
    assert children_of(os.getpid()) == []


def children_of(parent: int) -> list[str]:
    """The command lines of the processes below this one that are vLLM's or were started for it."""
    found, parents = {}, {}
    for folder in Path("/proc").iterdir():
        try:
            fields = (folder / "stat").read_text().rpartition(")")[2].split()
            found[int(folder.name)] = (folder / "cmdline").read_text().replace("\0", " ")
            parents[int(folder.name)] = int(fields[1])
        except (ValueError, OSError):  # no process, or one that has ended
            continue

    def below(number: int) -> bool:
        while number in parents:
            number = parents[number]
            if number == parent:
                return True
        return False

    return [line for number, line in found.items() if below(number) and ("spawn_main" in line or "VLLM" in line)]


def test_log_likelihoods(pair):
    """Short and long contexts, one that is cut, and texts of several windows."""
    hf, model, options = pair
    rng = fresh_rng()
    ours, theirs = model.harness(options, True), hf.harness(options, True)
    asked = [(text(rng, rng.integers(1, 30)), " " + text(rng, rng.integers(1, 9))) for _ in range(12)]
    asked += [(text(rng, 200), " " + text(rng, 3)), ("", " " + text(rng, 2))]
    # what transformers itself finds most likely, so that not every answer is "not greedy"
    wishes = [(context, {"until": [], "max_gen_toks": 1}) for context, _ in asked[:6]]
    likely = theirs.generate_until(instances("generate_until", wishes), disable_tqdm=True)
    made = [(context, text) for (context, _), text in zip(wishes, likely, strict=True)]
    # not what has no ids of its own: the end of the text, or a piece that merges with its context's last word
    asked += [pair for pair in made if pair[1] and theirs._encode_pair(*pair)[1]]
    expected = theirs.loglikelihood(instances("loglikelihood", asked), disable_tqdm=True)
    found = ours.loglikelihood(instances("loglikelihood", asked), disable_tqdm=True)
    np.testing.assert_allclose([one[0] for one in found], [one[0] for one in expected], atol=1e-3)
    assert differing([one[1] for one in found], [one[1] for one in expected]) <= 1
    texts = [(text(rng, words),) for words in (1, 40, 180)]
    np.testing.assert_allclose(
        ours.loglikelihood_rolling(instances("loglikelihood_rolling", texts), disable_tqdm=True),
        theirs.loglikelihood_rolling(instances("loglikelihood_rolling", texts), disable_tqdm=True),
        atol=1e-3,
    )


def test_windows_of_ids(pair):
    """As long as the model has positions, shorter ones, and one of two ids."""
    hf, model, _ = pair
    rng = fresh_rng()
    windows = [rng.integers(2, 768, length) for length in (POSITIONS, POSITIONS, 50, 2)]
    counted = []
    found = model.score(windows, batch_size=2, advance=counted.append)
    np.testing.assert_allclose(found.nll, hf.score(windows, batch_size=2).nll, atol=1e-3)
    assert (sum(counted), found.kl) == (4, None)


def differing(found: list[str] | list[bool], expected: list[str] | list[bool]) -> int:
    """How many answers differ. One may: of two tokens that are as likely the last bit of a logit decides."""
    return sum(one != other for one, other in zip(found, expected, strict=True))


def test_generated_texts(pair):
    """With stop strings that appear in the text, and none."""
    hf, model, options = pair
    rng = fresh_rng()
    ours, theirs = model.harness(options, True), hf.harness(options, True)
    prompts = [text(rng, words) for words in (1, 5, 20, 60)]
    wishes = [(prompt, {"until": [], "max_gen_toks": 24}) for prompt in prompts]
    expected = theirs.generate_until(instances("generate_until", wishes), disable_tqdm=True)
    assert differing(ours.generate_until(instances("generate_until", wishes), disable_tqdm=True), expected) <= 1
    middles = [whole[len(whole) // 2 :][:3] for whole in expected]
    stopped = [
        (prompt, {"until": [stop], "max_gen_toks": 24}) for prompt, stop in zip(prompts, middles, strict=True) if stop
    ]
    found = ours.generate_until(instances("generate_until", stopped), disable_tqdm=True)
    assert differing(found, theirs.generate_until(instances("generate_until", stopped), disable_tqdm=True)) <= 1
    assert all(stop not in made for made, (_, wish) in zip(found, stopped, strict=True) for stop in wish["until"])


def test_sampled_texts(pair):
    """The same ones again with the same seed, and others for each of several equal requests."""
    _, model, options = pair
    lm = model.harness(options, True)
    wish = ("the", {"until": [], "max_gen_toks": 16, "do_sample": True, "temperature": 1.5})

    def made(seed: int) -> list[str]:
        torch.manual_seed(seed)
        return lm.generate_until(instances("generate_until", [wish] * 4), disable_tqdm=True)

    first, again, others = made(1), made(1), made(2)
    # requests reach vLLM's process one by one: which of them share its first step, and so the last bits, is chance
    assert differing(again, first) <= 1 < differing(others, first)
    assert len(set(first)) > 1


@pytest.mark.parametrize(
    ("wish", "message"),
    [
        ({"num_beams": 2}, "num_beams, which only --backend hf does"),
        ({"max_gen_toks": POSITIONS}, "leaves no room for a context"),
    ],
)
def test_what_is_not_generated(pair, wish, message):
    _, model, options = pair
    with pytest.raises(UserError, match=message):
        model.harness(options, True).generate_until(instances("generate_until", [("the", wish)]))


def test_prompts_are_handed_over_in_parts():
    rng = fresh_rng()
    lengths = [*rng.integers(1, CHUNK_TOKENS // 3, 40).tolist(), 2 * CHUNK_TOKENS, 1]
    parts = list(chunks_of(lengths))
    assert [index for part in parts for index in part] == list(range(len(lengths)))
    assert all(len(part) == 1 or sum(lengths[index] for index in part) <= CHUNK_TOKENS for part in parts)
    assert list(chunks_of([])) == []


def test_a_tp_size_that_a_layout_was_not_made_for(tmp_path):
    folder = model_with_tokenizer("spd 2", tmp_path / "spd")
    options = EvalOptions(tasks=("demo_copying",), backend="vllm", tp_size=4)
    with pytest.raises(LayoutError, match="does not divide the 2 virtual ranks"):
        open_vllm("spd", folder, options)


def test_what_vllm_refuses_is_one_sentence(tmp_path):
    """There is no room for a text of a million tokens; vLLM's processes say so, and end."""
    folder = tmp_path / "long"
    make("dense", folder, **SIZES | {"max_position_embeddings": 10**6})
    options = EvalOptions(perplexity="ids.npy", backend="vllm")
    before = children_of(os.getpid())  # the other tests' engine may still run
    with pytest.raises(UserError, match=r"^vLLM cannot run long: .*KV cache.*--max-length.*\.log\)$") as error:
        open_vllm("long", folder, options, enforce_eager=True)
    log = Path(str(error.value).rpartition(" is ")[2].rstrip(")"))
    assert "Traceback" in log.read_text()
    log.unlink()
    assert sorted(children_of(os.getpid())) == sorted(before)


# ---- the command ----


def command(*given: object) -> subprocess.Popen:
    """In a session of its own, so that what it leaves is found."""
    line = [sys.executable, "-m", "ladderize", "eval", *map(str, given)]
    return subprocess.Popen(
        line, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True
    )


def session(leader: int) -> list[str]:
    """The command lines of the processes of a session."""
    found = []
    for folder in Path("/proc").iterdir():
        try:
            fields = (folder / "stat").read_text().rpartition(")")[2].split()
            if int(fields[3]) == leader and fields[0] != "Z":
                found.append((folder / "cmdline").read_text().replace("\0", " "))
        except (ValueError, OSError):
            continue
    return found


def gone(leader: int) -> bool:
    deadline = time.monotonic() + PATIENCE
    while session(leader) and time.monotonic() < deadline:
        time.sleep(0.2)
    return session(leader) == []


def test_the_command(tmp_path):
    """Two models, one after the other, on two ranks each, compiled; against transformers."""
    models = [model_with_tokenizer(name, tmp_path / name, num_hidden_layers=2) for name in ("dense", "ladder all")]
    np.save(tmp_path / "ids.npy", fresh_rng().integers(2, 768, 300))
    what = ("--tasks", "demo_agreement", "--include-path", TASKS, "--limit", 5, "--perplexity", tmp_path / "ids.npy")
    what = (*models, *what, "--dtype", "float32", "--json")
    process = command(*what, "--backend", "vllm", "--tp-size", 2, "--out", tmp_path / "r.json")
    output, errors = process.communicate(timeout=2 * PATIENCE)
    assert process.returncode == 0, errors
    assert gone(process.pid)
    document = json.loads(output)  # one document, and nothing else
    assert json.loads((tmp_path / "r.json").read_text()) == document
    assert "predictions of" in errors, "nothing is compared without being said"
    lines = [line for line in errors.splitlines() if not line.startswith("Warning: the predictions of")]
    expected = ["loading torch and transformers", "reading the tasks of lm-eval"]
    for model in models:
        expected += [f"loading {model}", f"{model}: demo_agreement (1 of 1)"]
    slow = ("perplexity: ", "%|", " so far")  # progress of a slow machine
    told = [line for line in lines if not any(part in line for part in slow)]
    assert told == [*expected, f"comparing with {models[0]}", f"wrote {tmp_path / 'r.json'}"]

    process = command(*what)
    by_hf, errors = process.communicate(timeout=PATIENCE)
    assert process.returncode == 0, errors
    for ours, theirs in zip(document["models"], json.loads(by_hf)["models"], strict=True):
        own, other = ours["ladderize"], theirs["ladderize"]
        assert (own["backend"], own["tp_size"], own["device"]) == ("vllm", 2, "cpu")
        assert own["vllm_version"].startswith("0.32")
        for key in ("layout", "parameters", "dtype", "add_bos_token", "attention_sync", "mlp_sync", "sync_tp_size"):
            assert own[key] == other[key], key
        np.testing.assert_allclose(own["perplexity"]["window_nll"], other["perplexity"]["window_nll"], atol=1e-3)
        assert own["perplexity"]["ids_sha256"] == other["perplexity"]["ids_sha256"]
        right = [model["results"]["demo_agreement"]["acc,none"] for model in (ours, theirs)]
        assert right[0] == pytest.approx(right[1], abs=1.1 / 5)  # of two answers as likely the last bit decides
        samples = (tmp_path / ours["samples"]["demo_agreement"]).read_text().splitlines()
        assert len(samples) == 5
    assert document["comparisons"][0]["perplexity"]["windows"] == 3


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupt_leaves_no_process(tmp_path, number):
    folder = model_with_tokenizer("dense", tmp_path / "dense")
    process = command(folder, "--tasks", "demo_copying", "--include-path", TASKS, "--backend", "vllm")
    wait_until(lambda: process.poll() is not None or any("spawn_main" in line for line in session(process.pid)))
    time.sleep(5)  # whatever it does by then
    os.killpg(process.pid, number) if number == signal.SIGINT else process.send_signal(number)
    _, errors = process.communicate(timeout=PATIENCE)
    assert gone(process.pid), session(process.pid)
    assert process.returncode == 128 + number
    assert errors.endswith("Interrupted.\n") or number == signal.SIGTERM
