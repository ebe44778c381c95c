"""The runtime and vLLM on the same cores: the same checkpoint, prompts of the same length, both by `ladderize bench`.

    make .venv-vllm/.installed && python benchmarks/against_vllm.py [--prompt-len 1024] [--shape SHAPE.json]
        [--out benchmarks/results/against_vllm_1024.json]

A bfloat16 Llama of 197M parameters (benchmarks/shapes/200m.json) or another shape, two ranks. The two engines want
different versions of their packages, so each round is one run of either environment, one after the other; ratios are
taken within a round. First both decode the same prompts greedily, in float32, and their tokens must be equal. Run it
on a machine that does nothing else.
"""

import argparse
import json
import os
import platform
import statistics
import subprocess
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
SHAPE = ROOT / "benchmarks" / "shapes" / "200m.json"
PYTHONS = {"ladderize": ROOT / ".venv" / "bin" / "python", "vllm": ROOT / ".venv-vllm" / "bin" / "python"}
PHASES = ("prefill", "decode")
MAKE = "import sys; sys.path.insert(0, sys.argv[1]); from pathlib import Path; "
MAKE += "from decode_cpu import make_model; make_model('model', Path(sys.argv[2]))"
# one rank each: a split changes tokens by rounding alone
TOKENS = {
    "ladderize": """
import json, sys, torch
from ladderize.ranks.group import Ranks
from ladderize.runtime.collectives.base import Collectives
from ladderize.runtime.decode import generate_tokens
from ladderize.runtime.sampling import Sampling
from ladderize.runtime.spec import WeightCache, checkpoint_spec, open_generator
group, prompts, new = Ranks(0, 1, torch.device("cpu")), json.loads(sys.argv[2]), int(sys.argv[3])
spec = checkpoint_spec(sys.argv[1], tp_size=1, dtype="float32")
weights = WeightCache(group.device, pack=True)
generator = open_generator(spec, Collectives(), weights, group, len(prompts), len(prompts[0]) + new)
with torch.inference_mode():
    chunks = list(generate_tokens(generator, prompts, max_new_tokens=new, sampling=Sampling()))
print("TOKENS", json.dumps([[token for chunk in row for token in chunk] for row in zip(*chunks)]))
""",
    "vllm": """
import json, sys
from vllm import LLM, SamplingParams
if __name__ == "__main__":
    prompts, new = json.loads(sys.argv[2]), int(sys.argv[3])
    engine = LLM(sys.argv[1], skip_tokenizer_init=True, enforce_eager=True, max_model_len=1024, dtype="float32")
    asked = [{"prompt_token_ids": prompt} for prompt in prompts]
    options = SamplingParams(temperature=0, max_tokens=new, ignore_eos=True, detokenize=False)
    print("TOKENS", json.dumps([list(answer.outputs[0].token_ids) for answer in engine.generate(asked, options)]))
""",
}


def run(engine: str, words: list[str], work: Path) -> str:
    """What a process of this environment printed."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1", "VLLM_CPU_KVCACHE_SPACE": "1"}
    done = subprocess.run([str(PYTHONS[engine]), *words], cwd=work, env=environment, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"{engine} ended with exit code {done.returncode}:\n{done.stdout}\n{done.stderr}")
    return done.stdout


def tokens(engine: str, prompts: list[list[int]], new: int, work: Path) -> list[list[int]]:
    script = work / f"{engine}_tokens.py"
    script.write_text(TOKENS[engine])
    printed = run(engine, [str(script), "model", json.dumps(prompts), str(new)], work)
    (line,) = (line for line in printed.splitlines() if line.startswith("TOKENS "))
    found: list[list[int]] = json.loads(line.removeprefix("TOKENS "))
    return found


def bench(engine: str, args: argparse.Namespace, number: int, work: Path) -> dict:
    out = work / f"{engine}-{number}.json"
    words = ["-m", "ladderize", "bench", "model", "--tp-size", "2", "--batch-size", args.batch_size]
    words += ["--prompt-len", str(args.prompt_len), "--output-len", str(args.output_len)]
    words += ["--warmup", str(args.warmup), "--repeat", str(args.repeat), "--out", str(out)]
    run(engine, [*words, *(["--engine", "vllm"] if engine == "vllm" else [])], work)
    return json.loads(out.read_text())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--repeat", type=int, default=5, help="samples of a round")
    parser.add_argument("--warmup", type=int, default=2)
    parser.add_argument("--batch-size", default="1,8")
    parser.add_argument("--shape", type=Path, default=SHAPE)
    parser.add_argument("--prompt-len", type=int, default=128)
    parser.add_argument("--output-len", type=int, default=64)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    if missing := [str(python) for python in PYTHONS.values() if not python.exists()]:
        raise SystemExit(f"{', '.join(missing)} is missing: make .venv/.installed .venv-vllm/.installed")
    with tempfile.TemporaryDirectory() as folder:
        work = Path(folder)
        run("ladderize", ["-c", MAKE, str(SHAPE.parent.parent), str(args.shape.resolve())], work)
        prompts = [[3 + (7919 * row + 31 * place * (row + 1)) % 8000 for place in range(64)] for row in range(4)]
        made = {engine: tokens(engine, prompts, 32, work) for engine in PYTHONS}
        if made["ladderize"] != made["vllm"]:
            raise SystemExit(f"greedy tokens differ: {made}")
        print("32 greedy tokens of 4 prompts are equal", flush=True)
        documents: dict[str, list[dict]] = {engine: [] for engine in PYTHONS}
        for number in range(args.rounds):
            # the one that is first in a round finds the machine otherwise than the second
            for engine in list(PYTHONS)[:: 1 if number % 2 == 0 else -1]:
                documents[engine].append(bench(engine, args, number, work))
                print(f"round {number + 1}: {engine} done", flush=True)
    print(f"\n{'':22}{'ladderize ms':>14}{'vLLM ms':>10}{'ratio':>8}   ratios of the rounds")
    table = []
    for phase in PHASES:
        for batch in map(int, args.batch_size.split(",")):
            medians = {
                engine: [statistics.median(samples(document, phase, batch)) for document in of_engine]
                for engine, of_engine in documents.items()
            }
            ratios = [ours / theirs for ours, theirs in zip(*medians.values(), strict=True)]
            ours, theirs = (statistics.median(values) for values in medians.values())
            table.append({"phase": phase, "batch_size": batch, "medians_ms": medians, "ratios": ratios})
            shown = " ".join(f"{ratio:.3f}" for ratio in ratios)
            print(
                f"{phase + f', batch {batch}':22}{ours:14.2f}{theirs:10.2f}{statistics.median(ratios):8.3f}   {shown}"
            )
    if args.out:
        record = {
            "schema_version": 1,
            "processor": platform.processor() or platform.machine(),
            "shape": json.loads(args.shape.read_text()),
            "options": {key: str(value) for key, value in vars(args).items() if key != "out"},
            "greedy_tokens": made["vllm"],
            "table": table,
            "documents": documents,
        }
        args.out.write_text(json.dumps(record, indent=1) + "\n")


def samples(document: dict, phase: str, batch: int) -> list[float]:
    """Milliseconds of a phase in one run: each sample of its one model."""
    (row,) = (row for row in document["rows"] if row["batch_size"] == batch)
    found: list[float] = row["samples_ms"][phase]
    return found


if __name__ == "__main__":
    main()
