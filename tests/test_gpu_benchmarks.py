"""The parts of benchmarks/gpu.sh as they run on a GPU, on a CPU in a tiny shape."""

import argparse
import importlib
import json
import os
import re
import runpy
import shlex
import subprocess
import sys

import pytest
import torch

from ladderize.runtime import layers
from ladderize.runtime.collectives import emulated
from tests.helpers import ROOT
from tests.simulated_gpu.device import SimulatedGpu
from tests.simulated_gpu.groups import seed
from tests.test_docs import parse
from tests.warm import PATIENCE

SCRIPT = ROOT / "benchmarks" / "gpu.sh"
PARTS = re.findall(r"^  (\w+)\)", SCRIPT.read_text(), re.MULTILINE)

TINY = {
    "model_type": "llama", "vocab_size": 512, "hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 8,
    "num_key_value_heads": 8, "num_hidden_layers": 2, "head_dim": 8, "max_position_embeddings": 256,
    "rms_norm_eps": 1e-5, "tie_word_embeddings": False,
}  # fmt: skip
COMMANDS = {
    "gpu_spd.py": ["--shape", "{shape}", "--tokens", 64, "--windows", 4, "--layers", 2],
    "gpu_adapt.py": ["--shape", "tiny", "--seq-len", 64, "--layers", 2, "--steps", 1],
    "gpu_domino.py": ["--shapes", "{shape}", "--tokens", 16, "--layers", 1],
    "gpu_kernels.py rates table forks gemv pdl": [
        *(
            "--shard",
            "{shape}",
            "--prompt-len",
            8,
            "--steps",
            1,
            "--rounds",
            2,
            "--rows",
            "1,3",
            "--batch-sizes",
            "1,2",
        ),
    ],
    "gpu_runtime.py whole": ["--model", "{shape}", "--prompt-len", 8, "--output-len", 4],
    "gpu_runtime.py shard": ["--shard", "{shape}", "--prompt-len", 8, "--output-len", 4, "--batch-sizes", 1],
}


@pytest.mark.parametrize("script", COMMANDS)
def test_a_part_ends_well_and_keeps_what_it_measured(tmp_path, script):
    shape, out = tmp_path / "tiny.json", tmp_path / "out.json"
    shape.write_text(json.dumps(TINY))
    name, *part = script.split()
    options = [str(one).format(shape=shape) for one in COMMANDS[script]]
    command = [sys.executable, ROOT / "benchmarks" / name, *part, *options, "--device", "cpu", "--out", out]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=PATIENCE)
    assert result.returncode == 0, result.stderr
    assert json.loads(out.read_text())["environment"]


def test_kernels_are_all_in_the_record(tmp_path, monkeypatch):
    """On a CPU the record says that nothing was a graph, and holds what each line is made of. PyTorch's profiler sees
    no products of our own."""
    monkeypatch.setattr(layers, "kernels", lambda: "left out")
    out, shape = tmp_path / "out.json", tmp_path / "tiny.json"
    shape.write_text(json.dumps(TINY))
    options = ["--shard", shape, "--prompt-len", 8, "--rounds", 3, "--batch-sizes", 1, "--device", "cpu", "--out", out]
    run_script(monkeypatch, "gpu_kernels.py", "table", *options)
    record = json.loads(out.read_text())
    assert record["graph"] is False
    assert all("no graph" in line for line in record["summary"])
    for name in ("dense", "ladder"):
        figures = record["table"][f"{name}_batch_1"]
        assert len(figures["step_samples_us"]) == 3
        assert sum(row["count"] for row in figures["kernels"]) == figures["count"]
        products = [row for row in figures["kernels"] if "linear" in row["name"]]
        assert sum(row["count"] for row in products) == 4 * TINY["num_hidden_layers"] + 1


def run_script(monkeypatch, name, *options):
    """Run a script in this process; its exit code must be 0."""
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    monkeypatch.setattr(sys, "argv", [name, *map(str, options)])
    with pytest.raises(SystemExit) as ended:
        runpy.run_path(str(ROOT / "benchmarks" / name), run_name="__main__")
    assert not ended.value.code


def test_forks_are_joined(tmp_path, monkeypatch):
    """On the simulated GPU, which refuses a stream that a capture leaves open. A sum that blocks forks nothing."""
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    kernels = importlib.import_module("gpu_kernels")
    shape = tmp_path / "tiny.json"
    shape.write_text(json.dumps(TINY))
    sizes = {"shard": str(shape), "ranks": 8, "prompt_len": 8, "batch_sizes": (1,)}
    options = {"device": torch.device("cuda"), "delays_us": (0,), "steps": 1, "rounds": 1}
    with SimulatedGpu(seed()) as gpu, torch.inference_mode():
        monkeypatch.setattr(kernels, "fat_idle", emulated.idle_on_gpu())
        record, _ = kernels.forks(argparse.Namespace(**sizes, **options))
        forked = {}
        for name in ("dense", "ladder"):
            shard, link = kernels.Shard(argparse.Namespace(**sizes, **options)), kernels.Link("0 us", 0.0, None)
            sums = kernels.EmulatedOnGpu(8, link, options["device"])
            gpu.log.clear()
            shard.step(name, sums, 1)
            idled = [entry[1] for entry in gpu.log if entry[0] == "run" and entry[2] == "ladderize_spin_kernel"]
            forked[name] = idled.count(sums.stream.name) / len(idled)
    assert len(record["rows"]) == 2 * 5
    layers = TINY["num_hidden_layers"]
    assert forked == {"dense": 0, "ladder": (2 * layers - 1) / (2 * layers)}


# ---- gpu.sh ----


class Parsed(Exception):
    """A script has read its options, and would start to work."""


def commands_of(name):
    """Return the commands of a part, each as its words, and a test's limit of seconds for all."""
    run = subprocess.run(["bash", SCRIPT, "--dry-run", name], capture_output=True, text=True, timeout=PATIENCE)
    assert run.returncode == 0, run.stderr
    lines = [shlex.split(line) for line in run.stdout.splitlines()]
    assert sum(int(seconds) for seconds, *_ in lines) <= 480
    return [words for _, *words in lines]


def test_parts_come_in_the_order_of_their_value():
    assert PARTS[:5] == ["kernels", "tests", "shard", "runtime", "profile"]
    listed = re.findall(r"^#   (\w+)  ", SCRIPT.read_text(), re.MULTILINE)
    assert listed == PARTS


@pytest.mark.parametrize("name", PARTS)
def test_a_part_gives_options_that_exist(name, monkeypatch):
    commands = commands_of(name)
    assert commands
    for command in commands:
        assert command[0] == "python3"
        if command[1:3] == ["-m", "ladderize"]:
            parse(command[3:])
        elif command[1:3] == ["-m", "pytest"]:
            only_here = [sys.executable, "-m", "pytest", "--collect-only", *command[3:]]
            collected = subprocess.run(only_here, cwd=ROOT, capture_output=True, text=True, timeout=PATIENCE)
            assert collected.returncode == 0, collected.stdout  # 5: no test is selected
        else:
            assert_parses(ROOT / command[1], command[2:], monkeypatch)


def assert_parses(script, options, monkeypatch):
    """Run a script up to its options."""
    original = argparse.ArgumentParser.parse_args

    def parse_args(parser, *arguments):
        original(parser, options)
        raise Parsed

    with monkeypatch.context() as patch:
        patch.syspath_prepend(script.parent)
        patch.setattr(argparse.ArgumentParser, "parse_args", parse_args)
        with pytest.raises(Parsed):
            runpy.run_path(str(script), run_name="__main__")


def test_a_wrong_option_is_seen(monkeypatch):
    with pytest.raises(SystemExit):
        assert_parses(ROOT / "benchmarks/gpu_runtime.py", ["half"], monkeypatch)


@pytest.mark.parametrize(("name", "code"), [("vllm", 3), ("ranks", 3), ("kernels", 3), ("no-such-part", 2)])
def test_a_part_that_cannot_run_here_says_so(name, code):
    """Without a GPU and without vLLM."""
    if torch.cuda.is_available() or importlib.util.find_spec("vllm"):
        pytest.skip("it can")
    path = os.pathsep.join([os.path.dirname(sys.executable), os.environ["PATH"]])
    run = subprocess.run(["bash", SCRIPT, name], capture_output=True, text=True, env={**os.environ, "PATH": path})
    assert run.returncode == code, run.stderr
    assert {"vllm": "vLLM is not installed", "ranks": "fewer than two GPUs"}.get(name, "") in run.stdout
