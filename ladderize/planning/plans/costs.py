"""What layouts cost in accuracy: estimated, of a sensitivity file of single changes, or measured, of a sweep whose
layouts were retrained. Imports no torch."""

import math
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from ladderize.checkpoint.opening import read_checkpoint
from ladderize.checkpoint.tensors import fingerprint as fingerprint_of
from ladderize.convert.point_sensitivity import PointSensitivity
from ladderize.convert.read_sensitivity import read_point_sensitivity
from ladderize.convert.sensitivity_file import AlignmentWindows
from ladderize.errors import UserError
from ladderize.eval.results import EvalResults, Perplexity
from ladderize.files.documents import read_document
from ladderize.files.regular import inside, resolved
from ladderize.layout import DROPPED, Layout
from ladderize.planning.plans.document import LayoutNll
from ladderize.planning.plans.layout_space import LAYER_OPTIONS
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
    path: Path, num_layers: int, fingerprint: str | None, sync_tp_size: int | None
) -> RetrainedCosts:
    """Read the perplexities of a sweep; arguments as of ``read_plan_costs``. path: its folder, or sweep.json. Layouts
    that were made for another sync_tp_size are left out; None keeps all.

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
            folder = inside(path.parent, point.model) if point.model is not None else None
            model = str(folder) if folder is not None else point.model
            found.append(RetrainedLayout(point.name, model, layout, _cost(path, point, own, base)))
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


@dataclass(frozen=True)
class AccuracyCosts:
    """Estimated costs in nats per token: nats [L, 6], inf where an option was not measured and is not offered, and
    pairs [L - 1, 6, 6], as ``LayoutSpace`` has them. dense_nll: of the dense model, on the same windows. aligned: on
    what each changed model was aligned before."""

    file: str
    nats: np.ndarray
    pairs: np.ndarray
    dense_nll: float
    sync_tp_size: int | None
    notes: list[str]
    aligned: AlignmentWindows | None = None


def read_accuracy_costs(
    path: Path, num_layers: int, fingerprint: str | None, sync_tp_size: int | None
) -> AccuracyCosts:
    """Read a sensitivity file of single changes; arguments as of ``read_plan_costs``.

    Raises UserError for another model's, or another number of virtual ranks.
    """
    sensitivity = read_point_sensitivity(path)
    if sensitivity.num_layers != num_layers:
        raise UserError(
            f"{path} is of a model of {sensitivity.num_layers} layers, but this one has {num_layers}; measure this"
            " model"
        )
    if fingerprint is not None and sensitivity.fingerprint != fingerprint:
        raise UserError(f"{path} was measured on another model (their fingerprints differ); measure this one")
    if sync_tp_size is not None and sync_tp_size != sensitivity.sync_tp_size:
        measured = (
            f"was measured with sync_tp_size {sensitivity.sync_tp_size}"
            if sensitivity.sync_tp_size is not None
            else "has no dropped sync points"
        )
        raise UserError(
            f"{path} {measured}, so it does not apply to --sync-tp-size {sync_tp_size}; measure it again with that"
        )
    return estimate_costs(sensitivity, str(path))


def estimate_costs(sensitivity: PointSensitivity, file: str) -> AccuracyCosts:
    """Costs of options from what single changes cost, and of pairs from what two neighbours cost together.

    A cost below 0 counts as 0, as in ``convert --max-ppl-increase``: a change that takes a sum of partials away helps
    by noise, and no speed is bought with that. For the same reason neighbours together cost at least what the dearer
    costs alone. Pairs that were not measured cost nothing more.
    """
    layers, count = sensitivity.num_layers, len(LAYER_OPTIONS)
    nats = np.full((layers, count), np.inf)
    nats[:, 0] = 0.0
    for cost in sensitivity.costs:
        if len(cost.layers) == 1:
            (layer,) = cost.layers
            nats[layer, LAYER_OPTIONS.index(cost.steps[0])] = max(cost.nats, 0.0)
    pairs = np.zeros((layers - 1, count, count))
    for cost in sensitivity.costs:
        if len(cost.layers) == 2:
            options = [LAYER_OPTIONS.index(step) for step in cost.steps]
            alone = [nats[layer, option] for layer, option in zip(cost.layers, options, strict=True)]
            if np.isfinite(alone).all():
                pairs[cost.layers[0], options[0], options[1]] = max(cost.nats, *alone) - sum(alone)
    notes = []
    if not sensitivity.pairs:
        notes.append("no pairs of neighbours were measured, so estimated costs are sums over layers")
    if not np.isfinite(nats[:, [i for i, (_, mode) in enumerate(LAYER_OPTIONS) if mode == DROPPED]]).any():
        notes.append("the sensitivity file has no costs of dropped sync points, so none is dropped")
    return AccuracyCosts(file, nats, pairs, sensitivity.dense_nll, sensitivity.sync_tp_size, notes, sensitivity.aligned)


@dataclass(frozen=True)
class PlanCosts:
    """What is known of the accuracy: of single changes, of the layouts of a sweep, or of both. sync_tp_size: of the
    layouts with dropped sync points, which their times depend on; None where none can be dropped."""

    points: AccuracyCosts | None
    retrained: RetrainedCosts | None
    sync_tp_size: int | None


def read_plan_costs(
    sensitivity: Path | None,
    sweep: Path | None,
    *,
    num_layers: int,
    fingerprint: str | None,
    sync_tp_size: int | None,
) -> PlanCosts:
    """Read a sensitivity file of single changes, a sweep (its folder, or sweep.json), or both.

    fingerprint: of the dense model; None where there is only its shape. sync_tp_size: the one that is wanted; None for
    that of the files.

    Raises UserError for files of another model or sync size, and for a sweep of several without one that is wanted.
    """
    points = retrained = None
    if sensitivity is not None:
        points = read_accuracy_costs(sensitivity, num_layers, fingerprint, sync_tp_size)
        sync_tp_size = points.sync_tp_size if sync_tp_size is None else sync_tp_size
    if sweep is not None:
        retrained = read_retrained_costs(sweep, num_layers, fingerprint, sync_tp_size)
        if sync_tp_size is None and len(sizes := retrained.sync_tp_sizes) > 1:
            raise UserError(
                f"{retrained.file} has layouts of sync_tp_size {' and '.join(map(str, sizes))}; say with"
                " --sync-tp-size which are meant"
            )
        if sync_tp_size is not None and points is None and not retrained.sync_tp_sizes:
            raise UserError(
                f"--sync-tp-size {sync_tp_size} has no effect: no layout of {retrained.file} drops sync points of so"
                " many virtual ranks; leave it out"
            )
        sync_tp_size = next(iter(retrained.sync_tp_sizes), sync_tp_size)
    return PlanCosts(points, retrained, sync_tp_size)
