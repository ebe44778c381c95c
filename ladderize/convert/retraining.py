"""The history of a checkpoint's weights, from the documents that ``adapt`` and ``spd`` write beside them. Imports no
torch.

Every later conversion carries these documents along.
"""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

from ladderize.files.documents import read_json
from ladderize.files.records import Record
from ladderize.layout import Layout, format_ranges


@dataclass(frozen=True)
class Retraining(Record):
    """One retraining.

    model: the retrained one.
    perplexity: held out, by step, such as dense, before and after.
    divergence: KL(dense || model) likewise; empty where it was not measured.
    aligned: True if it ended with an alignment.
    """

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
        """Return the retraining in words."""
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
class _Layer(Record):
    """One layer in a document.

    alignment, distillation: in spd.json; None where it got none.
    """

    KEYS: ClassVar = {"number": "layer"}
    ALIASES: ClassVar = {"number": "block"}

    number: int
    alignment: dict[str, Any] | None = None
    distillation: dict[str, Any] | None = None


@dataclass(frozen=True)
class _Document(Record):
    """The content of any of these documents, as far as a retraining needs it. ``ALIASES``: the keys that other
    documents use."""

    ALIASES: ClassVar = {
        "layers": "blocks",
        "teacher": "distill_from",
        "heldout_perplexity": "perplexity",
        "heldout_divergence": "divergence",
    }

    model: str
    layout: str
    data: _Data | list[str]
    layers: list[_Layer] | list[int]
    heldout_perplexity: dict[str, _Score] | dict[str, float | None] | None
    heldout_divergence: dict[str, float] = field(default_factory=dict)
    method: str = "spd"  # spd.json states no method and no teacher: that is the model itself
    teacher: str | None = None

    def retraining(self, name: str) -> Retraining | None:
        """Return the retraining that the document tells of; None where spd changed no weights.

        name: of its file.
        """
        layers = [entry for entry in self.layers if isinstance(entry, _Layer)]
        numbers = [entry for entry in self.layers if isinstance(entry, int)] or [entry.number for entry in layers]
        method, teacher, aligned = self.method, self.teacher, False
        if name == "spd.json":
            numbers = [entry.number for entry in layers if (entry.alignment or entry.distillation) is not None]
            teacher, aligned = self.model, all(entry.distillation is None for entry in layers)
        elif name != "adaptation.json":
            aligned = name == ALIGNMENT
            method = "align" if aligned else "blocks"
        scores = {
            step: value.perplexity if isinstance(value, _Score) else value
            for step in (STEPS if name == "adaptation.json" else self.heldout_perplexity or ())
            if (value := (self.heldout_perplexity or {}).get(step)) is not None
        }
        data = [self.data.file] if isinstance(self.data, _Data) else self.data
        told = Retraining(
            method, self.model, teacher, self.layout, numbers, data, scores, self.heldout_divergence, aligned
        )
        return told if numbers or name != "spd.json" else None


STEPS = ("dense", "before", "after")  # of the perplexities in adaptation.json, where other figures stand too
# in their usual order
ALIGNMENT, DISTILLATION = "alignment.json", "distillation.json"
DOCUMENTS = ("spd.json", ALIGNMENT, DISTILLATION, "adaptation.json")


def read_retrainings(folder: Path) -> list[Retraining]:
    """Return the retrainings of the weights in a checkpoint's folder, in order; empty where there were none.

    A file of such a name that is not ladderize's is ignored.
    Raises UserError for one of ours that is damaged.
    """
    found = []
    for name in DOCUMENTS:
        path = folder / name
        if not path.is_file():
            continue
        content = read_json(path, advice="restore it, or remove it")
        if not {"ladderize_version", "model"} <= content.keys():
            continue  # another tool's, or an adapter's that names only its base
        if (retraining := _Document.from_dict(content, path).retraining(name)) is not None:
            found.append(retraining)
    return found


def layout_warning(retrainings: list[Retraining], before: Layout, after: Layout) -> str | None:
    """Return a warning where retrained weights get another layout; else None."""
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
