"""metrics.jsonl: a line for each step and each validation."""

import os
from pathlib import Path

from ladderize.files.parsing import parse_json
from ladderize.files.regular import read_lines

METRICS = "metrics.jsonl"


def loss_label(distill_weight: float, hidden_weight: float = 0.0) -> str:
    """What the loss is, in words, by the weights of the teacher's predictions and of its sub-modules' outputs."""
    if hidden_weight:
        return f"{loss_label(distill_weight)} + {hidden_weight:g} hidden error"
    if not distill_weight:
        return "cross-entropy"
    if distill_weight == 1:
        return "KL"
    return f"{distill_weight:g} KL + {1 - distill_weight:g} cross-entropy"


def cut_metrics(path: Path, step: int) -> None:
    """Drop what was written after the state that training goes on from."""
    if not path.is_file():
        return
    kept = []
    for line in read_lines(path):
        try:
            if parse_json(line, constants=True)["step"] <= step:
                kept.append(line.rstrip(b"\n") + b"\n")
        except (ValueError, KeyError, TypeError):
            continue  # cut off by a kill
    temporary = path.with_name(f".{path.name}.json.part")
    temporary.write_bytes(b"".join(kept))
    os.replace(temporary, path)


def read_metrics(path: Path, key: str) -> list[float]:
    """The values of one metric, in order."""
    found = []
    for text in read_lines(path):
        line = parse_json(text, constants=True)
        if line.get(key) is not None:
            found.append(line[key])
    return found
