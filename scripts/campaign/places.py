"""What campaigns work on, the commands of every kind, and what of an output must be the same whenever it is made."""

import contextlib
import hashlib
import json
import os
import re
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import yaml

from ladderize import Recipe, convert_checkpoint
from tests import warm
from tests.helpers import SHAPE, save_llama, training_command
from tests.report_documents import bench_document, eval_document, layouts, write_document
from tests.sweeps import FAST

TRAINED = ("full", "lora", "align", "blocks", "spd")
QUICK = ("--prompt-len", 4, "--output-len", 3, "--repeat", 2, "--warmup", 1, "--threads", 1)
GROUP = ("--tp-size", 2, "--backend", "shm")


@dataclass(frozen=True)
class Command:
    """suffix: of the output; none: a folder. timed: the numbers in the output are another every time."""

    arguments: Callable[[Path, Path], list[object]]
    suffix: str = ""
    timed: bool = False


def _sensitivity(place: Path, out: Path) -> list[object]:
    return ["sensitivity", place / "dense", "--data", place / "ids.npy", "--sync-tp-size", 2, "--samples", 8,
            "--threads", 1, "--out", out]  # fmt: skip


def _generate(place: Path, out: Path, *more: object) -> list[object]:
    return ["generate", place / "dense", "--from-bos", "--num-samples", 12, "--max-new-tokens", 12,
            "--concurrency", 2, "--out", out, *more]  # fmt: skip


def _eval(place: Path, out: Path, *more: object) -> list[object]:
    return ["eval", place / "dense", place / "spd", "--perplexity", place / "ids.npy", "--device", "cpu", "--out", out,
            *more]  # fmt: skip


def _plan(place: Path, out: Path) -> list[object]:
    return ["plan", place / "dense", "--hardware", "a100-80gb", "--link", "nvlink", "--tp-size", 2, "--sync-tp-size", 2,
            "--prompt-len", 8, "--output-len", 8, "--sensitivity", place / "s.json", "--max-ppl-increase", "50%",
            "--verify", 3, "--out", out, "--recipe-out", out.with_suffix(".yaml")]  # fmt: skip


COMMANDS = {
    **{name: Command(lambda place, out, name=name: training_command(name, place, out)) for name in TRAINED},
    "full of 2 ranks": Command(lambda place, out: [*training_command("full", place, out), "--tp-size", 2]),
    "convert": Command(
        lambda place, out: ["convert", place / "dense", out, "--ladder", "2:", "--dtype", "bfloat16", "--no-verify"]
    ),
    "merge": Command(lambda place, out: ["merge", place / "lora", out]),
    "sensitivity": Command(_sensitivity, ".json"),
    "generate": Command(_generate, ".jsonl"),
    "generate of 2 ranks": Command(lambda place, out: _generate(place, out, *GROUP), ".jsonl"),
    "eval": Command(_eval, ".json"),
    "plan": Command(_plan, ".json"),
    "report": Command(lambda place, out: ["report", place / "found", "--out", out], ".html"),
    "bench": Command(
        lambda place, out: ["bench", place / "dense", place / "spd", *QUICK, "--out", out], ".json", timed=True
    ),
    "bench of 2 ranks": Command(
        lambda place, out: ["bench", place / "dense", place / "spd", *GROUP, *QUICK, "--out", out], ".json", timed=True
    ),
    "calibrate": Command(lambda place, out: ["calibrate", "--out", out], ".json", timed=True),
    "compare": Command(lambda place, out: ["compare", place / "eval.json", "--out", out], ".json"),
    "sweep": Command(lambda place, out: ["sweep", place / "sweep.yaml", "--out", out], timed=True),
}


def make_place(folder: Path) -> Path:
    """A dense model, one of layout spd 0,2, an adapter of it, sensitivities, ids, a shape, a sweep's file, results."""
    save_llama(folder / "dense")
    convert_checkpoint(folder / "dense", folder / "spd", Recipe(spd="0,2", sync_tp_size=2), verify=False)
    np.save(folder / "ids.npy", np.random.default_rng(0).integers(3, SHAPE["vocab_size"], (24, 16)))
    config = json.loads((folder / "dense/config.json").read_text())
    shape = {**config, "hidden_size": 256, "intermediate_size": 512, "head_dim": 32, "max_position_embeddings": 512}
    (folder / "shape-256.json").write_text(json.dumps(shape))
    retraining = {"method": "full", "layouts": "half", "data": str(folder / "ids.npy"), "max_steps": 2, "batch_size": 2,
                  "seq_len": 16, "write": "last"}  # fmt: skip
    sweep = {
        "model": str(folder / "dense"),
        "no_verify": True,
        "layouts": [{"ladder": "all"}, {"name": "half", "spd": "2:", "sync_tp_size": 2}],
        "adapt": ["none", retraining],
        "eval": {"perplexity": str(folder / "ids.npy"), "batch_size": 4},
        "bench": [FAST],
    }
    (folder / "sweep.yaml").write_text(yaml.safe_dump(sweep))
    found = folder / "found"
    found.mkdir()
    points = {"ladder": -0.3, "spd": -20.0, "both": -35.0}
    write_document(found / "results.json", eval_document(layouts(), points))
    write_document(found / "bench.json", bench_document(layouts(), {"ladder": 1.2, "spd": 1.3, "both": 1.5}))
    for arguments in (
        training_command("lora", folder, folder / "lora"),
        _sensitivity(folder, folder / "s.json"),
        _eval(folder, folder / "eval.json"),
    ):
        process = start(arguments)
        _, errors = process.communicate()
        assert process.returncode == 0, errors
    return folder


def start(arguments: list[object], *, cwd: Path | None = None, **environment: str) -> warm.WarmProcess:
    command = [sys.executable, "-m", "ladderize", *map(str, arguments)]
    path = os.pathsep.join(filter(None, [str(warm.ROOT), os.environ.get("PYTHONPATH")]))
    return warm.WarmProcess(command, cwd=cwd, env={**os.environ, "PYTHONPATH": path, **environment})


def processes_in(folder: Path) -> list[int]:
    """Of which the working folder is this one, or in it."""
    found = []
    for entry in Path("/proc").iterdir():
        with contextlib.suppress(OSError):
            if entry.name.isdigit() and Path(os.readlink(entry / "cwd")).is_relative_to(folder):
                found.append(int(entry.name))
    return found


# ---- what must be the same ----

# what tells when and how a document was made, rather than what of
TOLD = re.compile(
    r"seconds|(_|^)(ms|us|s|per_s|gb_s|bytes|memory|pid|host|time|date|created|threads|work_dir|resumed\w*|reused|"
    r"started|ended|out|run_sha256|uncertain)$|speedup|environment"
)


def plain(value: Any, timed: bool) -> Any:
    """A document without what tells when it was made; of a ``timed`` one, without its numbers."""
    if isinstance(value, dict):
        return {key: plain(item, timed) for key, item in sorted(value.items()) if not TOLD.search(key)}
    if isinstance(value, list):
        return [plain(item, timed) for item in value]
    if timed and isinstance(value, float | int | str) and not isinstance(value, bool):
        return type(value).__name__ if not isinstance(value, str) or re.search(r"\d", value) else value
    return value


def digest(out: Path, command: Command) -> dict[str, str]:
    """What an output says, by file: documents as text, of other files the hash."""
    found = {}
    for path in sorted([out, out.with_suffix(".yaml"), *out.rglob("*")]):
        name = str(path.relative_to(out.parent))
        if not path.is_file() or path.name == "log.txt":
            continue
        data = path.read_bytes()
        if path.suffix == ".json":
            found[name] = json.dumps(plain(json.loads(data), command.timed))
        elif path.suffix == ".jsonl":
            found[name] = json.dumps([plain(json.loads(line), command.timed) for line in data.splitlines()])
        elif path.suffix in (".safetensors", ".html", ".yaml"):
            found[name] = hashlib.sha256(data).hexdigest()
        else:
            found[name] = "there"
    return found


def difference(found: dict[str, str], expected: dict[str, str]) -> str:
    """The first file in which two digests differ, and where."""
    name = min(key for key in {**found, **expected} if found.get(key) != expected.get(key))
    one, other = found.get(name, "missing"), expected.get(name, "missing")
    pairs = enumerate(zip(one, other, strict=False))
    at = next((place for place, (left, right) in pairs if left != right), min(len(one), len(other)))
    return f"{name}: {one[max(0, at - 80) : at + 40]!r} for {other[max(0, at - 80) : at + 40]!r}"
