"""lm-eval's requests on its HF backend and on ladderize's runtime, on this CPU: the same model, requests and answers.

Random weights of a realistic shape in float32 (8 layers, hidden 1024, 32,000 tokens), dense and with Ladder layers. The
HF backend has both cores in one process, the runtime one core for each of two ranks (TP2), or both in one process
(TP1). Five kinds of requests: multiple choice with answers of several tokens, the same with few-shot examples and
answers of one token, texts scored as a whole, and generation with and without texts that end early. Interleaved: every
round runs each backend once on each kind. Prints medians and writes benchmarks/results/eval_runtime.json with every
time. A round whose answers differ is an error.

    .venv/bin/python benchmarks/eval_runtime.py [--rounds N]
"""

import argparse
import json
import os
import platform
import shutil
import statistics
import tempfile
import time
from pathlib import Path

import numpy as np
import torch
from lm_eval.api.instance import Instance
from lm_eval.models.huggingface import HFLM
from transformers import LlamaConfig, LlamaForCausalLM

from ladderize import convert_checkpoint, load
from ladderize.convert.recipe import Recipe
from ladderize.demo.inputs import MODEL
from ladderize.eval.backends.runtime_lm import RuntimeLM
from ladderize.modeling import load_tokenizer

RESULTS = Path(__file__).parent / "results" / "eval_runtime.json"
SHAPE = {
    "vocab_size": 32000,
    "hidden_size": 1024,
    "intermediate_size": 2816,
    "num_hidden_layers": 8,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "max_position_embeddings": 1024,
    "bos_token_id": 0,
    "eos_token_id": 1,
}
WORDS = "the cat cats sees see a dog and on one two plus is many green big it 3 7 end".split()  # noqa: SIM905
KNOWN_IDS = 527  # of the demo's tokenizer: what is generated has to be text
ROWS = 8


def save_models(folder: Path) -> dict[str, Path]:
    """A dense model, and the same with all layers overlapped."""
    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(**SHAPE))
    with torch.no_grad():
        model.lm_head.weight[KNOWN_IDS:] = 0
        model.lm_head.weight[:2] = 0
    model.save_pretrained(folder / "dense")
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(MODEL / name, folder / "dense")
    convert_checkpoint(folder / "dense", folder / "ladder", Recipe(ladder="all"), verify=False)
    return {"dense": folder / "dense", "ladder": folder / "ladder"}


def instances(kind: str, arguments: list[tuple]) -> list[Instance]:
    return [Instance(kind, {}, given, number) for number, given in enumerate(arguments)]


def workloads(rng: np.random.Generator, size: float) -> dict[str, list[Instance]]:
    def text(least: int, most: int) -> str:
        return " ".join(rng.choice(WORDS, rng.integers(least, most)))

    questions = [text(60, 100) for _ in range(round(10 * size))]
    examples = text(220, 221)
    contexts = [text(20, 90) for _ in range(round(20 * size))]
    return {
        "multiple choice": instances("loglikelihood", [(q, " " + text(5, 15)) for q in questions for _ in range(4)]),
        "few-shot, one-token answers": instances(
            "loglikelihood",
            [
                (f"{examples} {text(20, 30)}", f" {word}")
                for _ in range(round(8 * size))
                for word in ("the", "cat", "dog", "a")
            ],
        ),
        "whole texts": instances("loglikelihood_rolling", [(text(80, 250),) for _ in range(round(8 * size))]),
        "generation that ends early": instances(
            "generate_until", [(context, {"until": ["o", "u"], "max_gen_toks": 32}) for context in contexts]
        ),
        "generation of 32 tokens": instances(
            "generate_until", [(context, {"until": [], "max_gen_toks": 32}) for context in contexts]
        ),
    }


def answer(lm: HFLM, requests: list[Instance]) -> tuple[float, list]:
    kind = requests[0].request_type
    torch.set_num_threads(2)  # of this process; the ranks have their own
    begin = time.perf_counter()
    answers = getattr(lm, kind)(requests, disable_tqdm=True)
    return time.perf_counter() - begin, answers


def worst_difference(ours: list, theirs: list) -> float:
    """Largest difference of log-likelihoods in nats; of texts, the share that differs."""
    if isinstance(ours[0], str):
        return sum(a != b for a, b in zip(ours, theirs, strict=True)) / len(ours)
    first = [a[0] if isinstance(a, tuple) else a for a in ours]
    second = [b[0] if isinstance(b, tuple) else b for b in theirs]
    return float(np.abs(np.subtract(first, second)).max())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--size", type=float, default=1.0, help="of every kind of requests")
    parser.add_argument("--layouts", default="dense,ladder")
    arguments = parser.parse_args()
    rounds = arguments.rounds
    asked = workloads(np.random.default_rng(0), arguments.size)
    seconds: dict[str, dict[str, dict[str, list[float]]]] = {}
    differences: dict[str, dict[str, float]] = {}
    with tempfile.TemporaryDirectory() as folder:
        models = save_models(Path(folder))
        for layout in arguments.layouts.split(","):
            path = models[layout]
            hf = HFLM(pretrained=load(path), tokenizer=load_tokenizer(path), batch_size=ROWS)
            backends = {
                "hf, 2 threads": hf,
                "runtime, TP2, 1 thread each": RuntimeLM(str(path), tp_size=2, threads=1, batch_size=ROWS),
                "runtime, TP1, 2 threads": RuntimeLM(str(path), threads=2, batch_size=ROWS),
            }
            for lm in backends.values():  # warm-up
                answer(lm, instances("loglikelihood", [("the cat", " sees"), ("a dog", " on")]))
            times = seconds[layout] = {kind: {name: [] for name in backends} for kind in asked}
            differences[layout] = dict.fromkeys(asked, 0.0)
            for _ in range(rounds):
                for kind, requests in asked.items():
                    answers = {}
                    for name, lm in backends.items():
                        took, answers[name] = answer(lm, requests)
                        times[kind][name].append(took)
                        print(f"{layout} | {kind} | {name}: {took:.2f} s", flush=True)
                    for name in backends:
                        found = worst_difference(answers[name], answers["hf, 2 threads"])
                        differences[layout][kind] = max(differences[layout][kind], found)
                write(arguments, seconds, differences)
            for lm in backends.values():
                if isinstance(lm, RuntimeLM):
                    lm.engine.close()
    for layout, kinds in seconds.items():
        for kind, by_name in kinds.items():
            medians = "; ".join(f"{name}: {statistics.median(values):.2f} s" for name, values in by_name.items())
            print(f"{layout} | {kind} | median of {rounds} | {medians}")
    print("largest differences:", differences)


def write(arguments: argparse.Namespace, seconds: dict, differences: dict) -> None:
    """Everything that was measured so far."""
    about = {
        "torch": torch.__version__,
        "machine": platform.processor() or platform.machine(),
        "cores": os.cpu_count(),
        "load_average": os.getloadavg(),
        "shape": SHAPE,
        "batch_size": ROWS,
        "rounds": arguments.rounds,
        "size": arguments.size,
    }
    content = {**about, "seconds": seconds, "largest_difference": differences}
    RESULTS.write_text(json.dumps(content, indent=1) + "\n")


if __name__ == "__main__":
    main()
