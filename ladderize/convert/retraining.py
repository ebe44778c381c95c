"""Whether, how and from what a checkpoint's weights were retrained: read from the documents that ``adapt`` and ``spd``
put beside them, which every later conversion carries along. Imports no torch."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

from ladderize.files.documents import read_json
from ladderize.files.records import Record
from ladderize.layout import Layout, format_ranges


@dataclass(frozen=True)
class Retraining(Record):
    """One retraining. model: what was retrained. perplexity: held out, by step, such as dense, before and after.
    divergence: KL(dense || model) likewise, empty where it was not measured. aligned: whether it ended with an
    alignment."""

    method: str
    model: str
    teacher: str | None
    layout: str
    layers: list[int]
    data: list[str]
    perplexity: dict[str, float]
    divergence: dict[str, float] = field(default_factory=dict)
    aligned: bool = False

    @property
    def left_by_alignment(self) -> float | None:
        """The held-out divergence after it; None where something else came last."""
        return list(self.divergence.values())[-1] if self.aligned and self.divergence else None

    def summary(self) -> str:
        """In words."""
        teacher = f", taught by {self.teacher}" if self.teacher else ""
        measured = ", ".join(f"{value:.4f} {name}" for name, value in self.perplexity.items())
        return (
            f"{self.method}: layers {format_ranges(self.layers)} of {self.model}, on {', '.join(self.data)}{teacher}"
            + (f"; held-out perplexity {measured}" if measured else "")
        )


@dataclass(frozen=True)
class _Score(Record):
    perplexity: float


@dataclass(frozen=True)
class _Data(Record):
    file: str


@dataclass(frozen=True)
class _Entry(Record):
    """What a document says of one layer, which it calls a block or a layer."""

    layer: int | None = None
    block: int | None = None
    distillation: dict[str, Any] | None = None
    alignment: dict[str, Any] | None = None

    @property
    def number(self) -> int:
        return (self.layer if self.block is None else self.block) or 0


@dataclass(frozen=True)
class _Document(Record):
    """What all of these documents have."""

    model: str
    layout: str


@dataclass(frozen=True)
class _Adaptation(_Document):
    """adaptation.json, as far as it is told."""

    method: str
    layers: list[int]
    data: list[str]
    distill_from: str | None
    heldout_perplexity: dict[str, float | None] | None

    def retraining(self) -> Retraining:
        scores = self.heldout_perplexity or {}
        known = {name: value for name in ("dense", "before", "after") if (value := scores.get(name)) is not None}
        return Retraining(self.method, self.model, self.distill_from, self.layout, self.layers, self.data, known)


@dataclass(frozen=True)
class _Rewritten(_Document):
    """alignment.json and distillation.json, as far as they are told: the one has ``layers``, the other ``blocks``."""

    FORMER: ClassVar = {"layers": "blocks"}

    teacher: str
    data: _Data
    heldout_perplexity: dict[str, _Score]
    layers: list[_Entry]
    heldout_divergence: dict[str, float] = field(default_factory=dict)

    def retraining(self) -> Retraining:
        method = "align" if all(entry.block is None for entry in self.layers) else "blocks"
        return Retraining(
            method,
            self.model,
            self.teacher,
            self.layout,
            [entry.number for entry in self.layers],
            [self.data.file],
            {name: score.perplexity for name, score in self.heldout_perplexity.items()},
            self.heldout_divergence,
            aligned=method == "align",
        )


@dataclass(frozen=True)
class _Spd(_Document):
    """spd.json, as far as it is told."""

    data: _Data
    blocks: list[_Entry]
    perplexity: dict[str, _Score]
    divergence: dict[str, float] = field(default_factory=dict)

    def retraining(self) -> Retraining | None:
        changed = [entry.number for entry in self.blocks if (entry.alignment or entry.distillation) is not None]
        if not changed:
            return None
        return Retraining(
            "spd",
            self.model,
            self.model,
            self.layout,
            changed,
            [self.data.file],
            {name: score.perplexity for name, score in self.perplexity.items()},
            self.divergence,
            aligned=all(entry.distillation is None for entry in self.blocks),
        )


# in the order in which they usually follow each other
DOCUMENTS: Mapping[str, type[_Spd] | type[_Rewritten] | type[_Adaptation]] = {
    "spd.json": _Spd,
    "alignment.json": _Rewritten,
    "distillation.json": _Rewritten,
    "adaptation.json": _Adaptation,
}


def read_retrainings(folder: Path) -> list[Retraining]:
    """How the weights in a checkpoint's folder were retrained; empty where they were not.

    A file of such a name that is not ladderize's own, or does not say what was retrained, says nothing. Raises
    UserError for one of ours that is damaged.
    """
    found = []
    for name, kind in DOCUMENTS.items():
        path = folder / name
        if not path.is_file():
            continue
        content = read_json(path, advice="restore it, or remove it")
        if not {"ladderize_version", "model"} <= content.keys():
            continue  # somebody else's, or an adapter's that says only what it belongs to
        if (retraining := kind.from_dict(content, path).retraining()) is not None:
            found.append(retraining)
    return found


def layout_warning(retrainings: list[Retraining], before: Layout, after: Layout) -> str | None:
    """What to know before retrained weights are used in another layout; None where there is nothing."""
    if not retrainings or after == before:
        return None
    last = retrainings[-1]
    if before.is_dense and last.layout == str(before):
        return None  # a dense model that was trained further
    result = "neither the dense model nor the retrained one" if after.is_dense else "not the retrained one"
    return (
        f"the weights were retrained ({last.method}) for another layout ({before}); with this one ({after}) the"
        f" model is {result}: measure it, or convert the model that was not retrained"
    )
