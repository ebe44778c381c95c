"""The choice of the layout that meets a target best, by estimated or by measured costs. Imports no torch.

Times add up over layers, because each wait comes right after the next sub-module; estimated costs in accuracy are added
up, too. So the best layout is the solution of an integer program: one kind for each layer, at most so costly or at
least so fast.

Real costs are more than sums. With measurements, the program is solved again and again: a layout that was measured is
cut off, and the costs of layers become those nearest to the estimates that add up to all that was measured (ridge
regression). Finally the best is measured on held-out windows. If it costs more than the budget there, that counts as
its cost, and the search goes on.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np

from ladderize.console import SILENT, Console
from ladderize.errors import UserError
from ladderize.layout import BLOCKING, DROPPED, OVERLAPPED, Layout
from ladderize.plan.document import LayoutNll, MeasuredCheck, PlannedLayout
from ladderize.plan.options import ChoiceTarget, TimedPhase
from ladderize.plan.passes import PassParts, predict_layer

# kinds of layers: the mode of the MLP sync point that enters one, and of its own attention sync point
KIND_STEPS = {
    "dense": (BLOCKING, BLOCKING),
    "ladder": (OVERLAPPED, OVERLAPPED),
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


class MeasuresLayouts(Protocol):
    """A measurer of real costs.

    held_out: measure on the windows that nothing is chosen by.
    """

    def measure(self, layout: Layout, held_out: bool) -> LayoutNll: ...


@dataclass(frozen=True)
class LayerTables:
    """The seconds and the estimated costs of each kind of each layer.

    seconds, nats: [L, kinds] in the order of LAYER_KINDS; nats is inf where a kind is not offered.
    constant: the other seconds, which all layouts have.
    sync_tp_size: virtual ranks of dropped sync points.

    Layouts are tuples of L places in LAYER_KINDS.
    """

    seconds: np.ndarray
    nats: np.ndarray
    constant: float
    sync_tp_size: int | None

    @property
    def dense(self) -> tuple[int, ...]:
        return (0,) * len(self.nats)

    def total(self, table: np.ndarray, chosen: Sequence[int]) -> float:
        """Return the sum over the layers of a layout."""
        return float(table[np.arange(len(table)), list(chosen)].sum())

    def speedup(self, chosen: Sequence[int]) -> float:
        """Return the speed-up over the dense layout."""
        dense, own = (self.constant + self.total(self.seconds, one) for one in (self.dense, chosen))
        return dense / own

    def layout(self, chosen: Sequence[int]) -> Layout:
        """Return the layout of one kind for each layer."""
        named = {name: [i for i, kind in enumerate(chosen) if name in LAYER_KINDS[kind]] for name in ("ladder", "spd")}
        return Layout.from_layers(len(chosen), **named, sync_tp_size=self.sync_tp_size if named["spd"] else None)

    def described(self, chosen: Sequence[int], costs: Mapping[bool, LayoutNll] | None = None) -> PlannedLayout:
        """Return the layout with its time and its costs.

        costs: measured ones, by held_out.
        """
        layout = self.layout(chosen)
        return PlannedLayout(
            layout=str(layout),
            **layout.to_config(),
            ms=1000 * (self.constant + self.total(self.seconds, chosen)),
            speedup=self.speedup(chosen),
            estimated_nats=self.total(self.nats, chosen),
            measured=(costs or {}).get(False),
            held_out=(costs or {}).get(True),
        )


def kind_seconds(
    parts: Mapping[str, PassParts], decode_steps: int, phase: TimedPhase, num_layers: int
) -> tuple[float, np.ndarray]:
    """Return the seconds of ``phase``: those that all layouts have, and those of each kind of each layer [L, kinds].

    parts: of ``prefill`` and ``decode`` (one step).
    """
    times = {"prefill": 1, "decode": decode_steps} if phase == "end_to_end" else {phase: 1}
    constant = sum(count * (parts[name].rest + parts[name].vocabulary) for name, count in times.items())

    def seconds(layer: int, kind: str) -> float:
        entering, mode = KIND_STEPS[kind]
        entering = entering if layer else BLOCKING  # no MLP enters the first
        return sum(count * predict_layer(parts[name], entering, mode).total for name, count in times.items())

    return constant, np.array([[seconds(layer, kind) for kind in LAYER_KINDS] for layer in range(num_layers)])


# ---- the integer program ----


def solve(
    least: np.ndarray, bounded: np.ndarray, bound: float, offered: np.ndarray, cuts: Sequence[Sequence[int]] = ()
) -> tuple[int, ...] | None:
    """Return the layout with the least sum over ``least``, of those whose sum over ``bounded`` is at most ``bound``.

    least, bounded: [L, kinds], finite.
    offered: booleans [L, kinds].
    cuts: layouts that are excluded.

    Returns None where there is none.
    """
    from scipy.optimize import Bounds, LinearConstraint, milp

    layers, kinds = least.shape
    one_kind = np.kron(np.eye(layers), np.ones(kinds))
    rows = [bounded.ravel()]
    for cut in cuts:
        taken = np.zeros((layers, kinds))
        taken[np.arange(layers), list(cut)] = 1
        rows.append(taken.ravel())
    scales = np.array([max(float(np.abs(bounded).max()), 1e-300), *(1.0 for _ in cuts)])
    most = np.array([bound, *(layers - 1.0 for _ in cuts)]) / scales
    result = milp(
        least.ravel() / max(float(np.abs(least).max()), 1e-300),
        constraints=[
            LinearConstraint(one_kind, 1, 1),
            LinearConstraint(np.stack(rows) / scales[:, None], -np.inf, most),
        ],
        integrality=np.ones(least.size),
        bounds=Bounds(0, offered.ravel().astype(float)),
        options={"mip_rel_gap": SOLVER_GAP, "time_limit": SOLVER_SECONDS},
    )
    if result.x is None:
        return None
    return tuple(int(kind) for kind in result.x.reshape(layers, kinds).argmax(1))


def refitted(nats: np.ndarray, measured: Mapping[tuple[int, ...], float]) -> np.ndarray:
    """Return the costs of layers that are nearest to the estimates and add up to the measured costs.

    This is a ridge regression on the kinds of layers. Their costs may be off by SPREAD each, and by SPREAD all
    together.

    nats: [L, kinds], finite.
    measured: the real costs of layouts.
    """
    if not measured:
        return nats
    layers, kinds = nats.shape
    rows, estimates = np.zeros((len(measured), nats.size)), nats.ravel()
    for row, chosen in zip(rows, measured, strict=True):
        row[np.arange(layers) * kinds + np.array(chosen)] = 1
    spread = SPREAD**2 * (np.diag(estimates**2) + np.outer(estimates, estimates))
    sums = rows @ estimates
    scatter = rows @ spread @ rows.T + np.diag((NOISE * sums) ** 2 + 1e-12)
    change = spread @ rows.T @ np.linalg.solve(scatter, np.array([*measured.values()]) - sums)
    return np.maximum(estimates + change, 0.0).reshape(nats.shape)


# ---- the choice ----


@dataclass
class _Search:
    """The search for the best layout, with all measurements so far.

    measured: costs by layout and by held_out.
    dearer: the factor by which layouts cost more on held-out windows, as far as it is known.
    """

    tables: LayerTables
    target: ChoiceTarget
    measured: dict[tuple[int, ...], dict[bool, LayoutNll]] = field(default_factory=dict)
    dearer: float = 1.0

    def __post_init__(self) -> None:
        self.offered = np.isfinite(self.tables.nats)
        nats = np.where(self.offered, self.tables.nats, 0.0)
        self.nats = np.where(np.arange(len(LAYER_KINDS)) > 0, np.maximum(nats, LEAST_NATS), 0.0)
        self.budget = math.inf if self.target.max_nats is None else self.target.max_nats

    @property
    def costs(self) -> dict[tuple[int, ...], float]:
        """The costs of measured layouts: on held-out windows where they were measured there."""
        return {
            one: found[True].increase if True in found else self.dearer * found[False].increase
            for one, found in self.measured.items()
        }

    def add(self, chosen: tuple[int, ...], held_out: bool, cost: LayoutNll) -> None:
        """Add a measurement."""
        own = self.measured.setdefault(chosen, {})
        own[held_out] = cost
        if held_out and cost.increase > self.budget and own[False].increase > 0:
            self.dearer = max(self.dearer, cost.increase / own[False].increase)

    def seconds(self, chosen: Sequence[int]) -> float:
        return self.tables.total(self.tables.seconds, chosen)

    def best(self) -> tuple[int, ...] | None:
        """Return the fastest measured layout within the budget, or the least costly one that is fast enough; None:
        there is none."""
        costs = self.costs
        left = [one for one, cost in costs.items() if cost <= self.budget]
        if self.target.max_nats is None:
            return min(left, key=lambda one: (costs[one], self.seconds(one)), default=None)
        return min(left, key=lambda one: (self.seconds(one), costs[one]), default=None)

    def candidate(self) -> tuple[int, ...] | None:
        """Return the next layout to measure, better than the best by the costs so far; None: there is none."""
        costs, seconds, best = self.costs, self.tables.seconds, self.best()
        nats, cuts = refitted(self.nats, costs), list(costs)
        faster = self.seconds(self.tables.dense if best is None else best) * (1 - ROUNDING)
        if self.target.min_speedup is not None:
            whole = self.tables.constant + self.seconds(self.tables.dense)
            found = solve(nats, seconds, whole / self.target.min_speedup - self.tables.constant, self.offered, cuts)
            better = found is not None and (best is None or self.tables.total(nats, found) < costs[best])
            return found if better else None
        found = solve(seconds, nats, self.budget, self.offered, cuts)
        if found is not None and self.seconds(found) < faster:
            return found
        found = solve(nats, seconds, faster, self.offered, cuts)
        dearest = math.inf if best is None else self.budget * WORTH_TRYING
        return found if found is not None and self.tables.total(nats, found) <= dearest else None


def choose_layout(tables: LayerTables, target: ChoiceTarget) -> PlannedLayout:
    """Return the fastest layout within the budget, or the most accurate that is fast enough, by estimated costs.

    Raises UserError where nothing but the dense layout meets the target.
    """
    return tables.described(_estimated(tables, target))


def _estimated(tables: LayerTables, target: ChoiceTarget) -> tuple[int, ...]:
    offered, nats, seconds = np.isfinite(tables.nats), np.nan_to_num(tables.nats, posinf=0.0), tables.seconds
    fastest = tuple(np.where(offered, seconds, np.inf).argmin(1).tolist())
    if tables.speedup(fastest) <= 1 + ROUNDING:
        raise UserError(
            "no layout is faster than the dense one here, so there is nothing to choose; converting is not worth it on"
            " this hardware with this workload"
        )
    dense = tables.total(seconds, tables.dense)
    if target.max_nats is None:
        assert target.min_speedup is not None
        most = (tables.constant + dense) / target.min_speedup - tables.constant
        chosen = solve(nats, seconds, most, offered)
        if chosen is None:
            raise UserError(
                f"no layout reaches {target}; the fastest is {tables.speedup(fastest):.3f}x, with an increase of the"
                f" perplexity of {percent_up(tables.total(nats, fastest))}"
            )
        return chosen
    chosen = solve(seconds, nats, target.max_nats, offered)
    if chosen is not None and tables.total(seconds, chosen) < dense * (1 - ROUNDING):
        return chosen
    cheapest = solve(nats, seconds, dense * (1 - ROUNDING), offered)
    assert cheapest is not None
    raise UserError(
        f"no layout that is faster than the dense one stays within {target}; the least increase is"
        f" {percent_up(tables.total(nats, cheapest))} ({tables.speedup(cheapest):.3f}x), so give at least that"
    )


def percent_up(nats: float) -> str:
    """Return an increase of the perplexity as a budget, rounded up so that it suffices."""
    percent = 100 * math.expm1(min(nats, 30.0))
    digits = 10 ** (2 - math.floor(math.log10(percent))) if percent > 0 else 1
    return f"{math.ceil(percent * digits) / digits:g}%"


def choose_measured_layout(
    tables: LayerTables, target: ChoiceTarget, measurer: MeasuresLayouts, limit: int, *, console: Console = SILENT
) -> tuple[PlannedLayout, MeasuredCheck]:
    """Return the best layout that at most ``limit`` measurements find, and the measurements.

    Its measured cost is within the budget on the windows that it was chosen by, and on held-out ones where those were
    measured; the check says so. Raises UserError where no layout measured so.
    """
    search, notes, made = _Search(tables, target), [], 0
    candidate: tuple[int, ...] | None = _estimated(tables, target)
    while made < limit:
        best = search.best()
        held_out = best is not None and (candidate is None or made == limit - 1)
        chosen = best if held_out else candidate
        if chosen is None or (held_out and True in search.measured[chosen]):
            break
        layout = tables.layout(chosen)
        cost = measurer.measure(layout, held_out)
        made += 1
        search.add(chosen, held_out, cost)
        where = " on held-out windows" if held_out else f" (estimated {tables.total(tables.nats, chosen):+.4f})"
        console.note(f"{made} of {limit}: {layout}: {tables.speedup(chosen):.3f}x, {cost.increase:+.4f} nats{where}")
        if held_out and cost.increase <= search.budget:
            break
        if held_out:
            notes.append(
                f"{layout} is over budget on held-out windows ({cost.increase:+.4f} nats of {target.max_nats:.4f}), so"
                " another was taken"
            )
        candidate = search.candidate()
    best = search.best()
    if best is None:
        raise UserError(
            f"none of the {len(search.measured)} layouts that were measured stays within {target}"
            f" ({target.max_nats or 0.0:.4f} nats) on all windows; the least increase is"
            f" {min(search.costs.values()):.4f} nats, so give a larger budget, or a larger --verify"
        )
    confirmed = search.measured[best].get(True)
    borderline = False
    if confirmed is None:
        notes.append(
            f"{tables.layout(best)} was not measured on held-out windows: the {limit} measurements of --verify did not"
            " suffice"
        )
    elif borderline := search.budget - confirmed.increase < (confirmed.increase_stderr or 0.0):
        notes.append(
            f"borderline: {confirmed.windows} held-out windows say {confirmed.increase:+.4f} nats of"
            f" {search.budget:.4f}, with a standard error of {confirmed.increase_stderr or 0:.4f}; to confirm it on"
            " more windows, measure the sensitivity with more --samples"
        )
    layouts = [tables.described(one, costs) for one, costs in search.measured.items()]
    check = MeasuredCheck(confirmed is not None, limit, made, layouts, notes, borderline)
    return tables.described(best, search.measured[best]), check
