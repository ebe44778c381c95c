"""sensitivity.json: the costs of changed layers of a dense model, in nats per token, which add up (0.01 nats are 1 % of
perplexity), and in perplexity: the S of the SPD paper (arXiv 2502.20727). Imports no torch."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal, NamedTuple, get_args

from ladderize.errors import UserError
from ladderize.files.documents import read_document
from ladderize.files.records import Record
from ladderize.layout import Layout, format_ranges

if TYPE_CHECKING:
    import numpy as np

# Kinds of layers, as ``Layout.layer_name`` says them; all but the first are made for a number of virtual ranks. One
# layer alone that is spd+delayed computes what a delayed one does, so it is not measured.
ChangeKind = Literal["ladder", "delayed", "spd", "spd+ladder"]
LAYER_CHANGES: tuple[ChangeKind, ...] = get_args(ChangeKind)
LADDER: ChangeKind = "ladder"
SPD: ChangeKind = "spd"
# layers: each layer alone becomes each kind. sweep: from the last layer backwards one more is dropped at a time, as in
# the paper.
Mode = Literal["layers", "sweep"]
RESAMPLES, INTERVAL = 2000, 0.95  # of the bootstrap over windows; the share of its results between low and high


@dataclass(frozen=True)
class CalibrationData(Record):
    """The windows that were scored, drawn with ``seed``; sha256: of the file and the array in it."""

    file: str
    sha256: str
    samples: int
    seq_len: int
    seed: int


@dataclass(frozen=True)
class AlignmentWindows(Record):
    """The windows that changed layers were aligned on: to solve with, and to choose between solutions. They follow the
    scored windows in the order of the draw."""

    samples: int
    heldout: int
    seq_len: int


@dataclass(frozen=True)
class LayerCost(Record):
    """The cost of one more layer of a kind: the increase of the mean negative log-likelihood in nats per token, and S,
    that of the perplexity, between the ends of its bootstrap interval over windows."""

    layer: int
    kind: ChangeKind
    nats: float
    sensitivity: float
    low: float
    high: float


@dataclass(frozen=True)
class SensitivityDocument(Record):
    """The content of sensitivity.json; docs/files.md explains the keys."""

    model: str
    fingerprint: str
    layout: str
    num_layers: int
    data: CalibrationData
    mode: Mode
    sync_tp_size: int | None
    dtype: str
    aligned: AlignmentWindows | None
    dense_nll: float
    costs: list[LayerCost]

    @property
    def dense_perplexity(self) -> float:
        return math.exp(self.dense_nll)

    @property
    def kinds(self) -> list[str]:
        """The kinds that layers were changed to, in the file's order."""
        return list(dict.fromkeys(cost.kind for cost in self.costs))

    def of_kind(self, kind: str) -> list[LayerCost]:
        """Return the costs of one kind in the order of layers; empty where it was not measured."""
        return [cost for cost in self.costs if cost.kind == kind]


class LayerChange(NamedTuple):
    """A changed model: layer ``layer``, in a sweep every layer from it on, becomes ``kind``."""

    layer: int
    kind: ChangeKind
    layout: Layout


def layer_changes(mode: Mode, num_layers: int, sync_tp_size: int | None) -> list[LayerChange]:
    """Return the models that a mode measures besides the dense one."""
    kinds: Sequence[ChangeKind] = LAYER_CHANGES if sync_tp_size is not None else [LADDER]
    changes = []
    for kind in [SPD] if mode == "sweep" else kinds:
        for layer in range(num_layers):
            layers = range(layer, num_layers) if mode == "sweep" else [layer]
            named = dict.fromkeys(kind.split("+"), layers)
            layout = Layout.from_layers(num_layers, **named, sync_tp_size=None if kind == LADDER else sync_tp_size)
            changes.append(LayerChange(layer, kind, layout))
    return changes


def layer_costs(changes: Sequence[LayerChange], nll: "np.ndarray", tokens: int, mode: Mode) -> list[LayerCost]:
    """Return the cost of each change, from nats [windows, changes + 1], the dense model last, that are summed over a
    window's scored ``tokens``."""
    import numpy as np

    count = len(changes)
    before = np.arange(1, count + 1) if mode == "sweep" else np.full(count, count)  # the model without the change
    means, rng = nll.mean(0) / tokens, np.random.default_rng(0)
    # the mean of each column in each bootstrap resample of the windows
    drawn = rng.multinomial(len(nll), np.full(len(nll), 1 / len(nll)), size=RESAMPLES)
    perplexities, resampled = np.exp(means), np.exp(drawn @ nll / len(nll) / tokens)
    values = (perplexities[:-1] - perplexities[before]).tolist()
    ends = [(1 - INTERVAL) / 2, (1 + INTERVAL) / 2]
    low, high = np.quantile(resampled[:, :-1] - resampled[:, before], ends, axis=0).tolist()
    nats = (means[:-1] - means[before]).tolist()
    return [LayerCost(*change[:2], *figures) for change, *figures in zip(changes, nats, values, low, high, strict=True)]


def read_sensitivity(path: Path) -> SensitivityDocument:
    """Read a sensitivity.json; raises UserError for a malformed one."""
    document = SensitivityDocument.from_dict(read_document(path, "sensitivity file"), path)
    layers, numbers, is_whole = list(range(document.num_layers)), [document.dense_nll], bool(document.costs)
    for cost in document.costs:
        numbers += [cost.nats, cost.sensitivity]
    for kind in document.kinds:
        is_whole = is_whole and [cost.layer for cost in document.of_kind(kind)] == layers
    if not is_whole or not all(map(math.isfinite, numbers)):
        raise UserError(f"{path} has not one finite cost for each layer of each kind, in order; measure it again")
    if not document.sync_tp_size and {*document.kinds} - {LADDER}:
        raise UserError(f"{path} has costs of delayed or dropped layers and no sync_tp_size; measure it again")
    return document


def alignment_words(aligned: AlignmentWindows) -> str:
    """Return a sentence on how the models of these costs were aligned."""
    return f"each changed layer was aligned first, on {aligned.samples} other windows of {aligned.seq_len} tokens"


def cost_rows(document: SensitivityDocument) -> list[dict[str, str]]:
    """Return a row for each layer, for people: S of each kind and half its interval."""
    rows = [{"layer": str(layer)} for layer in range(document.num_layers)]
    for cost in document.costs:
        rows[cost.layer][cost.kind] = f"{cost.sensitivity:+.4f} ±{(cost.high - cost.low) / 2:.4f}"
    return rows


def summary(document: SensitivityDocument) -> list[str]:
    """Return lines that explain the costs: each kind's layers, the least sensitive first, and why others have none."""
    lines = [dense_line(document)]
    for kind in document.kinds:
        layers = ", ".join(str(cost.layer) for cost in ascending(document.of_kind(kind)))
        lines.append(f"least sensitive first, {kind}: {layers}")
    if document.aligned is not None:
        lines.append(alignment_words(document.aligned))
    if others := ", ".join(kind for kind in LAYER_CHANGES if kind not in document.kinds):
        missing = "are made for a number of ranks: give --sync-tp-size N"
        why = missing if document.mode == "layers" else "--mode layers measures"
        lines.append(f"measured: {', '.join(document.kinds)}; not {others}, which {why}")
    return lines


def ascending(costs: Sequence[LayerCost]) -> list[LayerCost]:
    """Return costs with the least sensitive layer first, of equal ones the lower."""
    return sorted(costs, key=lambda cost: (cost.sensitivity, cost.layer))


def cheapest_half(document: SensitivityDocument) -> tuple[str, list[str]]:
    """Return the kind in which half of the layers cost least, and the options of ``convert`` that make it."""
    halves = [ascending(document.of_kind(kind))[: max(1, document.num_layers // 2)] for kind in document.kinds]
    half = min(halves, key=lambda costs: sum(cost.nats for cost in costs))
    kind, layers = half[0].kind, format_ranges(cost.layer for cost in half)
    options = [] if kind == LADDER else ["--sync-tp-size", str(document.sync_tp_size)]
    for name in reversed(kind.split("+")):
        options = [f"--{name}", layers, *options]
    return kind, options


def dense_line(document: SensitivityDocument) -> str:
    """Return a line that explains the costs and gives the dense model's perplexity."""
    meaning = "each layer alone is changed" if document.mode == "layers" else "a layer joins the dropped ones after it"
    return (
        f"increase of the perplexity where {meaning}; the dense model's is {document.dense_perplexity:.4f}"
        f" ({document.dense_nll:.4f} nats per token)"
    )
