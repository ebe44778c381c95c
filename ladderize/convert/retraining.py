"""Whether, how and from what a checkpoint's weights were retrained: read from the documents that ``adapt`` and ``spd``
put beside them, which every later conversion carries along. Imports no torch."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

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
class _Heldout(Record):
    before: float
    after: float
    dense: float | None = None


@dataclass(frozen=True)
class _Score(Record):
    perplexity: float


@dataclass(frozen=True)
class _Data(Record):
    file: str


@dataclass(frozen=True)
class _Adaptation(Record):
    """adaptation.json, as far as it is told."""

    method: str
    model: str
    layout: str
    layers: list[int]
    data: list[str]
    distill_from: str | None
    heldout_perplexity: _Heldout | None

    def retraining(self) -> Retraining:
        heldout = self.heldout_perplexity
        scores = {} if heldout is None else {"dense": heldout.dense, "before": heldout.before, "after": heldout.after}
        known = {name: value for name, value in scores.items() if value is not None}
        return Retraining(self.method, self.model, self.distill_from, self.layout, self.layers, self.data, known)


@dataclass(frozen=True)
class _Rewritten(Record):
    """What alignment.json and distillation.json have in common."""

    model: str
    teacher: str
    layout: str
    data: _Data
    heldout_perplexity: dict[str, _Score]
    heldout_divergence: dict[str, float] = field(default_factory=dict, kw_only=True)

    def retraining_of(self, method: str, layers: list[int]) -> Retraining:
        return Retraining(
            method,
            self.model,
            self.teacher,
            self.layout,
            layers,
            [self.data.file],
            {name: score.perplexity for name, score in self.heldout_perplexity.items()},
            self.heldout_divergence,
            aligned=method == "align",
        )


@dataclass(frozen=True)
class _Layer(Record):
    layer: int


@dataclass(frozen=True)
class _Alignment(_Rewritten):
    """alignment.json, as far as it is told."""

    layers: list[_Layer]

    def retraining(self) -> Retraining:
        return self.retraining_of("align", [layer.layer for layer in self.layers])


@dataclass(frozen=True)
class _Block(Record):
    block: int


@dataclass(frozen=True)
class _Distillation(_Rewritten):
    """distillation.json, as far as it is told."""

    blocks: list[_Block]

    def retraining(self) -> Retraining:
        return self.retraining_of("blocks", [block.block for block in self.blocks])


@dataclass(frozen=True)
class _SpdBlock(Record):
    block: int
    distillation: dict[str, Any] | None
    alignment: dict[str, Any] | None = None


@dataclass(frozen=True)
class _Spd(Record):
    """spd.json, as far as it is told."""

    model: str
    layout: str
    data: _Data
    blocks: list[_SpdBlock]
    perplexity: dict[str, _Score]
    divergence: dict[str, float] = field(default_factory=dict)

    def retraining(self) -> Retraining | None:
        layers = [block.block for block in self.blocks if (block.alignment or block.distillation) is not None]
        if not layers:
            return None
        return Retraining(
            "spd",
            self.model,
            self.model,
            self.layout,
            layers,
            [self.data.file],
            {name: score.perplexity for name, score in self.perplexity.items()},
            self.divergence,
            aligned=all(block.distillation is None for block in self.blocks),
        )


# in the order in which they usually follow each other
DOCUMENTS: Mapping[str, type[_Spd] | type[_Alignment] | type[_Distillation] | type[_Adaptation]] = {
    "spd.json": _Spd,
    "alignment.json": _Alignment,
    "distillation.json": _Distillation,
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
