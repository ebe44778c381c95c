"""Kill commands at random moments, and give them damaged files; count what does not end as it should.

    python scripts/campaign.py --kills 100 --inputs 100 [--seed N]

A killed command (SIGKILL, SIGTERM, SIGINT) is given again and must make what an uninterrupted one makes. A command with
a damaged file must end within 30 seconds (of a busy machine), with 0, or with 1 or 2 and one sentence. Exits 1 if
anything was otherwise.
"""

import argparse
import hashlib
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from ladderize import Recipe, convert_checkpoint
from ladderize.console import printable
from tests import warm
from tests.helpers import SHAPE, save_llama, training_command

LIMIT_S, LEAST_S = 30.0, 1.0
SIGNALS = (signal.SIGKILL, signal.SIGTERM, signal.SIGINT)
TRAINED = ("full", "lora", "align", "blocks", "spd")


def make_place(folder: Path) -> Path:
    """A dense model, one of layout spd 0,2, an adapter of it, a sensitivity and ids."""
    save_llama(folder / "dense")
    convert_checkpoint(folder / "dense", folder / "spd", Recipe(spd="0,2", sync_tp_size=2), verify=False)
    np.save(folder / "ids.npy", np.random.default_rng(0).integers(3, SHAPE["vocab_size"], (24, 16)))
    for arguments in (training_command("lora", folder, folder / "lora"), sensitivity(folder, folder / "s.json")):
        process = start(arguments)
        _, errors = process.communicate()
        assert process.returncode == 0, errors
    return folder


def sensitivity(place: Path, out: Path) -> list[object]:
    return ["sensitivity", place / "dense", "--data", place / "ids.npy", "--sync-tp-size", 2, "--samples", 8,
            "--batch-size", 1, "--threads", 1, "--out", out]  # fmt: skip


def command(name: str, place: Path, out: Path) -> list[object]:
    if name in TRAINED:
        return training_command(name, place, out)
    return {
        "convert": ["convert", place / "dense", out, "--ladder", "2:", "--dtype", "bfloat16"],
        "merge": ["merge", place / "lora", out],
        "sensitivity": sensitivity(place, out),
        "generate": ["generate", place / "dense", "--from-bos", "--num-samples", 12, "--max-new-tokens", 12,
                     "--threads", 1, "--batch-size", 2, "--out", out.with_suffix(".jsonl")],
        "eval": ["eval", place / "dense", place / "spd", "--perplexity", place / "ids.npy", "--out", out],
    }[name]  # fmt: skip


KILLED = (*TRAINED, "convert", "merge", "sensitivity", "generate", "eval")


def start(arguments: list[object]) -> warm.WarmProcess:
    return warm.WarmProcess([sys.executable, "-m", "ladderize", *map(str, arguments)])


def digest(out: Path) -> dict[str, str]:
    """Weights, samples and log-likelihoods of an output: what does not tell when it was made."""
    found = {}
    for path in (out, out.with_suffix(".jsonl"), *out.rglob("*.safetensors")):
        if path.is_file():
            data = path.read_bytes()
            if path == out:  # of sensitivity or eval
                document = json.loads(data)
                data = json.dumps(document.get("nll", document.get("comparisons"))).encode()
            found[path.suffix if path.parent == out.parent else str(path.relative_to(out))] = data
    return {name: hashlib.sha256(data).hexdigest() for name, data in found.items()}


def kill_one(draw: random.Random, name: str, place: Path, folder: Path, seconds: float, right: dict[str, str]) -> str:
    """What came of a command that was killed once and given again: "equal", or what was wrong."""
    number, out = draw.choice(SIGNALS), folder / "out"
    process = start(command(name, place, out))
    # Python itself speaks of Ctrl-C until the command line is read
    time.sleep(draw.uniform(0 if number == signal.SIGKILL else LEAST_S, 1.1 * seconds))
    if not process.has_ended():
        signal.pidfd_send_signal(os.pidfd_open(process.pid), number)
    _, errors = process.communicate()
    if "Traceback" in errors or "resource_tracker" in errors:
        return f"a traceback after {number.name}: {errors[-300:]}"
    was_complete = digest(out) == right
    if was_complete and process.returncode == 0:  # it was sooner
        return "equal"
    process = start(command(name, place, out))
    _, errors = process.communicate()
    if process.returncode:
        if was_complete and "already exists" in errors:
            return "complete, and refused"
        return f"exit code {process.returncode} after {number.name}: {errors[-300:]}"
    if digest(out) != right:
        return f"another result after {number.name}"
    left = sorted(path.name for path in folder.iterdir() if path not in (out, out.with_suffix(".jsonl")))
    return f"left {left} after {number.name}" if left else "equal"


# ---- damaged files ----

STRANGE = (None, True, -1, 0, 1e308, 10**30, "", "x" * 9000, "\x1b[31m\u202e", [], {}, [[[]]], "../../etc/passwd")


READ = (  # a file, and commands that read it
    ("dense/config.json", ("convert", "generate", "eval", "sensitivity")),
    ("dense/model.safetensors", ("convert", "generate", "eval", "sensitivity")),
    ("spd/config.json", ("eval", "full")),
    ("lora/adapter_config.json", ("merge",)),
    ("lora/adapter_model.safetensors", ("merge",)),
    ("s.json", ("auto",)),
    ("ids.npy", ("eval", "sensitivity", "full")),
)


def damage(draw: random.Random, path: Path) -> None:
    """Bytes changed, cut off or doubled; or, of JSON, any value somewhere replaced or removed."""
    raw = path.read_bytes()
    if path.suffix == ".json" and draw.random() < 0.7:
        document = json.loads(raw)
        holder = document
        while True:
            key = draw.choice(list(holder) if isinstance(holder, dict) else range(len(holder)))
            if not isinstance(holder[key], dict | list) or not holder[key] or draw.random() < 0.3:
                break
            holder = holder[key]
        if draw.random() < 0.2:
            del holder[key]
        else:
            holder[key] = draw.choice(STRANGE)
        path.write_text(json.dumps(document))
        return
    place = draw.randrange(len(raw))
    changed = bytearray(raw)
    changed[place] ^= 1 << draw.randrange(8)
    path.write_bytes(draw.choice([bytes(changed), raw[:place], raw[:place] + raw, b"", raw[place:]]))


def give_one(draw: random.Random, place: Path, folder: Path) -> str:
    """What came of a command that read a damaged file: "accepted", "refused", or what was wrong."""
    shutil.copytree(place, folder / "place")
    place, out = folder / "place", folder / "out"
    name, commands = draw.choice(READ)
    damage(draw, place / name)
    chosen = draw.choice(commands)
    if chosen == "auto":
        arguments: list[object] = ["convert", place / "dense", out, "--spd", "auto", "--sensitivity", place / "s.json"]
    else:
        arguments = command(chosen, place, out)
    process = start(arguments)
    try:
        _, errors = process.communicate(timeout=LIMIT_S)
    except subprocess.TimeoutExpired:
        return f"{chosen} with {name}: longer than {LIMIT_S:g} s"
    sentences = [line for line in errors.splitlines() if line.startswith("Error: ")]
    if process.returncode == 0:
        return "accepted"
    right = process.returncode in (1, 2) and len(sentences) == 1 and "unexpected error" not in errors
    if not right or "Traceback" in errors or printable(errors) != errors:
        return f"{chosen} with {name}: exit code {process.returncode}: {errors[-400:]}"
    # the results of models that were evaluated before are kept
    if chosen != "eval" and (out.exists() or out.with_suffix(".jsonl").exists()):
        return f"{chosen} with {name}: left an output"
    return "refused"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--kills", type=int, default=100)
    parser.add_argument("--inputs", type=int, default=100)
    parser.add_argument("--seed", type=int, default=random.randrange(10**6))
    given = parser.parse_args()
    draw, counts = random.Random(given.seed), Counter[str]()
    print(f"seed {given.seed}", flush=True)

    def note(kind: str, result: str) -> None:
        counts[f"{kind}: {result}"] += 1
        if result not in ("equal", "accepted", "refused"):
            print(f"{kind}: {result}", flush=True)

    warm.warm_python().preload("accelerate", "datasets", "peft")
    with tempfile.TemporaryDirectory(prefix="campaign-") as temporary:
        place, known = make_place(Path(temporary)), {}
        for number in range(given.kills):
            name = KILLED[number % len(KILLED)]
            folder = place / f"kill-{number}"
            folder.mkdir()
            if name not in known:
                begin, process = time.monotonic(), start(command(name, place, folder / "out"))
                _, errors = process.communicate()
                assert process.returncode == 0, errors
                known[name] = (time.monotonic() - begin, digest(folder / "out"))
                shutil.rmtree(folder)
                folder.mkdir()
            note(f"kill {name}", kill_one(draw, name, place, folder, *known[name]))
            shutil.rmtree(folder)
        for number in range(given.inputs):
            folder = place.with_name(f"{place.name}-input-{number}")
            folder.mkdir()
            note("input", give_one(draw, place, folder))
            shutil.rmtree(folder)
    for line, count in sorted(counts.items()):
        print(f"{count:5}  {line[:150]}")
    return int(any(not line.endswith((": equal", ": accepted", ": refused")) for line in counts))


if __name__ == "__main__":
    sys.exit(main())
