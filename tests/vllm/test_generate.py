"""`ladderize generate --engine vllm` writes the lines that the runtime writes."""

import json

from tests.helpers import fresh_rng, invoke_well
from tests.vllm.engines import ladderize
from tests.vllm.test_eval import WORDS, model_with_tokenizer


def test_lines_are_those_of_the_runtime(tmp_path):
    model, prompts = model_with_tokenizer("mixed", tmp_path / "model"), tmp_path / "prompts.txt"
    rng = fresh_rng()
    prompts.write_text("".join(" ".join(rng.choice(WORDS, int(rng.integers(2, 9)))) + "\n" for _ in range(5)))
    command = ["generate", model, "--prompt-file", prompts, "--max-new-tokens", 8, "--temperature", 0]
    command += ["--dtype", "float32", "--json", "--out"]
    invoke_well(*command, tmp_path / "runtime.jsonl")
    shown = ladderize(*command, tmp_path / "vllm.jsonl", "--engine", "vllm")
    assert json.loads(shown)["samples"] == 5
    runtime, vllm = (
        [json.loads(line) for line in (tmp_path / f"{engine}.jsonl").read_text().splitlines()]
        for engine in ("runtime", "vllm")
    )
    assert [line["prompt"] for line in vllm] == prompts.read_text().splitlines()
    same = sum(one == other for one, other in zip(runtime, vllm, strict=True))
    assert same >= 4  # rounding may turn one
