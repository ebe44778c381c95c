"""`ladderize generate --engine vllm` writes the lines that the runtime writes."""

import json
import subprocess
import sys

from tests.helpers import ROOT, fresh_rng, invoke_well
from tests.vllm.test_eval import WORDS, model_with_tokenizer
from tests.warm import PATIENCE


def test_lines_are_those_of_the_runtime(tmp_path):
    model, prompts = model_with_tokenizer("mixed", tmp_path / "model"), tmp_path / "prompts.txt"
    rng = fresh_rng()
    prompts.write_text("".join(" ".join(rng.choice(WORDS, int(rng.integers(2, 9)))) + "\n" for _ in range(5)))
    command = ["generate", model, "--prompt-file", prompts, "--max-new-tokens", 8, "--temperature", 0]
    command += ["--dtype", "float32", "--json", "--out"]
    invoke_well(*command, tmp_path / "runtime.jsonl")
    words = [*command, tmp_path / "vllm.jsonl", "--engine", "vllm"]
    result = subprocess.run(
        [sys.executable, "-m", "ladderize", *map(str, words)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=PATIENCE,
    )
    assert result.returncode == 0, result.stderr
    assert json.loads(result.stdout)["samples"] == 5
    runtime, vllm = (
        [json.loads(line) for line in (tmp_path / f"{engine}.jsonl").read_text().splitlines()]
        for engine in ("runtime", "vllm")
    )
    assert [line["prompt"] for line in vllm] == prompts.read_text().splitlines()
    same = sum(one == other for one, other in zip(runtime, vllm, strict=True))
    assert same >= 4  # rounding may turn one
