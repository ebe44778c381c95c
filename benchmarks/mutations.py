"""Does the check before a benchmark see a wrong runtime? Each mistake of mutations.yaml is made in a copy of
ladderize, and `bench` must refuse to time it.

    python benchmarks/mutations.py                   # all, 5 to 15 minutes on 2 cores
    python benchmarks/mutations.py --only rope       # those whose name holds a word

Two ranks of a random float32 Llama with grouped heads, biases and a vocabulary that the ranks do not divide, in four
layouts with four virtual ranks. Ends with exit code 1 if a mistake was timed, or if the right runtime was refused.
"""

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

import yaml

FILE = Path(__file__).resolve().with_suffix(".yaml")
PACKAGE = FILE.parent.parent / "ladderize"
LAYOUTS = {
    "dense": [],
    "ladder": ["--ladder", "all"],
    "spd": ["--spd", "all", "--sync-tp-size", "4"],
    "both": ["--ladder", "all", "--spd", "1,3", "--sync-tp-size", "4"],
}


@dataclass(frozen=True)
class Mutation:
    """A text that stands once in a file of runtime/, and the mistake in its place."""

    name: str
    file: str
    text: str
    mistake: str


def mutations() -> list[Mutation]:
    return [Mutation(**one) for one in yaml.safe_load(FILE.read_text(encoding="utf-8"))]


def ladderize(package: Path, arguments: list[str], work: Path) -> subprocess.CompletedProcess[str]:
    own = {
        "PYTHONPATH": str(package.parent),
        "XDG_CACHE_HOME": str(work),  # a changed copy compiles its kernels to a folder of this run
        "OMP_NUM_THREADS": "1",
        "HF_HUB_OFFLINE": "1",
    }
    command = [sys.executable, "-m", "ladderize", *arguments]
    return subprocess.run(command, cwd=work, env=os.environ | own, capture_output=True, text=True)


def make_models(work: Path) -> None:
    """A Llama whose biases and norms are random, too, and its layouts."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=131,
        hidden_size=128,
        intermediate_size=128,
        num_hidden_layers=4,
        num_attention_heads=8,
        num_key_value_heads=4,
        max_position_embeddings=256,
        attention_bias=True,
        mlp_bias=True,
    )
    model = LlamaForCausalLM(config)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(1.0 if parameter.ndim == 1 else 0.0, 0.3 if parameter.ndim == 1 else 0.12)
    model.save_pretrained(work / "dense")
    for name, options in list(LAYOUTS.items())[1:]:
        made = ladderize(PACKAGE, ["convert", "dense", name, *options, "--no-verify"], work)
        assert made.returncode == 0, made.stderr


def bench(package: Path, work: Path) -> subprocess.CompletedProcess[str]:
    words = ["bench", *LAYOUTS, "--tp-size", "2", "--prompt-len", "64", "--output-len", "2"]
    return ladderize(package, [*words, "--warmup", "1", "--repeat", "1"], work)


def outcome(mutation: Mutation | None, work: Path) -> str:
    """``timed``, ``refused`` by the check, or ``failed`` otherwise, with the last line that was printed."""
    with tempfile.TemporaryDirectory() as folder:
        package = Path(folder) / "ladderize"
        shutil.copytree(PACKAGE, package, ignore=shutil.ignore_patterns("__pycache__"))
        if mutation is not None:
            file = package / "runtime" / mutation.file
            source = file.read_text()
            assert source.count(mutation.text) == 1, f"{mutation.file} must hold this once: {mutation.text}"
            file.write_text(source.replace(mutation.text, mutation.mistake))
        done = bench(package, work)
    if done.returncode == 0:
        return "timed"
    last = (done.stderr.strip().splitlines() or ["nothing was printed"])[-1]
    return f"{'refused' if 'differ' in last or 'reference' in last else 'failed'}: {last}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="a word of the names")
    parser.add_argument("--out", type=Path, help="write what came of each as JSON")
    arguments = parser.parse_args()
    chosen = [mutation for mutation in mutations() if arguments.only in mutation.name]
    if not chosen:
        parser.error(f"no mistake's name holds {arguments.only!r}")
    found: dict[str, str] = {}
    with tempfile.TemporaryDirectory() as folder:
        work = Path(folder)
        make_models(work)
        found["the runtime as it is"] = outcome(None, work)
        print(f"the runtime as it is: {found['the runtime as it is']}", flush=True)
        for mutation in chosen:
            found[mutation.name] = outcome(mutation, work)
            print(f"{mutation.name}: {found[mutation.name]}", flush=True)
    right, *others = found.values()
    print(f"{sum(one != 'timed' for one in others)} of {len(others)} mistakes were not timed")
    if arguments.out is not None:
        arguments.out.write_text(json.dumps(found, indent=2) + "\n")
    if right != "timed" or "timed" in others:
        sys.exit(1)


if __name__ == "__main__":
    main()
