"""``eval`` on several processes, as ``accelerate launch`` starts them (through torchrun's own launcher): the prompts
and the figures of one process."""

import json
import os
import shutil
import subprocess
import sys

import numpy as np
import pytest

from ladderize import convert_checkpoint
from ladderize.convert.recipe import Recipe
from ladderize.demo.command import MODEL, TASKS
from tests.helpers import ROOT, fresh_rng, invoke, listing
from tests.warm import PATIENCE, free_port

ACCELERATE = [
    *(sys.executable, "-m", "accelerate.commands.launch"),
    *("--multi_gpu", "--num_machines", "1", "--mixed_precision", "no", "--dynamo_backend", "no"),
]
GROUP = """group: both
task: [demo_agreement, demo_copying]
aggregate_metric_list:
  - {metric: acc, aggregation: mean, weight_by_size: true}
"""


def metrics(entry: dict) -> dict[str, float]:
    results = entry["results"]
    return {f"{task} {key}": value for task in results for key, value in results[task].items() if "," in key}


@pytest.mark.parametrize(("processes", "questions"), [(2, 7), (3, 2)])
def test_accelerate_launch(tmp_path, processes, questions):
    """A group of few-shot tasks, in shares of unequal size or of none, and an odd number of windows, the last short."""
    tasks = shutil.copytree(TASKS, tmp_path / "tasks")
    (tasks / "both.yaml").write_text(GROUP)
    convert_checkpoint(MODEL, tmp_path / "both", Recipe(ladder="all", spd="3:", sync_tp_size=2), verify=False)
    np.save(tmp_path / "ids.npy", fresh_rng().integers(3, 400, 7 * 30 + 11))
    words = ["eval", MODEL, tmp_path / "both", "--tasks", "both", "--include-path", tasks, "--num-fewshot", "2"]
    words += ["--limit", str(questions), "--perplexity", tmp_path / "ids.npy", "--seq-len", "30", "--dtype", "float32"]
    words += ["--batch-size", "3", "--device", "cpu", "--json", "--out"]
    alone = json.loads(invoke(*words, tmp_path / "alone.json").stdout)
    launcher = [*ACCELERATE, "--num_processes", str(processes), "--main_process_port", str(free_port())]
    command = [*launcher, "-m", "ladderize", *map(str, words), str(tmp_path / "all.json")]
    how = {"env": {**os.environ, "GLOO_SOCKET_IFNAME": "lo", "CUDA_VISIBLE_DEVICES": ""}, "timeout": PATIENCE}
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, **how)
    assert result.returncode == 0, result.stderr
    together = json.loads(result.stdout)
    assert together == json.loads((tmp_path / "all.json").read_text())  # printed once
    assert {"all.json", "all.samples"} <= set(listing(tmp_path))
    for one, two in zip(alone["models"], together["models"], strict=True):
        assert metrics(two) == pytest.approx(metrics(one), rel=1e-4, abs=1e-6, nan_ok=True)
        nll, same = (entry["ladderize"]["perplexity"]["window_nll"] for entry in (one, two))
        assert same == pytest.approx(nll, rel=1e-4)
        for task, path in one["samples"].items():
            lines, others = (
                [json.loads(line) for line in (tmp_path / file).read_text().splitlines()]
                for file in (path, two["samples"][task])
            )
            assert [line["doc_id"] for line in others] == list(range(questions))
            assert [line["arguments"] for line in others] == [line["arguments"] for line in lines]
            assert [line["metrics"] for line in others] == [line["metrics"] for line in lines]
    ours, theirs = (document["models"][1]["ladderize"]["predictions"] for document in (alone, together))
    assert theirs["mean_kl"] == pytest.approx(ours["mean_kl"], rel=1e-3)
    for ours, theirs in zip(alone["comparisons"], together["comparisons"], strict=True):
        assert [one["right_to_wrong"] for one in theirs["tasks"]] == [one["right_to_wrong"] for one in ours["tasks"]]
