"""The curves of a training, from what it wrote: metrics.jsonl of retraining, the reports of distilled blocks, those of
aligned layers. Imports no torch.

A folder may be OUT, or unfinished work, whose metrics.jsonl is still growing.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, ClassVar

from ladderize.adapt.align.reports import LayerReport
from ladderize.adapt.retrain.metrics import METRICS, loss_label
from ladderize.errors import UserError
from ladderize.files.documents import read_document
from ladderize.files.parsing import parse_json
from ladderize.files.records import Record
from ladderize.files.regular import read_lines

# where the weight of the teacher's predictions stands, in OUT and in unfinished work
OBJECTIVE_OF = {"adaptation.json": ("options", "objective"), "run.json": ("objective",)}
# where reports stand: the key of their list, and that of a report in its entries (None: the entry is it)
ALIGNED_IN = {"alignment.json": ("layers", None), "spd.json": ("blocks", "alignment")}
DISTILLED_IN = {"distillation.json": ("blocks", None), "spd.json": ("blocks", "distillation")}


@dataclass(frozen=True)
class Curves:
    """One run. name: its folder's. loss: [step, training loss]; label: what that is. heldout: [step, held-out
    perplexity]. dense: the teacher's perplexity. blocks: block -> [step, held-out loss]. aligned: reports of layers."""

    name: str
    label: str = "loss"
    loss: list[tuple[int, float]] = field(default_factory=list)
    heldout: list[tuple[int, float]] = field(default_factory=list)
    dense: float | None = None
    blocks: dict[int, list[tuple[int, float]]] = field(default_factory=dict)
    aligned: list[LayerReport] = field(default_factory=list)


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
    """The curves of what was trained in, or written to, a folder: of every step that left its document there. Raises
    UserError where there are none."""
    folder = folder.expanduser()
    if not folder.is_dir():
        raise UserError(f"{folder} is not a folder; name the output of adapt or spd, or unfinished work")
    distilled = [_Block.from_dict(*found) for found in _reports(folder, DISTILLED_IN)]
    curves = Curves(
        folder.resolve().name,
        blocks={block.block: block.curve for block in distilled},
        aligned=[LayerReport.from_dict(*found) for found in _reports(folder, ALIGNED_IN)],
    )
    if (folder / METRICS).is_file():
        return _with_metrics(curves, folder)
    if not curves.blocks and not curves.aligned:
        raise UserError(
            f"{folder} has no {METRICS}, and no {', '.join({**ALIGNED_IN, **DISTILLED_IN})} with aligned layers or"
            " distilled blocks; name the output of adapt or spd, or unfinished work"
        )
    return curves


def _with_metrics(curves: Curves, folder: Path) -> Curves:
    path = folder / METRICS
    lines = []
    for number, text in enumerate(read_lines(path), 1):
        if not text.endswith(b"\n"):
            break  # being written, or cut off by a kill
        try:
            lines.append(_Metrics.from_dict(parse_json(text, constants=True), f"{path}, line {number}"))
        except ValueError:
            raise UserError(f"{path}, line {number} is not JSON; the file may be damaged") from None
    return replace(
        curves,
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
        for key in keys:
            value = value.get(key) if isinstance(value, dict) else None
        if isinstance(value, dict) and "distill_weight" in value:
            weights = [value.get(key, 0.0) for key in ("distill_weight", "hidden_weight")]
            if all(isinstance(weight, int | float) for weight in weights):
                return f"loss ({loss_label(*map(float, weights))})"
    return "loss"


def _reports(folder: Path, places: Mapping[str, tuple[str, str | None]]) -> Iterator[tuple[dict[str, Any], str]]:
    """Each report in the documents of a folder, and where it stands."""
    for name, (entries, key) in places.items():
        path = folder / name
        found = read_document(path, name).get(entries) if path.is_file() else None
        for number, entry in enumerate(found if isinstance(found, list) else []):
            report = entry.get(key) if key is not None and isinstance(entry, dict) else entry
            if report is not None:
                yield report, f"{path}: {entries}[{number}]"
