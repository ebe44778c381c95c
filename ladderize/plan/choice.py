"""The choice of the fastest layout within a budget of accuracy, by estimated or by measured costs. Imports no torch.

Times add up over layers, because each wait comes right after the next sub-module; estimated costs in accuracy are added
up, too. So the best layout is the solution of an integer program: one kind for each layer, at most so costly.

Real costs are more than sums. With measurements, the program is solved again and again: a layout that was measured is
cut off, and the costs of layers become those nearest to the estimates that add up to all that was measured (ridge
regression). Finally the best is measured on held-out windows. If it costs more than the budget there, that counts as
its cost, and the search goes on.

An accuracy cost is the increase of the mean negative log-likelihood of a token over the dense model's, in nats. The
perplexity is exp(cost) times the dense one's.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
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
SPREAD = 0.5  # of a layer's real cost about its estimate, and of all costs together about theirs, as a part of them
NOISE = 0.02  # of a layout's cost about the sum of its layers'
SOLVER_GAP, SOLVER_SECONDS = 1e-3, 10.0  # the gap to the best that is enough, and the time after which the solver stops
WORTH_TRYING = 1.2  # times the budget: costlier layouts are not measured once one is within it
Kinds = tuple[int, ...]  # a layout: for each layer the place of its kind in LAYER_KINDS
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
    """A layout with its speed and its costs.

    speedup: over the dense layout, end to end.
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
    def cost_words(self) -> str:
        """``+1.20% estimated, +1.43% measured, +1.51% (standard error 0.30) on 16 held-out windows``."""
        words = [f"{shown_increase(self.estimated_nats)} estimated"]
        if self.measured is not None:
            words.append(f"{shown_increase(self.measured.nats)} measured")
        if (one := self.held_out) is not None:
            error = 100 * math.exp(min(one.nats, 30.0)) * (one.stderr or 0.0)
            sure = "" if one.stderr is None else f" (standard error {error:.2f})"
            words.append(f"{shown_increase(one.nats)}{sure} on {one.windows} held-out windows")
        else:
            words.append("not verified")
        return ", ".join(words)


@dataclass(frozen=True)
class PlanChoice(Record):
    """The fastest layout within the budget.

    max_nats: the budget.
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
    def dense_seconds(self) -> float:
        """The seconds of the layers of the dense layout."""
        return float(self.seconds[:, 0].sum())

    def total(self, table: np.ndarray, kinds: Sequence[int]) -> float:
        """Return the sum over the layers of a layout."""
        return float(table[np.arange(len(table)), list(kinds)].sum())

    def speedup(self, kinds: Sequence[int]) -> float:
        """Return the speed-up over the dense layout."""
        return (self.constant + self.dense_seconds) / (self.constant + self.total(self.seconds, kinds))

    def layout(self, kinds: Sequence[int]) -> Layout:
        entering, attention = zip(*(KIND_STEPS[LAYER_KINDS[kind]] for kind in kinds), strict=True)
        mlp = (*entering[1:], BLOCKING)
        return Layout(attention, mlp, self.sync_tp_size if {*APART} & {*attention, *mlp} else None)

    def described(
        self, kinds: Sequence[int], measured: LayoutCost | None = None, held_out: LayoutCost | None = None
    ) -> PlannedLayout:
        """Return the layout with its speed and its costs."""
        layout = self.layout(kinds)
        return PlannedLayout(
            layout=str(layout),
            **layout.to_config(),
            speedup=self.speedup(kinds),
            estimated_nats=self.total(self.nats, kinds),
            measured=measured,
            held_out=held_out,
        )


def kind_seconds(
    parts: Mapping[str, PassParts], passes: Mapping[str, int], num_layers: int
) -> tuple[float, np.ndarray]:
    """Return the seconds of a batch: those that all layouts have, and those of each kind of each layer [L, kinds].

    parts, passes: by phase, the parts of one pass, and the number of passes.
    """
    constant = sum(count * (parts[name].rest + parts[name].vocabulary) for name, count in passes.items())

    def seconds(layer: int, kind: str) -> float:
        entering, mode = KIND_STEPS[kind]
        entering = entering if layer else BLOCKING  # no MLP enters the first
        return sum(count * predict_layer(parts[name], entering, mode).total for name, count in passes.items())

    return constant, np.array([[seconds(layer, kind) for kind in LAYER_KINDS] for layer in range(num_layers)])


# ---- the integer program ----


def solve(
    least: np.ndarray, bounded: np.ndarray, bound: float, offered: np.ndarray, cuts: Sequence[Sequence[int]] = ()
) -> Kinds | None:
    """Return the layout with the least sum over ``least``, of those whose sum over ``bounded`` is at most ``bound``.

    least, bounded: [L, kinds], finite and at least 0.
    offered: booleans [L, kinds].
    cuts: layouts that are excluded.

    Returns None where there is none.
    """
    from scipy.optimize import Bounds, LinearConstraint, milp

    layers, kinds = least.shape
    offered = offered & (bounded <= bound)
    parts = np.where(offered, bounded, 0.0) / max(bound, 1e-300)
    rows = [LinearConstraint(np.kron(np.eye(layers), np.ones(kinds)), 1, 1)]  # one kind for each layer
    rows += [LinearConstraint(_indicator(cut, kinds), -np.inf, layers - 1) for cut in cuts]
    most = 1.0
    while True:
        result = milp(
            least.ravel() / max(float(np.abs(least).max()), 1e-300),
            constraints=[*rows, LinearConstraint(parts.ravel(), -np.inf, most)],
            integrality=np.ones(least.size),
            bounds=Bounds(0, offered.ravel().astype(float)),
            options={"mip_rel_gap": SOLVER_GAP, "time_limit": SOLVER_SECONDS},
        )
        if result.x is None:
            return None
        found = tuple(result.x.reshape(layers, kinds).argmax(1).tolist())
        over = float(bounded[range(layers), found].sum()) / max(bound, 1e-300) - 1
        if over <= 0:
            return found
        most -= max(over, ROUNDING)  # the solver rounds


def _indicator(layout: Sequence[int], kinds: int) -> np.ndarray:
    """Return a vector [L * kinds] with 1 for the kind of each layer, and 0 elsewhere."""
    return np.eye(kinds)[list(layout)].ravel()


def refitted(nats: np.ndarray, measured: Mapping[Kinds, float]) -> np.ndarray:
    """Return the costs of layers that are nearest to the estimates and add up to the measured costs.

    This is a ridge regression on the kinds of layers. Their costs may be off by SPREAD each, and by SPREAD all
    together.

    nats: [L, kinds], finite.
    measured: the real costs of layouts.
    """
    if not measured:
        return nats
    rows, estimates = np.stack([_indicator(one, nats.shape[1]) for one in measured]), nats.ravel()
    spread = SPREAD**2 * (np.diag(estimates**2) + np.outer(estimates, estimates))
    sums = rows @ estimates
    scatter = rows @ spread @ rows.T + np.diag((NOISE * sums) ** 2 + 1e-12)
    change = spread @ rows.T @ np.linalg.solve(scatter, np.array([*measured.values()]) - sums)
    return np.maximum(estimates + change, 0.0).reshape(nats.shape)


def _faster_layouts(
    tables: LayerTables, nats: np.ndarray, budget: float, most_seconds: float, cuts: Sequence[Kinds] = ()
) -> tuple[Kinds | None, Kinds | None]:
    """Return the fastest layout within the budget, and if there is none, the least costly one; both faster than
    ``most_seconds``.

    nats: [L, kinds], finite.
    cuts: layouts that are excluded.
    """
    offered, seconds, bound = np.isfinite(tables.nats), tables.seconds, most_seconds * (1 - ROUNDING)
    fastest = solve(seconds, nats, budget, offered, cuts)
    if fastest is not None and tables.total(seconds, fastest) < bound:
        return fastest, None
    return None, solve(nats, seconds, bound, offered, cuts)


# ---- the choice ----


def choose_layout(
    tables: LayerTables,
    budget: float,
    measure: MeasureLayout | None = None,
    limit: int = 0,
    *,
    console: Console = SILENT,
) -> PlanChoice:
    """Return the fastest layout within the budget, by estimated costs, or by at most ``limit`` measurements.

    budget: nats.

    Raises UserError where no layout that is faster than the dense one is within the budget.
    """
    nats = np.where(np.isfinite(tables.nats), tables.nats, 0.0)
    chosen, cheapest = _faster_layouts(tables, nats, budget, tables.dense_seconds)
    if chosen is None:
        if cheapest is None:
            raise UserError(
                "no layout is faster than the dense one on this hardware with this workload: do not convert"
            )
        least = shown_increase(tables.total(nats, cheapest), 3)
        raise UserError(
            f"no layout that is faster than the dense one is within the budget of {shown_increase(budget, 3)}"
            f" perplexity; the least increase is estimated at {least}, so give a larger one"
        )
    if measure is None:
        return PlanChoice(budget, tables.described(chosen))
    return _measured_choice(tables, budget, chosen, measure, limit, console)


def _measured_choice(
    tables: LayerTables, budget: float, candidate: Kinds | None, measure: MeasureLayout, limit: int, console: Console
) -> PlanChoice:
    """Return the best layout that at most ``limit`` measurements find, ``candidate`` first.

    Its measured cost is within the budget on the windows that it was chosen by, and on held-out ones where those were
    measured.
    """
    measured: dict[bool, dict[Kinds, LayoutCost]] = {False: {}, True: {}}  # by held_out
    costs: dict[Kinds, float] = {}  # on held-out windows where they were measured there
    dearer = 1.0  # the factor by which layouts cost more on held-out windows, as far as it is known
    best: Kinds | None = None
    for number in range(1, limit + 1):
        held_out = best is not None and (candidate is None or number == limit)
        kinds = best if held_out else candidate
        if kinds is None or kinds in measured[held_out]:
            break
        layout = tables.layout(kinds)
        cost = measured[held_out][kinds] = measure(layout, held_out)
        where = " on held-out windows" if held_out else f" (estimated {tables.total(tables.nats, kinds):+.4f})"
        console.note(f"{number} of {limit}: {layout}: {tables.speedup(kinds):.3f}x, {cost.nats:+.4f} nats{where}")
        if held_out and cost.nats <= budget:
            break
        if held_out:
            dearer = max(dearer, cost.nats / max(measured[False][kinds].nats, LEAST_NATS))
        costs = {one: dearer * cost.nats for one, cost in measured[False].items()}
        costs |= {one: cost.nats for one, cost in measured[True].items()}
        within = [(tables.total(tables.seconds, one), cost, one) for one, cost in costs.items() if cost <= budget]
        best = min(within)[-1] if within else None
        candidate = _next_candidate(tables, costs, budget, best)
    if best is None:
        raise UserError(
            f"none of the {len(costs)} layouts that were measured stays within the budget ({budget:.4f} nats) on all"
            f" windows; the least increase is {min(costs.values()):.4f} nats, so give a larger budget, or a larger"
            " --verify"
        )
    tried = {one: tables.described(one, cost, measured[True].get(one)) for one, cost in measured[False].items()}
    return PlanChoice(budget, tried[best], list(tried.values()))


def _next_candidate(
    tables: LayerTables, costs: Mapping[Kinds, float], budget: float, best: Kinds | None
) -> Kinds | None:
    """Return the next layout to measure, better than the best by the costs so far; None: there is none."""
    estimates = np.maximum(np.where(np.isfinite(tables.nats), tables.nats, 0.0), LEAST_NATS)
    estimates[:, 0] = 0.0
    nats = refitted(estimates, costs)
    most_seconds = tables.dense_seconds if best is None else tables.total(tables.seconds, best)
    fastest, cheapest = _faster_layouts(tables, nats, budget, most_seconds, list(costs))
    dearest = math.inf if best is None else budget * WORTH_TRYING
    if cheapest is not None and tables.total(nats, cheapest) > dearest:
        return None
    return fastest or cheapest


def shown_increase(nats: float, digits: int = 2) -> str:
    """Return an increase of the perplexity in per cent, with its sign."""
    return f"{100 * math.expm1(min(nats, 30.0)):+.{digits}f}%"
