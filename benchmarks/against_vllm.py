"""The runtime and vLLM on the same cores: the same checkpoint, prompts of the same length, both by `ladderize bench`.

    make .venv-vllm/.installed && python benchmarks/against_vllm.py [--prompt-len 1024] [--shape SHAPE.json]
        [--out benchmarks/results/against_vllm_1024.json]

A bfloat16 Llama of 197M parameters (benchmarks/shapes/200m.json) or another shape, two ranks. The two engines want
different versions of their packages, so each runs in an environment of its own. They take turns, a sample each, and
the one that waits sleeps (in_turn.py): a machine whose speed changes within minutes is as fast for both samples of a
pair. First both decode the same prompts greedily, in float32, and their tokens must be equal. Run it on a machine that
does nothing else.
"""

import argparse
import json
import os
import select
import subprocess
import tempfile
from multiprocessing.connection import Connection, Listener
from pathlib import Path

import numpy as np

ROOT = Path(__file__).resolve().parent.parent
SHAPE = ROOT / "benchmarks" / "shapes" / "200m.json"
PYTHONS = {"ladderize": ROOT / ".venv" / "bin" / "python", "vllm": ROOT / ".venv-vllm" / "bin" / "python"}
ENGINES = {"ladderize": "runtime", "vllm": "vllm"}
IN_TURN = ROOT / "benchmarks" / "in_turn.py"
SAME_HEAP = "AGAINST_VLLM_SAME_HEAP"  # for in_turn.py
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


def environment() -> dict[str, str]:
    places = f"{ROOT}:{ROOT / 'benchmarks'}"
    return {**os.environ, "PYTHONPATH": places, "HF_HUB_OFFLINE": "1", "VLLM_CPU_KVCACHE_SPACE": "1"}


def run(engine: str, words: list[str], work: Path) -> str:
    """What a process of this environment printed."""
    done = subprocess.run([str(PYTHONS[engine]), *words], cwd=work, env=environment(), capture_output=True, text=True)
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


def start(engine: str, options: dict, address: str, work: Path) -> subprocess.Popen:
    out = str(work / f"{engine}.json")
    words = [str(IN_TURN), address, engine, "model", json.dumps({**options, "engine": ENGINES[engine], "out": out})]
    with open(work / f"{engine}.log", "w") as log:
        return subprocess.Popen([str(PYTHONS[engine]), *words], cwd=work, env=environment(), stdout=log, stderr=log)


def alternate(options: dict, work: Path) -> dict[str, dict]:
    """Let both engines measure, in turn a sample each. Return their documents."""
    address = str(work / "turns")
    with Listener(address) as listener:
        processes = {engine: start(engine, options, address, work) for engine in PYTHONS}
        try:
            turns = {}
            for _ in processes:
                connection = accept(listener, processes, work)
                turns[connection.recv()] = connection
            order = list(PYTHONS)
            while all(is_ready(turns[engine]) for engine in order):
                for engine in order:
                    turns[engine].send("go")
                    turns[engine].poll(None)  # it is done when it asks again, or ends
                order.reverse()  # the first one finds the machine otherwise than the second
            for engine, process in processes.items():
                if process.wait():
                    raise failed(engine, work)
        finally:
            for process in processes.values():
                process.terminate()
    return {engine: json.loads((work / f"{engine}.json").read_text()) for engine in PYTHONS}


def accept(listener: Listener, processes: dict[str, subprocess.Popen], work: Path) -> Connection:
    """Wait for an engine's rank 0, and raise if any engine ends instead."""
    waiting = listener._listener._socket  # the module tells of no end of waiting
    while not select.select([waiting], [], [], 1.0)[0]:
        for engine, process in processes.items():
            if process.poll() is not None:
                raise failed(engine, work)
    return listener.accept()


def is_ready(turn: Connection) -> bool:
    """Wait until an engine asks for a turn. False: it has ended."""
    try:
        return turn.recv() == "ready"
    except EOFError:
        return False


def failed(engine: str, work: Path) -> SystemExit:
    return SystemExit(f"{engine} failed:\n{(work / f'{engine}.log').read_text()}")


def sizes(text: str) -> list[int]:
    return [int(size) for size in text.split(",")]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--pairs", type=int, default=15, help="samples of either engine")
    parser.add_argument("--warmup", type=int, default=2)
    parser.add_argument("--batch-size", default="1,8", type=sizes)
    parser.add_argument("--shape", type=Path, default=SHAPE)
    parser.add_argument("--prompt-len", type=int, default=128)
    parser.add_argument("--output-len", type=int, default=64)
    parser.add_argument("--same-heap", action="store_true", help="vLLM, too, takes huge pages and keeps freed memory")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    if missing := [str(path) for path in (*PYTHONS.values(), args.shape) if not path.exists()]:
        raise SystemExit(f"{', '.join(missing)} is missing; environments: make .venv/.installed .venv-vllm/.installed")
    if args.same_heap:
        os.environ[SAME_HEAP] = "1"
    options = {"tp_size": 2, "batch_sizes": args.batch_size, "warmup": args.warmup, "repeat": args.pairs}
    options |= {"prompt_len": args.prompt_len, "output_len": args.output_len}
    with tempfile.TemporaryDirectory() as folder:
        work = Path(folder)
        run("ladderize", ["-c", MAKE, str(ROOT / "benchmarks"), str(args.shape.resolve())], work)
        prompts = [[3 + (7919 * row + 31 * place * (row + 1)) % 8000 for place in range(64)] for row in range(4)]
        made = {engine: tokens(engine, prompts, 32, work) for engine in PYTHONS}
        if made["ladderize"] != made["vllm"]:
            raise SystemExit(f"greedy tokens differ: {made}")
        print("32 greedy tokens of 4 prompts are equal", flush=True)
        documents = alternate(options, work)
    print(f"{'':18}{'ladderize ms':>14}{'vLLM ms':>10}{'ratio':>8}   95 % interval   of the fastest")
    table = [row_of(documents, phase, batch) for phase in PHASES for batch in args.batch_size]
    for row in table:
        ours, theirs = row["median_ms"].values()
        low, high = row["interval"]
        print(
            f"{row['phase'] + ', batch ' + str(row['batch_size']):18}{ours:14.2f}{theirs:10.2f}{row['ratio']:8.3f}"
            f"   {low:.3f} to {high:.3f}  {row['fastest']:.3f}"
        )
    if args.out:
        record = {
            "schema_version": 2,
            "shape": json.loads(args.shape.read_text()),
            "options": {key: str(value) for key, value in vars(args).items() if key != "out"},
            "greedy_tokens": made["vllm"],
            "table": table,
            "documents": documents,
        }
        args.out.write_text(json.dumps(record, indent=1) + "\n")


def row_of(documents: dict[str, dict], phase: str, batch: int) -> dict:
    """Compare the engines: medians, the median of the pairs' ratios with its interval (from resampled pairs), and the
    ratio of the fastest samples."""
    ours, theirs = (np.array(samples(documents[engine], phase, batch)) for engine in PYTHONS)
    ratios = ours / theirs
    drawn = np.random.default_rng(0).choice(ratios, (2000, len(ratios)))
    return {
        "phase": phase,
        "batch_size": batch,
        "median_ms": {"ladderize": float(np.median(ours)), "vllm": float(np.median(theirs))},
        "ratio": float(np.median(ratios)),
        "interval": np.percentile(np.median(drawn, axis=1), (2.5, 97.5)).tolist(),
        "fastest": float(ours.min() / theirs.min()),
        "ratios": ratios.tolist(),
    }


def samples(document: dict, phase: str, batch: int) -> list[float]:
    """Milliseconds of a phase in one run: each sample of its one model."""
    (row,) = (row for row in document["rows"] if row["batch_size"] == batch)
    found: list[float] = row["samples_ms"][phase]
    return found


if __name__ == "__main__":
    main()
