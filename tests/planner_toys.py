"""Random models for the planner's tests: times and costs of options, sensitivity files, truths to measure."""

import itertools
import math

import numpy as np

from ladderize.convert.point_sensitivity import PointCost, PointSensitivity, point_changes
from ladderize.convert.sensitivity_file import CalibrationData
from ladderize.files.documents import write_json
from ladderize.layout import BLOCKING, DROPPED, OVERLAPPED, Layout
from ladderize.planning.passes import PointSeconds
from ladderize.planning.plans.document import LayoutNll
from ladderize.planning.plans.layout_space import LAYER_OPTIONS, LayoutSpace, chosen_options
from ladderize.planning.plans.options import ChoiceTarget
from ladderize.workflows.sweep_document import SweepDocument, SweepPoint

NATS = np.array([0, 0.4, 1.0, 0.3, 0.8, 1.5])  # of the options, about, next to each other


def all_options(layers):
    """Every layout of so many layers, as options."""
    return itertools.product(range(3), *[range(6)] * (layers - 1))


def random_seconds():
    """Of the options of a layer: what is hidden is saved, a dropped one costs nothing but some compute."""
    attention, mlp, message = np.random.uniform(0.2, 1, 3) * 1e-4
    apart = np.random.uniform(0, 0.2) * message
    seconds = {}
    for entering, mode in LAYER_OPTIONS:
        waited = message - (min(message, attention) if entering == OVERLAPPED else 0)
        waited += {BLOCKING: message, OVERLAPPED: message - min(message, mlp), DROPPED: apart}[mode]
        seconds[entering, mode] = attention + mlp + waited
    return np.array([seconds[option] for option in LAYER_OPTIONS])


def pass_seconds():
    """Of both phases, as the time model gives them."""
    return {
        phase: PointSeconds(
            float(np.random.uniform(0, 1e-3)), dict(zip(LAYER_OPTIONS, random_seconds().tolist(), strict=True))
        )
        for phase in ("prefill", "decode")
    }


def target_of(max_ppl_increase=None, min_speedup=None, dense_nll=0.0):
    return ChoiceTarget(max_ppl_increase, None, min_speedup).in_nats(dense_nll)


def random_space(layers, *, alike, offered=1.0, pairs=True, constant=0.0):
    """alike: all layers take the same time. offered: the part of options that are."""
    seconds = np.tile(random_seconds(), (layers, 1)) if alike else np.random.uniform(0, 1e-3, (layers, 6))
    nats = np.random.lognormal(-3, 1, (layers, 1)) * NATS * np.random.uniform(0.5, 2, (layers, 6))
    nats[np.random.random((layers, 6)) > offered] = math.inf
    nats[0, 3:], nats[:, 0] = math.inf, 0.0
    between = np.random.normal(0.01, 0.02, (layers - 1, 6, 6)) * pairs
    between[:, 0], between[:, :, 0] = 0, 0
    between = np.maximum(between, 0) if not alike else between
    return LayoutSpace(seconds, nats, between, constant, 2)


def sensitivity_of(layers, *, sync_tp_size, pairs):
    """A random points file: some costs are below 0, as noise makes them."""
    dense_nll = float(np.random.uniform(0.5, 2))
    scale = np.random.lognormal(-3, 0.7, layers)
    costs = []
    for change in point_changes(layers, dropped=sync_tp_size is not None, pairs=pairs):
        option = LAYER_OPTIONS.index((change.entering, change.attention))
        nats = float(scale[list(change.layers)].sum() * NATS[option] * np.random.uniform(0.6, 1.5))
        nats *= (1.3 if len(change.layers) == 2 else 1) * (-0.05 if np.random.random() < 0.1 else 1)
        costs.append(
            PointCost(
                **vars(change), nats=nats, low=nats - 0.01, high=nats + 0.01, perplexity=math.exp(dense_nll + nats)
            )
        )
    return PointSensitivity(
        model="model",
        fingerprint="this",
        layout=f"{layers} layers: dense",
        parameters=1000,
        data=CalibrationData("ids.npz", "0" * 64, 8, 16, 0),
        mode="points",
        sync_tp_size=sync_tp_size,
        dtype="float32",
        complete=True,
        num_layers=layers,
        pairs=pairs,
        interval=0.95,
        dense_nll=dense_nll,
        costs=costs,
        nll=[[15 * (dense_nll + nats) for nats in (*(cost.nats for cost in costs), 0.0)]] * 8,
    )


def sweep_point(name, layout, *, model, results, adapted="none"):
    """A point of a sweep that was evaluated."""
    return SweepPoint(
        name=name,
        layout=str(layout),
        **layout.to_config(),
        adapted=adapted,
        tokens=None,
        model=model,
        results=results,
        adaptation=None,
        stages=[],
    )


def write_sweep_document(folder, model, points):
    """sweep.json of a sweep that is done."""
    document = SweepDocument(
        model=str(model),
        command="ladderize sweep",
        complete=True,
        margin=1.0,
        points=points,
        stages=[],
        sensitivities=[],
        benches=[],
    )
    write_json(folder / "sweep.json", document.to_dict())
    return document


class FakeMeasurer:
    """Exact costs by a formula, which are more than sums. held_out: a factor of costs on held-out windows.
    blind: the others say nothing of any cost. stderr: of each, as is said.

    Keeps what it was asked for, and measures nothing twice, as the real one does."""

    def __init__(self, costs, *, convexity=None, pairs=0.3, held_out=1.0, blind=False, stderr=0.0):
        self.costs, self.held_out, self.blind, self.stderr = costs, held_out, blind, stderr
        self.convexity = np.random.uniform(0, 1) if convexity is None else convexity
        self.extra = np.abs(np.random.normal(0, pairs, (6, 6)))
        self.asked: list[tuple[Layout, bool]] = []

    def truth(self, chosen):
        layers, options = np.arange(len(chosen)), np.asarray(chosen)
        single = self.costs.nats[layers, options]
        between = np.sqrt(single[:-1] * single[1:]) * self.extra[options[:-1], options[1:]]
        return float(single.sum() + between.sum() + self.convexity * single.sum() ** 2)

    def measure(self, layout, held_out):
        self.asked.append((layout, held_out))
        factor = self.held_out if held_out else 0.0 if self.blind else 1.0
        increase = factor * self.truth(chosen_options(layout))
        return LayoutNll(1.5 + increase, 0.02, increase, self.stderr, 32)
