"""The curves of a training, from what it wrote: metrics.jsonl of retraining, or the reports of distilled blocks.
Imports no torch.

A folder may be OUT, or unfinished work, whose metrics.jsonl is still growing.
"""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

from ladderize.adapt.retrain.metrics import METRICS, loss_label
from ladderize.errors import UserError
from ladderize.files.documents import read_document
from ladderize.files.parsing import parse_json
from ladderize.files.records import Record
from ladderize.files.regular import read_lines

# where the weight of the teacher's predictions stands, in OUT and in unfinished work
OBJECTIVE_OF = {"adaptation.json": ("options", "objective"), "run.json": ("objective",)}
BLOCKS_OF = {"distillation.json": None, "spd.json": "distillation"}  # -> the key of a block's report; None: it is it


@dataclass(frozen=True)
class Curves:
    """One run. name: its folder's. loss: [step, training loss]; label: what that is. heldout: [step, held-out
    perplexity]. dense: the teacher's perplexity. blocks: block -> [step, held-out loss]."""

    name: str
    label: str = "loss"
    loss: list[tuple[int, float]] = field(default_factory=list)
    heldout: list[tuple[int, float]] = field(default_factory=list)
    dense: float | None = None
    blocks: dict[int, list[tuple[int, float]]] = field(default_factory=dict)


@dataclass(frozen=True)
class _Metrics(Record):
    """A line of metrics.jsonl, as far as it is drawn. What was no number is null there."""

    KEYS: ClassVar = {"dense": "dense_heldout_perplexity", "heldout": "heldout_perplexity"}

    step: int
    loss: float | None = None
    heldout: float | None = None
    dense: float | None = None


@dataclass(frozen=True)
class _Block(Record):
    block: int
    curve: list[tuple[int, float]]


def read_curves(folder: Path) -> Curves:
    """The curves of what was trained in, or written to, a folder. Raises UserError where there are none."""
    folder = folder.expanduser()
    if not folder.is_dir():
        raise UserError(f"{folder} is not a folder; name the output of adapt or spd, or unfinished work")
    if (folder / METRICS).is_file():
        return _retraining(folder)
    for name, key in BLOCKS_OF.items():
        if (folder / name).is_file() and (blocks := _blocks(folder / name, key)):
            return Curves(_name(folder), blocks=blocks)
    raise UserError(
        f"{folder} has no {METRICS}, and no {' or '.join(BLOCKS_OF)} with distilled blocks; name the output of adapt or"
        " spd, or unfinished work"
    )


def _name(folder: Path) -> str:
    return folder.resolve().name


def _retraining(folder: Path) -> Curves:
    path = folder / METRICS
    lines = []
    for number, text in enumerate(read_lines(path), 1):
        if not text.endswith(b"\n"):
            break  # being written, or cut off by a kill
        try:
            lines.append(_Metrics.from_dict(parse_json(text, constants=True), f"{path}, line {number}"))
        except ValueError:
            raise UserError(f"{path}, line {number} is not JSON; the file may be damaged") from None
    return Curves(
        _name(folder),
        label=_label(folder),
        loss=[(line.step, line.loss) for line in lines if line.loss is not None],
        heldout=[(line.step, line.heldout) for line in lines if line.heldout is not None],
        dense=next((line.dense for line in lines if line.dense is not None), None),
    )


def _label(folder: Path) -> str:
    for name, keys in OBJECTIVE_OF.items():
        if not (folder / name).is_file():
            continue
        value: Any = read_document(folder / name, name)
        for key in (*keys, "distill_weight"):
            value = value.get(key) if isinstance(value, dict) else None
        if isinstance(value, int | float):
            return f"loss ({loss_label(float(value))})"
    return "loss"


def _blocks(path: Path, key: str | None) -> dict[int, list[tuple[int, float]]]:
    found = {}
    entries = read_document(path, path.name).get("blocks")
    for number, entry in enumerate(entries if isinstance(entries, list) else []):
        report = entry.get(key) if key is not None and isinstance(entry, dict) else entry
        if report is not None:
            block = _Block.from_dict(report, f"{path}: blocks[{number}]")
            found[block.block] = block.curve
    return found
