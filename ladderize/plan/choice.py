"""The choice of the fastest layout within a budget of accuracy, by estimated or by measured costs. Imports no torch.

Times add up over layers, because each wait comes right after the next sub-module; estimated costs in accuracy are added
up, too. So the best layout is the solution of an integer program: one kind for each layer, at most so costly.

Real costs are more or less than sums. With measurements, the program is solved again without the layouts that were
measured, and with the median of real over estimated costs so far. Finally the best is measured on held-out windows. If
it costs more than the budget there, that counts as its cost, and the search goes on.
"""

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, replace

import numpy as np

from ladderize.console import SILENT, Console
from ladderize.convert.sensitivity_file import LAYER_CHANGES
from ladderize.errors import UserError
from ladderize.layout import APART, BLOCKING, LAYER_KINDS, Layout
from ladderize.plan.passes import PassParts, predict_layer
from ladderize.plan.rows import LayoutCost, PlanChoice, PlannedLayout, shown_increase

KINDS = ("dense", *LAYER_CHANGES)  # of layers, in the order of all tables
ROUNDING = 1e-5  # times that differ by no larger part are the same; the solver keeps bounds to 1e-6
LEAST_NATS = 1e-4  # of a changed layer, so that layers whose estimates say nothing can be told apart by measurements
SOLVER_GAP, SOLVER_SECONDS = 1e-3, 10.0  # the gap to the best that is enough, and the time after which the solver stops
WORTH_TRYING = 1.2  # times the budget: costlier layouts are not measured once one is within it
Kinds = tuple[int, ...]  # a layout: for each layer the index of its kind in KINDS
MeasureLayout = Callable[[Layout, bool], LayoutCost]  # True: on held-out windows, by which nothing is chosen


@dataclass(frozen=True)
class LayerTables:
    """The seconds and the estimated costs of each kind of each layer: [L, kinds] in the order of KINDS."""

    seconds: np.ndarray
    nats: np.ndarray  # inf where a kind is not offered
    constant: float  # the other seconds, which all layouts have
    sync_tp_size: int | None  # virtual ranks of delayed and dropped sync points

    @property
    def dense(self) -> Kinds:
        return (0,) * len(self.seconds)

    def speedup(self, kinds: Kinds) -> float:
        return (self.constant + total(self.seconds, self.dense)) / (self.constant + total(self.seconds, kinds))

    def layout(self, kinds: Kinds) -> Layout:
        attention, entering = zip(*(LAYER_KINDS[KINDS[kind]] for kind in kinds), strict=True)
        mlp = (*entering[1:], BLOCKING)
        return Layout(attention, mlp, self.sync_tp_size if {*APART} & {*attention, *mlp} else None)

    def planned(self, kinds: Kinds) -> PlannedLayout:
        layout, speedup = self.layout(kinds), self.speedup(kinds)
        return PlannedLayout(str(layout), **layout.to_config(), speedup=speedup, estimated_nats=total(self.nats, kinds))


def total(table: np.ndarray, kinds: Kinds) -> float:
    """Return the sum of a table [L, kinds] over the layers of a layout."""
    return float(table[np.arange(len(table)), list(kinds)].sum())


def kind_seconds(times: Mapping[str, PassParts], passes: Mapping[str, int], layers: int) -> tuple[float, np.ndarray]:
    """Return the seconds of a batch: those that all layouts have, and those of each kind of each layer [L, kinds]."""
    constant, seconds = 0.0, np.zeros((layers, len(KINDS)))
    for phase, count in passes.items():
        constant += count * (times[phase].rest + times[phase].vocabulary)
        for number, kind in enumerate(KINDS):
            mode, entering = LAYER_KINDS[kind]
            seconds[0, number] += count * predict_layer(times[phase], BLOCKING, mode).total  # no MLP enters the first
            seconds[1:, number] += count * predict_layer(times[phase], entering, mode).total
    return constant, seconds


def solve(least: np.ndarray, bounded: np.ndarray, bound: float, excluded: Collection[Kinds] = ()) -> Kinds | None:
    """Return the layout with the least sum over ``least``, of those whose sum over ``bounded`` is at most ``bound``.
    Both are [L, kinds], at least 0, and the bound is above 0; ``least`` is inf where a kind is not offered."""
    from scipy.optimize import Bounds, LinearConstraint, milp

    layers, kinds = least.shape
    offered = np.isfinite(least) & (bounded <= bound)
    objective = np.where(offered, least, 0.0).ravel()
    shares = np.where(offered, bounded, 0.0).ravel() / bound
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
        over = total(bounded, layout) / bound - 1
        if over <= 0:
            return layout
        most -= max(over, ROUNDING)  # the solver rounds


def choose_layout(
    tables: LayerTables, budget: float, measure: MeasureLayout | None = None, limit: int = 0, console: Console = SILENT
) -> PlanChoice:
    """Return the fastest layout within the budget in nats, by estimated costs, or by at most ``limit`` measurements.
    One that is no faster than the dense one is refused."""
    candidate = _next_layout(tables, tables.nats, budget, tables.dense)
    if candidate is None:
        raise UserError("no layout is faster than the dense one on this hardware with this workload: do not convert")
    least = total(tables.nats, candidate)
    if least > budget:
        raise UserError(
            f"no layout that is faster than the dense one is within the budget of {shown_increase(budget, 3)}"
            f" perplexity; the least increase is estimated at {shown_increase(least, 3)}, so give a larger one"
        )
    if measure is None:
        return PlanChoice(budget, tables.planned(candidate))
    estimates = np.maximum(tables.nats, LEAST_NATS)
    estimates[:, 0] = 0.0
    measured: dict[Kinds, LayoutCost] = {}
    held_out: dict[Kinds, LayoutCost] = {}
    costs: dict[Kinds, float] = {}
    best: Kinds | None = None
    for number in range(1, limit + 1):
        is_last = best is not None and (candidate is None or number == limit)
        kinds = best if is_last else candidate
        if kinds is None:
            break
        layout, windows = tables.layout(kinds), held_out if is_last else measured
        cost = windows[kinds] = measure(layout, is_last)
        where = "on held-out windows" if is_last else f"(estimated {total(tables.nats, kinds):+.4f})"
        console.note(f"{number} of {limit}: {layout}: {tables.speedup(kinds):.3f}x, {cost.nats:+.4f} nats {where}")
        if is_last and cost.nats <= budget:
            break
        # on held-out windows; where these are unknown, as much above the measured as was seen at most
        factor = max([1.0, *(cost.nats / max(measured[kinds].nats, LEAST_NATS) for kinds, cost in held_out.items())])
        costs = {kinds: factor * cost.nats for kinds, cost in measured.items()}
        costs |= {kinds: cost.nats for kinds, cost in held_out.items()}
        within = [kinds for kinds, nats in costs.items() if nats <= budget]
        best = max(within, key=lambda kinds: (tables.speedup(kinds), -costs[kinds]), default=None)
        ratios = [nats / total(estimates, kinds) for kinds, nats in costs.items()]
        expected = max(float(np.median(ratios)), LEAST_NATS) * estimates  # a noisy cost may be below 0
        candidate = _next_layout(tables, expected, budget, best or tables.dense, measured)
        if best and candidate and total(expected, candidate) > WORTH_TRYING * budget:
            candidate = None
    if best is None:
        raise UserError(
            f"none of the {len(costs)} layouts that were measured stays within the budget ({budget:.4f} nats) on all"
            f" windows; the least increase is {min(costs.values()):.4f} nats, so give a larger budget, or a larger"
            " --verify"
        )
    tried = {kinds: replace(tables.planned(kinds), measured=cost) for kinds, cost in measured.items()}
    tried |= {kinds: replace(tried[kinds], held_out=cost) for kinds, cost in held_out.items()}
    return PlanChoice(budget, tried[best], list(tried.values()))


def _next_layout(
    tables: LayerTables, nats: np.ndarray, budget: float, slower: Kinds, excluded: Collection[Kinds] = ()
) -> Kinds | None:
    """Return the fastest layout within the budget, else the least costly, if it is faster than ``slower``."""
    most_seconds = total(tables.seconds, slower) * (1 - ROUNDING)
    fastest = solve(tables.seconds, nats, budget, excluded)
    if fastest is not None and total(tables.seconds, fastest) < most_seconds:
        return fastest
    return solve(nats, tables.seconds, most_seconds, excluded)
