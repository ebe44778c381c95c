"""``eval`` on two processes, as ``accelerate launch`` starts them (through torchrun's own launcher): the results of one
process."""

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from ladderize import convert_checkpoint
from ladderize.convert.recipe import Recipe
from ladderize.demo.inputs import MODEL, TASKS
from tests.helpers import ROOT, fresh_rng, invoke, listing
from tests.warm import PATIENCE, free_port

ACCELERATE = [
    *(sys.executable, "-m", "accelerate.commands.launch"),
    *("--multi_gpu", "--num_processes", "2", "--num_machines", "1", "--mixed_precision", "no"),
    *("--dynamo_backend", "no", "--main_process_port"),
]


@pytest.fixture(scope="module")
def workplace(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("ranks")
    convert_checkpoint(MODEL, folder / "both", Recipe(ladder="all", spd="3:", sync_tp_size=2), verify=False)
    np.save(folder / "ids.npy", fresh_rng().integers(3, 400, 7 * 30 + 11))
    return folder


def command(folder: Path, out: str) -> list[str]:
    """An odd number of samples and of windows, the last of them short."""
    words = ["eval", MODEL, folder / "both", "--tasks", "demo_agreement,demo_copying", "--include-path", TASKS]
    words += ["--limit", "7", "--perplexity", folder / "ids.npy", "--seq-len", "30", "--dtype", "float32"]
    return [*map(str, words), "--batch-size", "3", "--device", "cpu", "--out", str(folder / out)]


@pytest.fixture(scope="module")
def alone(workplace) -> dict:
    outcome = invoke(*command(workplace, "alone.json"))
    assert outcome.code == 0, outcome.stderr
    return json.loads((workplace / "alone.json").read_text())


def numbers(value: object, path: str = "") -> dict[str, object]:
    """Every leaf of a document by its path."""
    if isinstance(value, dict):
        return {name: leaf for key, item in value.items() for name, leaf in numbers(item, f"{path}/{key}").items()}
    if isinstance(value, list):
        return {name: leaf for i, item in enumerate(value) for name, leaf in numbers(item, f"{path}/{i}").items()}
    return {path: value}


def near(path: str, leaf: object, *, relative: float, absolute: float) -> object:
    """What a leaf must equal; the share of equal first choices may differ by a position where two tokens are all but as
    good."""
    if not isinstance(leaf, float):
        return leaf
    return pytest.approx(leaf, rel=relative, abs=0.007 if path.endswith("same_top_share") else absolute)


def check_same(folder: Path, alone: dict, out: str) -> None:
    together = json.loads((folder / out).read_text())
    assert together["options"] == alone["options"]
    measured = ("results", "n-samples", "n-shot", "configs", "versions", "higher_is_better")
    for one, two in zip(alone["models"], together["models"], strict=True):
        ours, theirs = ({key: entry[key] for key in measured} for entry in (one, two))
        ours["ladderize"], theirs["ladderize"] = one["ladderize"], two["ladderize"]
        expected, found = (
            {path: leaf for path, leaf in numbers(entry).items() if not path.endswith(("tokens_per_s", "dataset"))}
            for entry in (ours, theirs)
        )
        assert found == {path: near(path, leaf, relative=1e-4, absolute=1e-6) for path, leaf in expected.items()}
        for task, path in one["samples"].items():
            lines, others = (
                [json.loads(line) for line in (folder / file).read_text().splitlines()]
                for file in (path, two["samples"][task])
            )
            assert [line["doc_id"] for line in others] == list(range(7))
            answers = {"resps", "filtered_resps"}  # log-likelihoods, which differ in their last digits
            assert [{k: v for k, v in line.items() if k not in answers} for line in others] == [
                {k: v for k, v in line.items() if k not in answers} for line in lines
            ]
    expected, found = numbers(alone["comparisons"]), numbers(together["comparisons"])
    assert found == {path: near(path, leaf, relative=1e-3, absolute=1e-5) for path, leaf in expected.items()}


def test_accelerate_launch(workplace, alone):
    words = [*ACCELERATE, str(free_port()), "-m", "ladderize", *command(workplace, "accelerate.json"), "--json"]
    result = subprocess.run(
        words,
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=PATIENCE,
        env={**os.environ, "GLOO_SOCKET_IFNAME": "lo", "CUDA_VISIBLE_DEVICES": ""},
    )
    assert result.returncode == 0, result.stderr
    assert json.loads(result.stdout) == json.loads((workplace / "accelerate.json").read_text())  # printed once
    assert {"accelerate.json", "accelerate.samples"} <= set(listing(workplace))
    check_same(workplace, alone, "accelerate.json")
