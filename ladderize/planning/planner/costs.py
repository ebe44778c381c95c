"""What options of layers cost in accuracy, as far as a sensitivity file knows. Imports no torch."""

from dataclasses import dataclass
from pathlib import Path

import numpy as np

from ladderize.convert.point_sensitivity import PointSensitivity, read_point_sensitivity
from ladderize.convert.sensitivity_file import AlignmentWindows
from ladderize.errors import UserError
from ladderize.layout import DROPPED
from ladderize.planning.planner.front import LAYER_OPTIONS


@dataclass(frozen=True)
class AccuracyCosts:
    """Estimated costs in nats per token: nats [L, 6], inf where an option was not measured and is not offered, and
    pairs [L - 1, 6, 6], as ``OptionCosts`` has them. dense_nll: of the dense model, on the same windows. aligned: on
    what each changed model was aligned before."""

    file: str
    nats: np.ndarray
    pairs: np.ndarray
    dense_nll: float
    sync_tp_size: int | None
    notes: list[str]
    aligned: AlignmentWindows | None = None


def read_accuracy_costs(
    path: Path, *, num_layers: int, fingerprint: str | None, sync_tp_size: int | None
) -> AccuracyCosts:
    """Read a sensitivity file of single changes. fingerprint: of the model; None where there is only its shape.
    sync_tp_size: the one that is wanted; None for the file's.

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
