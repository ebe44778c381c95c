"""The choice of the fastest layout within a budget of accuracy, by estimated or by measured costs. Imports no torch.

Times add up over layers, because each wait comes right after the next sub-module; estimated costs in accuracy are added
up, too. So the best layout is the solution of an integer program: one kind for each layer, at most so costly.

Real costs are more or less than sums. With measurements, the program is solved again without the layouts that were
measured, and with the median of real over estimated costs so far. Finally the best is measured on held-out windows. If
it costs more than the budget there, that counts as its cost, and the search goes on.

An accuracy cost is the increase of the mean negative log-likelihood of a token over the dense model's, in nats. The
perplexity is exp(cost) times the dense one's.
"""

import math
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field, replace
from typing import ClassVar

import numpy as np

from ladderize.console import SILENT, Console
from ladderize.convert.sensitivity_file import AlignmentWindows
from ladderize.errors import UserError
from ladderize.files.records import Record
from ladderize.layout import APART, BLOCKING, DELAYED, DROPPED, OVERLAPPED, Layout
from ladderize.plan.passes import PassParts, predict_layer

# kinds of layers: the mode of the MLP sync point that enters one, and of its own attention sync point
KIND_STEPS = {
    "dense": (BLOCKING, BLOCKING),
    "ladder": (OVERLAPPED, OVERLAPPED),
    "delayed": (DELAYED, DELAYED),
    "spd": (BLOCKING, DROPPED),
    "spd+ladder": (OVERLAPPED, DROPPED),
}
LAYER_KINDS = tuple(KIND_STEPS)
ROUNDING = 1e-5  # times that differ by no larger part are the same; the solver keeps bounds to 1e-6
LEAST_NATS = 1e-4  # of a changed layer, so that layers whose estimates say nothing can be told apart by measurements
SOLVER_GAP, SOLVER_SECONDS = 1e-3, 10.0  # the gap to the best that is enough, and the time after which the solver stops
WORTH_TRYING = 1.2  # times the budget: costlier layouts are not measured once one is within it
Kinds = tuple[int, ...]  # a layout: for each layer the index of its kind in LAYER_KINDS
MeasureLayout = Callable[[Layout, bool], "LayoutCost"]  # True: on held-out windows, by which nothing is chosen


@dataclass(frozen=True)
class LayoutCost(Record):
    """The measured cost of a layout on so many windows, in nats per token.

    stderr: the standard error, paired with the dense model by window; a single window has none.
    """

    nats: float
    stderr: float | None
    windows: int


@dataclass(frozen=True)
class PlannedLayout(Record):
    """A layout with its speed-up over the dense one, end to end, and its costs.

    estimated_nats: the sum of the costs of its layers.
    measured: on the windows that it was chosen on.
    held_out: on other windows.
    """

    layout: str
    attention_sync: list[str]
    mlp_sync: list[str]
    sync_tp_size: int | None
    speedup: float
    estimated_nats: float
    measured: LayoutCost | None = None
    held_out: LayoutCost | None = None

    @property
    def as_layout(self) -> Layout:
        return Layout(tuple(self.attention_sync), tuple(self.mlp_sync), self.sync_tp_size)

    @property
    def cost_sentence(self) -> str:
        """``+1.20% estimated, +1.43% measured, +1.51% (standard error 0.30) on 16 held-out windows``."""
        costs = [f"{shown_increase(self.estimated_nats)} estimated"]
        if self.measured is not None:
            costs.append(f"{shown_increase(self.measured.nats)} measured")
        if self.held_out is None:
            return ", ".join([*costs, "not verified"])
        nats, stderr = self.held_out.nats, self.held_out.stderr
        error = "" if stderr is None else f" (standard error {100 * math.exp(min(nats, 30.0)) * stderr:.2f})"
        return ", ".join([*costs, f"{shown_increase(nats)}{error} on {self.held_out.windows} held-out windows"])


@dataclass(frozen=True)
class PlanChoice(Record):
    """The fastest layout within the budget of ``max_nats``.

    measured: the layouts that were measured, in order.
    costs_file: the sensitivity that it was chosen by.
    aligned: the windows that layouts were aligned on before their costs were measured.
    """

    LEFT_OUT: ClassVar = ("aligned",)

    max_nats: float
    chosen: PlannedLayout
    measured: list[PlannedLayout] = field(default_factory=list)
    costs_file: str = ""
    aligned: AlignmentWindows | None = None

    @property
    def is_verified(self) -> bool:
        """True if the choice is within the budget on held-out windows, too."""
        return self.chosen.held_out is not None


@dataclass(frozen=True)
class LayerTables:
    """The seconds and the estimated costs of each kind of each layer.

    seconds, nats: [L, kinds] in the order of LAYER_KINDS; nats is inf where a kind is not offered.
    constant: the other seconds, which all layouts have.
    sync_tp_size: virtual ranks of dropped sync points.
    """

    seconds: np.ndarray
    nats: np.ndarray
    constant: float
    sync_tp_size: int | None

    @property
    def dense(self) -> Kinds:
        return (0,) * len(self.seconds)

    def speedup(self, kinds: Kinds) -> float:
        dense_seconds = total(self.seconds, self.dense)
        return (self.constant + dense_seconds) / (self.constant + total(self.seconds, kinds))

    def layout(self, kinds: Kinds) -> Layout:
        entering, attention = zip(*(KIND_STEPS[LAYER_KINDS[kind]] for kind in kinds), strict=True)
        mlp = (*entering[1:], BLOCKING)
        return Layout(attention, mlp, self.sync_tp_size if {*APART} & {*attention, *mlp} else None)

    def planned(self, kinds: Kinds, measured: LayoutCost | None = None) -> PlannedLayout:
        layout = self.layout(kinds)
        estimated_nats = total(self.nats, kinds)
        return PlannedLayout(
            str(layout), **layout.to_config(), speedup=self.speedup(kinds), estimated_nats=estimated_nats,
            measured=measured,
        )  # fmt: skip


def total(table: np.ndarray, kinds: Kinds) -> float:
    """Return the sum of a table [L, kinds] over the layers of a layout."""
    return float(table[np.arange(len(table)), list(kinds)].sum())


def kind_seconds(
    parts: Mapping[str, PassParts], passes: Mapping[str, int], num_layers: int
) -> tuple[float, np.ndarray]:
    """Return the seconds of a batch: those that all layouts have, and those of each kind of each layer [L, kinds].

    parts, passes: by phase, the parts of one pass, and the number of passes.
    """
    seconds = np.zeros((num_layers, len(LAYER_KINDS)))
    for phase, count in passes.items():
        for kind, (entering, mode) in enumerate(KIND_STEPS.values()):
            seconds[0, kind] += count * predict_layer(parts[phase], BLOCKING, mode).total  # no MLP enters the first
            seconds[1:, kind] += count * predict_layer(parts[phase], entering, mode).total
    constant = sum(count * (parts[phase].rest + parts[phase].vocabulary) for phase, count in passes.items())
    return constant, seconds


def solve(least: np.ndarray, bounded: np.ndarray, bound: float, excluded: Collection[Kinds] = ()) -> Kinds | None:
    """Return the layout with the least sum over ``least``, of those whose sum over ``bounded`` is at most ``bound``;
    None where there is none.

    least, bounded: [L, kinds], at least 0; inf where a kind is not offered.
    """
    from scipy.optimize import Bounds, LinearConstraint, milp

    layers, kinds = least.shape
    offered = np.isfinite(least) & (bounded <= bound)
    objective = np.where(offered, least, 0.0).ravel()
    shares = np.where(offered, bounded, 0.0).ravel() / max(bound, 1e-300)
    rows = [LinearConstraint(np.kron(np.eye(layers), np.ones(kinds)), 1, 1)]  # one kind for each layer
    rows += [LinearConstraint(np.eye(kinds)[list(layout)].ravel(), -np.inf, layers - 1) for layout in excluded]
    most = 1.0
    while True:
        result = milp(
            objective / max(float(objective.max()), 1e-300),
            constraints=[*rows, LinearConstraint(shares, -np.inf, most)],
            integrality=np.ones(least.size),
            bounds=Bounds(0, offered.ravel().astype(float)),
            options={"mip_rel_gap": SOLVER_GAP, "time_limit": SOLVER_SECONDS},
        )
        if result.x is None:
            return None
        layout = tuple(result.x.reshape(layers, kinds).argmax(1).tolist())
        over = total(bounded, layout) / max(bound, 1e-300) - 1
        if over <= 0:
            return layout
        most -= max(over, ROUNDING)  # the solver rounds


def choose_layout(
    tables: LayerTables,
    budget: float,
    measure: MeasureLayout | None = None,
    limit: int = 0,
    *,
    console: Console = SILENT,
) -> PlanChoice:
    """Return the fastest layout within the budget in nats, by estimated costs, or by at most ``limit`` measurements.

    Raises UserError where no layout that is faster than the dense one is within the budget.
    """
    fastest = solve(tables.seconds, tables.nats, budget)
    if fastest is None or not _is_faster(tables, fastest, tables.dense):
        cheapest = _cheapest(tables, tables.nats, tables.dense)
        if cheapest is None:
            raise UserError(
                "no layout is faster than the dense one on this hardware with this workload: do not convert"
            )
        least = shown_increase(total(tables.nats, cheapest), 3)
        raise UserError(
            f"no layout that is faster than the dense one is within the budget of {shown_increase(budget, 3)}"
            f" perplexity; the least increase is estimated at {least}, so give a larger one"
        )
    if measure is None:
        return PlanChoice(budget, tables.planned(fastest))
    return _measured_choice(tables, budget, fastest, measure, limit, console)


def _measured_choice(
    tables: LayerTables, budget: float, fastest: Kinds, measure: MeasureLayout, limit: int, console: Console
) -> PlanChoice:
    """Return the fastest layout that at most ``limit`` measurements find within the budget, ``fastest`` first.

    It is within the budget on the windows that it was chosen by, and on held-out ones where those were measured.
    """
    estimates = np.maximum(tables.nats, LEAST_NATS)
    estimates[:, 0] = 0.0
    candidate: Kinds | None = fastest
    best: Kinds | None = None
    tried: dict[Kinds, PlannedLayout] = {}
    costs: dict[Kinds, float] = {}
    for number in range(1, limit + 1):
        if best is not None and (candidate is None or number == limit):
            kinds, cost, where = best, measure(tables.layout(best), True), " on held-out windows"
            tried[best] = replace(tried[best], held_out=cost)
        elif candidate is not None:
            kinds, cost = candidate, measure(tables.layout(candidate), False)
            tried[candidate] = tables.planned(candidate, cost)
            where = f" (estimated {tried[candidate].estimated_nats:+.4f})"
        else:
            break
        speed = f"{tables.layout(kinds)}: {tried[kinds].speedup:.3f}x"
        console.note(f"{number} of {limit}: {speed}, {cost.nats:+.4f} nats{where}")
        if kinds == best and cost.nats <= budget:
            break
        costs = _real_costs(tried)
        within = [kinds for kinds, nats in costs.items() if nats <= budget]
        best = max(within, key=lambda kinds: (tried[kinds].speedup, -costs[kinds]), default=None)
        ratios = [nats / total(estimates, kinds) for kinds, nats in costs.items()]
        ratio = max(float(np.median(ratios)), LEAST_NATS)  # a noisy cost may be below 0
        candidate = _next_candidate(tables, ratio * estimates, budget, best, tried)
    if best is None:
        raise UserError(
            f"none of the {len(costs)} layouts that were measured stays within the budget ({budget:.4f} nats) on all"
            f" windows; the least increase is {min(costs.values()):.4f} nats, so give a larger budget, or a larger"
            " --verify"
        )
    return PlanChoice(budget, tried[best], list(tried.values()))


def _real_costs(tried: Mapping[Kinds, PlannedLayout]) -> dict[Kinds, float]:
    """Return the costs on held-out windows, so much larger than measured as was seen at most where they are unknown."""
    measured = {kinds: layout.measured.nats for kinds, layout in tried.items() if layout.measured is not None}
    held_out = {kinds: layout.held_out.nats for kinds, layout in tried.items() if layout.held_out is not None}
    factors = [nats / max(measured[kinds], LEAST_NATS) for kinds, nats in held_out.items()]
    dearer = max([1.0, *factors])
    return {kinds: held_out.get(kinds, dearer * nats) for kinds, nats in measured.items()}


def _next_candidate(
    tables: LayerTables, nats: np.ndarray, budget: float, best: Kinds | None, tried: Collection[Kinds]
) -> Kinds | None:
    """Return the next layout to measure, faster than the best: the fastest within the budget, or the least costly."""
    fastest = solve(tables.seconds, nats, budget, tried)
    if fastest is not None and _is_faster(tables, fastest, best or tables.dense):
        return fastest
    cheapest = _cheapest(tables, nats, best or tables.dense, tried)
    if best is not None and cheapest is not None and total(nats, cheapest) > WORTH_TRYING * budget:
        return None
    return cheapest


def _is_faster(tables: LayerTables, kinds: Kinds, other: Kinds) -> bool:
    return total(tables.seconds, kinds) < total(tables.seconds, other) * (1 - ROUNDING)


def _cheapest(tables: LayerTables, nats: np.ndarray, other: Kinds, excluded: Collection[Kinds] = ()) -> Kinds | None:
    """Return the least costly of the layouts that are faster than another; None where there is none."""
    return solve(nats, tables.seconds, total(tables.seconds, other) * (1 - ROUNDING), excluded)


def shown_increase(nats: float, digits: int = 2) -> str:
    """Return an increase of the perplexity in per cent, with its sign."""
    return f"{100 * math.expm1(min(nats, 30.0)):+.{digits}f}%"
