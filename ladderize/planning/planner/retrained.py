"""Costs that a sweep has measured: of whole layouts, most of them retrained, and so worth more than any estimate.
Imports no torch."""

import math
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from ladderize.checkpoint.reading import read_checkpoint
from ladderize.checkpoint.tensors import fingerprint as fingerprint_of
from ladderize.errors import UserError
from ladderize.eval.results import EvalResults, Perplexity
from ladderize.files.documents import read_document
from ladderize.files.regular import inside, resolved
from ladderize.layout import Layout
from ladderize.planning.planner.document import LayoutNll
from ladderize.workflows.sweep_document import SweepDocument, SweepPoint

SWEEP_FILE = "sweep.json"


@dataclass(frozen=True)
class RetrainedLayout:
    """A point of a sweep: its name, its checkpoint, and its measured cost."""

    name: str
    model: str | None
    layout: Layout
    cost: LayoutNll


@dataclass(frozen=True)
class RetrainedCosts:
    """All layouts of a sweep that were evaluated, the dense one not among them. dense_nll: its nats per token."""

    file: str
    layouts: list[RetrainedLayout]
    dense_nll: float
    notes: list[str]

    @property
    def sync_tp_sizes(self) -> list[int]:
        """Of the layouts with dropped sync points."""
        return sorted({one.layout.sync_tp_size for one in self.layouts if one.layout.sync_tp_size is not None})


def read_retrained_costs(
    path: Path, *, num_layers: int, fingerprint: str | None, sync_tp_size: int | None
) -> RetrainedCosts:
    """Read the perplexities of a sweep. path: its folder, or sweep.json. fingerprint: of the dense model; None where
    there is only its shape. sync_tp_size: layouts that were made for another one are left out; None keeps all.

    Raises UserError for the sweep of another model, and where no two points have a perplexity on the same windows.
    """
    path = resolved(path, "--sweep ")
    path = path / SWEEP_FILE if path.is_dir() else path
    document = SweepDocument.from_dict(read_document(path, "sweep.json"), path)
    if not document.points:
        raise UserError(f"{path} has no points; run `ladderize sweep` again")
    notes = [_same_model(path, document.model, fingerprint)] if fingerprint is not None else []
    dense, *points = document.points
    if not dense.is_dense or len(dense.attention_sync) != num_layers:
        raise UserError(
            f"{path} is of a model of {len(dense.attention_sync)} layers, but this one has {num_layers}; name a sweep"
            " of this model"
        )
    base = _perplexity(path, dense)
    if base is None:
        raise UserError(
            f"{path}: the dense model has no perplexity, so nothing tells what a layout costs; give the sweep's"
            " evaluation `perplexity: FILE`, and run it again"
        )
    found = []
    for point in points:
        if not point.attention_sync:
            continue
        layout = Layout(tuple(point.attention_sync), tuple(point.mlp_sync), point.sync_tp_size)
        layout.check_layers(num_layers)
        if layout.is_dense:
            continue
        if sync_tp_size is not None and layout.sync_tp_size not in (None, sync_tp_size):
            notes.append(f"{point.name} is left out: it was made for sync_tp_size {layout.sync_tp_size}")
        elif (own := _perplexity(path, point)) is None:
            notes.append(f"{point.name} is left out: it has no perplexity" + (" yet" if not document.complete else ""))
        else:
            found.append(RetrainedLayout(point.name, _model(path, point), layout, _cost(path, point, own, base)))
    if not found:
        raise UserError(f"{path} has no layout with a perplexity; run `ladderize sweep` again to finish it")
    return RetrainedCosts(str(path), found, base.nll_per_token, [note for note in notes if note])


def _same_model(path: Path, model: str, fingerprint: str) -> str:
    """Raises UserError where the sweep's dense model lies here and is another one; says where it does not lie here."""
    folder = Path(model).expanduser()
    if not (folder / "config.json").is_file():
        return f"the model of {path}, {model}, does not lie here, so only its layers were compared with this model's"
    if fingerprint_of(read_checkpoint(folder)) != fingerprint:
        raise UserError(
            f"{path} is a sweep of another model, {model} (their fingerprints differ); name one of this model"
        )
    return ""


def _model(path: Path, point: SweepPoint) -> str | None:
    """Where its checkpoint lies."""
    folder = inside(path.parent, point.model) if point.model is not None else None
    return str(folder) if folder is not None else point.model


def _perplexity(path: Path, point: SweepPoint) -> Perplexity | None:
    if point.results is None:
        return None
    file = inside(path.parent, point.results)
    if file is None:
        raise UserError(f"{path} names {point.results}, which lies outside of its folder")
    models = EvalResults.from_dict(read_document(file, "results file"), file).models
    if len(models) != 1:
        raise UserError(f"{file} holds {len(models)} models, but a sweep's evaluation holds one; run it again")
    return models[0].model.perplexity


def _cost(path: Path, point: SweepPoint, own: Perplexity, base: Perplexity) -> LayoutNll:
    for key, what in (("data_sha256", "data"), ("seq_len", "windows"), ("windows", "windows"), ("ids_sha256", "ids")):
        if getattr(own, key) != getattr(base, key):
            raise UserError(
                f"{path}: the perplexity of {point.name} is of other {what} than the dense model's; run the sweep again"
            )
    if not (math.isfinite(own.nll_per_token) and math.isfinite(base.nll_per_token)):
        raise UserError(f"{path}: the perplexity of {point.name} is not a number; run the sweep again")
    return LayoutNll(
        nll=own.nll_per_token,
        stderr=own.stderr / own.perplexity if own.stderr is not None and own.perplexity > 0 else None,
        increase=own.nll_per_token - base.nll_per_token,
        increase_stderr=_paired_stderr(own, base),
        windows=own.windows,
    )


def _paired_stderr(own: Perplexity, base: Perplexity) -> float | None:
    """Of the difference in nats per token, from that of each window; None where windows were not kept."""
    if own.window_nll is None or base.window_nll is None or own.window_tokens is None:
        return None
    count = len(own.window_nll)
    if count < 2 or len(base.window_nll) != count or len(own.window_tokens) != count:
        return None
    tokens = np.array(own.window_tokens, float)
    differences = np.array(own.window_nll) - np.array(base.window_nll)
    left = differences - differences.sum() / tokens.sum() * tokens
    return float(np.sqrt(count / (count - 1) * (left**2).sum()) / tokens.sum())
