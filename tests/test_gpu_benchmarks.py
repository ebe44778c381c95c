"""The parts of benchmarks/gpu.sh as they run on a GPU, on a CPU in a tiny shape."""

import json
import subprocess
import sys

import pytest

from tests.helpers import ROOT
from tests.warm import PATIENCE

TINY = {
    "model_type": "llama", "vocab_size": 512, "hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 8,
    "num_key_value_heads": 8, "num_hidden_layers": 2, "head_dim": 8, "max_position_embeddings": 256,
    "rms_norm_eps": 1e-5, "tie_word_embeddings": False,
}  # fmt: skip
COMMANDS = {
    "gpu_spd.py": ["--shape", "{shape}", "--tokens", 64, "--windows", 4, "--layers", 2],
    "gpu_adapt.py": ["--shape", "tiny", "--seq-len", 64, "--layers", 2, "--steps", 1],
    "gpu_domino.py": ["--shapes", "{shape}", "--tokens", 16, "--layers", 1],
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
