"""bench --engine vllm: real engines, timed; whose class runs; refusals that only vLLM knows."""

import json
import os
import subprocess
import sys
from pathlib import Path

import torch

from tests.helpers import ROOT
from tests.vllm.models import SHAPE
from tests.warm import PATIENCE

SMALL = {key: SHAPE[key] for key in SHAPE if key != "attention_bias"} | {"model_type": "llama", "num_hidden_layers": 2}


def bench(folder: Path, *arguments: object, **variables: str) -> subprocess.CompletedProcess[str]:
    """In a process of its own, as a user runs it."""
    shape = folder / "config.json"
    shape.write_text(json.dumps(SMALL))
    command = [sys.executable, "-m", "ladderize", "bench", "--engine", "vllm", "--random-weights", shape, *arguments]
    return subprocess.run(
        [str(part) for part in [*command, "--prompt-len", 9, "--output-len", 5, "--warmup", 1]],
        cwd=ROOT,
        env=os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)} | variables,
        capture_output=True,
        text=True,
        timeout=PATIENCE,
    )


def test_one_rank_from_the_command_to_the_file(tmp_path):
    """Stock and plugin, two batch sizes."""
    out = tmp_path / "bench.json"
    given = ("--layout", "dense,spd+ladder", "--sync-tp-size", 2, "--baselines", "plugin", "--batch-size", "1,3")
    done = bench(tmp_path, *given, "--repeat", 2, "--threads", 1, "--out", out, "--json")
    assert done.returncode == 0, done.stderr
    document = json.loads(out.read_text())
    assert json.loads(done.stdout) == document
    assert (document["engine"], document["complete"], document["messages"]) == ("vllm", True, "single")
    rows = [(row["model"], row["architecture"], row["batch_size"]) for row in document["rows"]]
    stock, ours = "LlamaForCausalLM", "LadderizedLlamaForCausalLM"
    names = [("dense", stock), ("plugin's dense", ours), ("spd+ladder", ours)]
    assert rows == [(*name, batch) for batch in (1, 3) for name in names]
    for row in document["rows"]:
        assert all(len(samples) == 2 and min(samples) > 0 for samples in row["samples_ms"].values())
    assert document["environment"]["settings"]["OMP_NUM_THREADS"] == "1"


def test_two_ranks_over_gloo_show_the_overlap(tmp_path):
    """Two layouts in one process: each sends its own number of messages, the last of which nothing hides."""
    out, traces = tmp_path / "bench.json", tmp_path / "traces"
    given = ("--layout", "ladder,spd+ladder", "--tp-size", 2, "--batch-size", 2, "--repeat", 1)
    done = bench(tmp_path, *given, "--profile", traces, "--out", out, LADDERIZE_VLLM_BACKEND="gloo")
    assert done.returncode == 0, done.stderr
    document = json.loads(out.read_text())
    # vLLM's kernels for processors without AVX512 have no sums over shared memory
    own = "vLLM's shared memory" if torch.cpu._is_avx512_supported() else "gloo over lo"
    assert (document["backend"], document["messages"]) == (own, "gloo")
    for row in document["rows"]:
        assert all(row["overlap"][phase]["in_flight_ms"] > 0 for phase in ("prefill", "decode"))
    layers, passes = SMALL["num_hidden_layers"], 5
    for rank in (0, 1):
        for name, messages in (("0-ladder", 2 * layers), ("1-spd+ladder", layers)):
            events = json.loads((traces / f"{name}-batch2-rank{rank}.json").read_text())["traceEvents"]
            assert sum(event.get("name") == "ladderize::start" for event in events) == passes * messages


def test_vllms_worker_of_cpus_is_imported_by_nobody_but_vllm():
    """Its module replaces torch.cuda's Event, Stream and more for the whole process."""
    script = (
        "import sys, torch\nevent = torch.cuda.Event\nimport ladderize.vllm.bench_engine\n"
        "assert torch.cuda.Event is event\nassert 'vllm.v1.worker.cpu_worker' not in sys.modules"
    )
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run([sys.executable, "-c", script], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_the_name_of_vllms_fusion_is_the_installed_one():
    from vllm.config.compilation import PassConfig

    from ladderize.vllm.bench_engine import NORM_FUSION

    assert hasattr(PassConfig(), NORM_FUSION)


def test_what_the_plugin_refuses_is_one_sentence(tmp_path):
    arguments = ("--layout", "dense,ladder", "--batch-size", 1, "--repeat", 1)
    done = bench(tmp_path, *arguments, LADDERIZE_VLLM_BACKEND="smoke")
    assert done.returncode == 1
    (line,) = [line for line in done.stderr.splitlines() if line.startswith("Error")]
    assert "LADDERIZE_VLLM_BACKEND=smoke is not one" in line
