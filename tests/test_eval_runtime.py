"""`eval --backend runtime` against `--backend hf`: the same tasks, perplexity and distance between predictions."""

import json
import sys

import numpy as np
import pytest

from ladderize import convert_checkpoint, evaluate
from ladderize.convert.recipe import Recipe
from ladderize.demo.inputs import MODEL, TASKS
from ladderize.errors import UserError
from ladderize.eval.options import EvalOptions
from ladderize.layout import LayoutError
from tests import warm
from tests.helpers import fresh_rng, invoke, make_model, one_sentence


@pytest.fixture(scope="module")
def pair(tmp_path_factory):
    folder = tmp_path_factory.mktemp("pair")
    convert_checkpoint(MODEL, folder / "both", Recipe(ladder="2:", spd="1,4", sync_tp_size=2), verify=False)
    return MODEL, folder / "both"


@pytest.fixture(scope="module")
def ids(tmp_path_factory):
    """Windows of ids, the last one shorter."""
    path = tmp_path_factory.mktemp("ids") / "ids.npy"
    np.save(path, fresh_rng().integers(2, 500, 5 * 33 + 9))
    return path


def run(pair, ids, **options):
    chosen = {"dtype": "float32", "include_path": str(TASKS), "include_default_tasks": False, "limit": 9, "seq_len": 33}
    return evaluate(
        pair, EvalOptions(perplexity=str(ids), tasks=("demo_copying", "demo_agreement"), **chosen, **options)
    )


@pytest.fixture(scope="module")
def by_hf(pair, ids):
    return run(pair, ids)


def assert_same_top(found, expected):
    """But for a position where two tokens are all but as good, and rounding decides which is the first choice."""
    assert found.same_top_share == pytest.approx(expected.same_top_share, abs=1.5 / expected.tokens)


@pytest.mark.parametrize("tp_size", [1, 2])
def test_the_same_results(pair, ids, by_hf, tp_size):
    found = run(pair, ids, backend="runtime", tp_size=tp_size, batch_size=3)
    for ours, theirs in zip(found.models, by_hf.models, strict=True):
        assert (ours.model.backend, ours.model.tp_size, theirs.model.backend) == ("runtime", tp_size, "hf")
        for name in ("layout", "parameters", "dtype", "add_bos_token", "attention_sync", "sync_tp_size"):
            assert getattr(ours.model, name) == getattr(theirs.model, name), name
        assert ours.model.perplexity.ids_sha256 == theirs.model.perplexity.ids_sha256
        np.testing.assert_allclose(ours.model.perplexity.window_nll, theirs.model.perplexity.window_nll, atol=1e-3)
        assert ours.tasks.keys() == theirs.tasks.keys()
        for task, metrics in theirs.tasks.items():
            assert ours.tasks[task] == pytest.approx(metrics), task
    dense, converted = (model.model.predictions for model in found.models)
    expected = by_hf.models[1].model.predictions
    assert dense is None
    assert expected.mean_kl > 0.01, "nothing to compare"
    assert converted.mean_kl == pytest.approx(expected.mean_kl, rel=1e-3)
    assert converted.p99_kl == pytest.approx(expected.p99_kl, rel=1e-3)
    assert_same_top(converted, expected)
    np.testing.assert_allclose(converted.window_kl, expected.window_kl, rtol=2e-3, atol=1e-5)


@pytest.mark.parametrize("backends", [("hf", "runtime"), ("runtime", "hf")])
def test_one_backend_compares_with_what_the_other_has_kept(pair, ids, by_hf, backends, tmp_path):
    """A vocabulary of 768 rows split over two ranks, against the whole head that transformers multiplies with."""
    text, out = ("--perplexity", ids, "--seq-len", 33, "--dtype", "float32"), tmp_path / "results.json"
    more = {"hf": (), "runtime": ("--backend", "runtime", "--tp-size", 2)}
    for model, backend, option in zip(pair, backends, ("--keep-predictions", "--reference"), strict=True):
        outcome = invoke("eval", model, *text, *more[backend], option, tmp_path / "kept", "--out", out)
        assert outcome.code == 0, outcome.stderr
    (found,) = json.loads(out.read_text())["models"]
    assert found["ladderize"]["tp_size"] == (2 if backends[1] == "runtime" else 1)
    expected = by_hf.models[1].model.predictions
    assert found["ladderize"]["predictions"]["mean_kl"] == pytest.approx(expected.mean_kl, rel=1e-3)


def test_a_vocabulary_that_the_ranks_do_not_divide(tmp_path):
    """97 tokens: the second rank's last row is padding, in both models."""
    for name in ("dense", "ladder all"):
        make_model(name).save_pretrained(tmp_path / name)
    np.save(tmp_path / "ids.npy", fresh_rng().integers(3, 97, 80))
    shared = {"perplexity": str(tmp_path / "ids.npy"), "seq_len": 20}
    models = [tmp_path / "dense", tmp_path / "ladder all"]
    expected = evaluate(models, EvalOptions(**shared)).models[1].model.predictions
    found = evaluate(models, EvalOptions(**shared, backend="runtime", tp_size=2)).models[1].model.predictions
    assert found.mean_kl == pytest.approx(expected.mean_kl, rel=1e-3)
    assert_same_top(found, expected)


def test_what_the_runtime_cannot_do_is_one_sentence(pair, ids, tmp_path):
    make_model("spd all 4").save_pretrained(tmp_path / "four")
    common = ("--perplexity", ids, "--backend", "runtime")
    assert "--tp-size 3" in one_sentence(invoke("eval", MODEL, *common, "--tp-size", 3))
    assert "does not divide the 4 virtual ranks" in one_sentence(
        invoke("eval", tmp_path / "four", *common, "--tp-size", 8)
    )
    assert "needs --backend runtime" in one_sentence(invoke("eval", MODEL, "--perplexity", ids, "--tp-size", 2))
    indexed = invoke("eval", MODEL, "--perplexity", ids, "--backend", "runtime", "--device", "cuda:1")
    assert indexed.code == 2
    assert "--device cuda:1 is one device" in one_sentence(indexed)
    with pytest.raises((UserError, LayoutError)):
        evaluate([MODEL], EvalOptions(perplexity=str(ids), backend="runtime", tp_size=16))


def test_ranks_of_a_launcher_are_joined(pair, ids, by_hf, tmp_path):
    """Two models one after the other in one group of processes, and lm-eval in each of them. Rank 0 alone writes and
    prints."""
    out = tmp_path / "results.json"
    shared = ("--perplexity", ids, "--seq-len", 33, "--dtype", "float32", "--out", out, "--device", "cpu")
    tasks = ("--tasks", "demo_agreement", "--limit", 9, "--include-path", TASKS)
    command = ["eval", *pair, *shared, *tasks, "--backend", "runtime", "--tp-size", 2, "--json"]
    warm.warm_python().preload("lm_eval.evaluator", "lm_eval.models.huggingface")
    outcome = warm.run_group([sys.executable, "-m", "ladderize", *command])
    assert outcome.returncode == 0, outcome.stderr
    document = json.loads(outcome.stdout)
    assert document == json.loads(out.read_text())
    predictions = document["models"][1]["ladderize"]["predictions"]
    np.testing.assert_allclose(predictions["window_kl"], by_hf.models[1].model.predictions.window_kl, 2e-3, 1e-5)
    for found, expected in zip(document["models"], by_hf.models, strict=True):
        nll = found["ladderize"]["perplexity"]["window_nll"]
        np.testing.assert_allclose(nll, expected.model.perplexity.window_nll, atol=1e-3)
        assert found["results"]["demo_agreement"] == pytest.approx(expected.tasks["demo_agreement"])
