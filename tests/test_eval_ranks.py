"""``eval`` on two processes, as ``accelerate launch`` starts them (through torchrun's own launcher): the results of one
process."""

import json
import os
import subprocess
import sys

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


def metrics(entry: dict) -> dict[str, float]:
    """The numbers of all tasks."""
    results = entry["results"]
    return {f"{task} {key}": value for task in results for key, value in results[task].items() if "," in key}


def test_accelerate_launch(tmp_path):
    """An odd number of samples and of windows, the last of them short."""
    convert_checkpoint(MODEL, tmp_path / "both", Recipe(ladder="all", spd="3:", sync_tp_size=2), verify=False)
    np.save(tmp_path / "ids.npy", fresh_rng().integers(3, 400, 7 * 30 + 11))
    words = ["eval", MODEL, tmp_path / "both", "--tasks", "demo_agreement,demo_copying", "--include-path", TASKS]
    words += ["--limit", "7", "--perplexity", tmp_path / "ids.npy", "--seq-len", "30", "--dtype", "float32"]
    words += ["--batch-size", "3", "--device", "cpu", "--json", "--out"]
    alone = json.loads(invoke(*words, tmp_path / "alone.json").stdout)
    command = [*ACCELERATE, str(free_port()), "-m", "ladderize", *map(str, words), str(tmp_path / "two.json")]
    how = {"env": {**os.environ, "GLOO_SOCKET_IFNAME": "lo", "CUDA_VISIBLE_DEVICES": ""}, "timeout": PATIENCE}
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, **how)
    assert result.returncode == 0, result.stderr
    together = json.loads(result.stdout)
    assert together == json.loads((tmp_path / "two.json").read_text())  # printed once
    assert {"two.json", "two.samples"} <= set(listing(tmp_path))
    for one, two in zip(alone["models"], together["models"], strict=True):
        assert metrics(two) == pytest.approx(metrics(one), rel=1e-4, abs=1e-6, nan_ok=True)
        nll, same = (entry["ladderize"]["perplexity"]["window_nll"] for entry in (one, two))
        assert same == pytest.approx(nll, rel=1e-4)
        for task, path in one["samples"].items():
            lines, others = (
                [json.loads(line) for line in (tmp_path / file).read_text().splitlines()]
                for file in (path, two["samples"][task])
            )
            assert [line["doc_id"] for line in others] == list(range(7))
            assert [line["prompt_hash"] for line in others] == [line["prompt_hash"] for line in lines]
    ours, theirs = (document["models"][1]["ladderize"]["predictions"] for document in (alone, together))
    assert theirs["mean_kl"] == pytest.approx(ours["mean_kl"], rel=1e-3)
    for ours, theirs in zip(alone["comparisons"], together["comparisons"], strict=True):
        assert [one["right_to_wrong"] for one in theirs["tasks"]] == [one["right_to_wrong"] for one in ours["tasks"]]
