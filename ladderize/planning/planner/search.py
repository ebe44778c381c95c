"""The search for a layout by measuring it and others: real costs are more than the sums that estimates are, so an
estimate alone is often over budget. Imports no torch.

First find where on the front the budget really ends. Where estimates say so little that all of the front that was
measured is over it, go back from there to the dense layout, layer by layer. Then try neighbours of the best layout
found, since the front is only as good as its estimates.

What measured layouts tell of others is a Gaussian process of how far real costs are from estimates. A layout's real
cost is taken as its estimate times a factor that all share (unknown, above 1 where costs are more than sums), and apart
from that each changed layer, and each pair of neighbours that are both changed, costs more or less than estimated,
alike in every layout that has it. So a measured layout tells much of one that differs in a layer or two: all that they
share is known, and only the difference is estimated.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np

from ladderize.console import Console
from ladderize.layout import Layout
from ladderize.planning.planner.choose import SLACK, TimedLayouts, choose_point
from ladderize.planning.planner.document import ChoiceTarget, LayoutNll, PlannedLayout
from ladderize.planning.planner.front import LAYER_OPTIONS, LayoutFront, OptionCosts

FACTOR, FACTOR_SPREAD = 1.3, 0.5  # of all costs to their estimates, before anything is measured
LAYER_SPREAD = 0.25  # of a layer's real cost about its estimate, as a part of it
PAIR_SPREAD = 0.25  # of what a pair costs more, as a part of the geometric mean of both
NOISE = 0.01  # of a layout's cost, of its own
FLOOR = 0.02  # of the mean cost of a changed layer: what the cheapest is unsure by at least


def believed_costs(
    costs: OptionCosts, measured: np.ndarray, increases: np.ndarray, asked: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Mean and standard deviation of the real costs of layouts, in nats per token: [A] each.

    measured: [M, L] options of layouts, whose real costs are ``increases`` [M]. asked: [A, L].
    """
    known, wanted = _Terms(costs, measured), _Terms(costs, asked)
    variance = wanted.own_variance()
    if not len(measured):
        return FACTOR * wanted.estimates, np.sqrt(variance)
    covariance = known.covariance(known)
    covariance[np.diag_indices(len(measured))] += (NOISE * known.estimates) ** 2 + 1e-12
    cross = wanted.covariance(known)
    weights = np.linalg.solve(covariance, cross.T).T
    mean = FACTOR * wanted.estimates + weights @ (increases - FACTOR * known.estimates)
    return mean, np.sqrt(np.maximum(variance - (weights * cross).sum(1), 0.0))


class _Terms:
    """Of layouts [P, L] their estimates [P], and how large what may differ is, by layer [P, L] and pair [P, L - 1]."""

    def __init__(self, costs: OptionCosts, chosen: np.ndarray) -> None:
        self.chosen = chosen.astype(np.int64)
        self.pairs = self.chosen[:, :-1] * 8 + self.chosen[:, 1:]
        self.estimates = costs.totals(chosen)[1]
        finite = costs.nats[np.isfinite(costs.nats) & (costs.nats > 0)]
        least = FLOOR * float(finite.mean()) if len(finite) else 0.0
        changed = self.chosen > 0
        self.layer_sizes = np.where(changed, costs.nats[np.arange(costs.num_layers), self.chosen] + least, 0.0)
        self.pair_sizes = np.sqrt(self.layer_sizes[:, :-1] * self.layer_sizes[:, 1:])

    def covariance(self, other: "_Terms") -> np.ndarray:
        """[P, other's]."""
        shared = FACTOR_SPREAD**2 * self.estimates[:, None] * other.estimates
        for spread, sizes, names, others, other_names in (
            (LAYER_SPREAD, self.layer_sizes, self.chosen, other.layer_sizes, other.chosen),
            (PAIR_SPREAD, self.pair_sizes, self.pairs, other.pair_sizes, other.pairs),
        ):
            for layer in range(sizes.shape[1]):
                same = names[:, layer, None] == other_names[:, layer]
                shared += spread**2 * same * sizes[:, layer, None] * others[:, layer]
        return shared

    def own_variance(self) -> np.ndarray:
        """[P], with what is a layout's own."""
        return (
            (FACTOR_SPREAD**2 + NOISE**2) * self.estimates**2
            + LAYER_SPREAD**2 * (self.layer_sizes**2).sum(1)
            + PAIR_SPREAD**2 * (self.pair_sizes**2).sum(1)
        )


FRONT_MEASUREMENTS = 5  # at most, to find where on the front the budget ends
UNLIKELY = 0.01  # to be within the budget: such layouts are not measured
NEAR_ENOUGH = 0.01  # of the most that can be saved: nearer than that, the front is not searched further
NEIGHBOURS = 2000  # that are looked at, the most promising by their sums


class MeasuresLayouts(Protocol):
    """What knows real costs. held_out: on the windows that nothing is chosen by."""

    def measure(self, layouts: Sequence[Layout], held_out: bool) -> list[LayoutNll]: ...


@dataclass
class LayoutSearch:
    """What is known so far, by the bytes of a layout's options. limit: of measurements."""

    space: TimedLayouts
    measurer: MeasuresLayouts
    limit: int
    console: Console
    measured: dict[bytes, LayoutNll] = field(default_factory=dict)
    held_out: dict[bytes, LayoutNll] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)

    @property
    def made(self) -> int:
        return len(self.measured) + len(self.held_out)

    @property
    def left(self) -> int:
        """Measurements that are left to choose by. Some are kept for held-out windows; where there are many, also for
        what to do if these say no: measure a less costly layout on both."""
        return self.limit - self.made - (1 if self.limit < 6 else 3 if self.limit < 12 else 5)

    def cost(self, chosen: np.ndarray, *, held_out: bool = False) -> float:
        """Measured, the first time that it is asked for."""
        known = self.held_out if held_out else self.measured
        if chosen.tobytes() not in known:
            (found,) = self.measurer.measure([self.space.layout(chosen)], held_out)
            known[chosen.tobytes()] = found
            seconds, estimate = self.space.costs.totals(chosen)
            self.console.note(
                f"{self.made} of {self.limit}: {self.space.layout(chosen)}: {self.space.speedup(seconds):.3f}x,"
                f" {found.increase:+.4f} nats{' on held-out windows' if held_out else f' (estimated {estimate:+.4f})'}"
            )
        return known[chosen.tobytes()].increase

    def seconds(self, chosen: np.ndarray) -> float:
        return float(self.space.costs.totals(chosen)[0])

    def estimate(self, chosen: np.ndarray) -> float:
        return float(self.space.costs.totals(chosen)[1])

    def described(self, chosen: np.ndarray) -> PlannedLayout:
        key = chosen.tobytes()
        return self.space.described(chosen, self.measured.get(key), self.held_out.get(key))

    def candidates(self) -> list[np.ndarray]:
        """All that were measured to choose by."""
        return [np.frombuffer(key, np.int8) for key in self.measured]

    def best(self, target: ChoiceTarget) -> np.ndarray | None:
        """The fastest that is within the budget as far as it was measured, or the least costly that is fast enough."""
        among = self.candidates()
        if target.max_nats is not None:
            meeting = [one for one in among if self.cost(one) <= target.max_nats + SLACK]
            return min(meeting, key=lambda one: (self.seconds(one), self.cost(one)), default=None)
        return min(among, key=lambda one: (self.cost(one), self.seconds(one)), default=None)

    def believed(self, asked: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Mean and standard deviation of real costs of layouts [A, L], by all that was measured."""
        known = self.candidates()
        increases = np.array([self.cost(one) for one in known])
        return believed_costs(self.space.costs, np.array(known).reshape(-1, asked.shape[1]), increases, asked)


def find_layouts(search: LayoutSearch, front: LayoutFront, target: ChoiceTarget) -> None:
    """Measure layouts until the best is among them, as far as the measurements go."""
    start = choose_point(search.space.speedup(front.seconds), front.nats, target)
    if target.max_nats is None:
        search.cost(front.chosen[start])
    else:
        _find_end(search, _down_to_dense(search.space, front), target.max_nats, start, FRONT_MEASUREMENTS)
        if search.best(target) is None:
            cheapest = min(search.candidates(), key=search.cost)
            _find_end(search, way_back(search.space, cheapest), target.max_nats, 0, search.left)
    _try_neighbours(search, front, target)


def _down_to_dense(space: TimedLayouts, front: LayoutFront) -> LayoutFront:
    """The points that are faster than dense, and the dense layout, which is not on the front where estimates say that a
    faster one costs nothing."""
    faster = space.speedup(front.seconds) > 1 + SLACK
    dense = np.zeros((1, space.costs.num_layers), np.int8)
    seconds, nats = space.costs.totals(dense)
    return LayoutFront(
        np.append(front.seconds[faster], seconds),
        np.append(front.nats[faster], nats),
        np.concatenate([front.chosen[faster], dense]),
    )


def way_back(space: TimedLayouts, chosen: np.ndarray) -> LayoutFront:
    """From a layout to the dense one. Its changed layers are given back one by one, first the dearest for what it saves
    as far as estimates tell; and since they have told too little, none is given."""
    layers = np.flatnonzero(chosen)
    options = chosen[layers]
    saved = space.costs.seconds[layers, 0] - space.costs.seconds[layers, options]
    dearness = space.costs.nats[layers, options] / np.maximum(saved, np.finfo(float).tiny)
    way = np.repeat(chosen[None], len(layers) + 1, 0)
    for step, layer in enumerate(layers[np.argsort(-dearness, kind="stable")], 1):
        way[step:, layer] = 0
    return LayoutFront(space.costs.totals(way)[0], np.zeros(len(way)), way)


def _find_end(search: LayoutSearch, way: LayoutFront, budget: float, start: int, most: int) -> None:
    """Find the fastest layout on a path to the dense one whose measured cost is within the budget, by
    ``most`` measurements or fewer.

    Costs grow along the front about as their estimates do, so the next point to measure is where the estimate, longer
    by as much as the last measured one was, meets the budget; or half-way, where that leads nowhere.
    """
    faster, slower = -1, len(way) - 1  # over budget, and within: what lies between is not known; the last is dense
    most = min(most, search.left) + search.made
    whole = way.seconds[-1] - way.seconds[0]
    point = start
    while slower - faster > 1:
        if way.seconds[slower] - way.seconds[faster + 1] <= NEAR_ENOUGH * whole:
            break
        if not faster < point < slower:
            point = (faster + slower) // 2
        if search.made >= most and way.chosen[point].tobytes() not in search.measured:
            break
        cost = search.cost(way.chosen[point])
        if cost <= budget + SLACK:
            slower = point
        else:
            faster = point
        estimate = way.nats[point]
        aim = estimate * budget / cost if cost > 0 and estimate > 0 else math.inf
        point = int(np.argmax(way.nats <= aim)) if (way.nats <= aim).any() else slower
        if cost <= budget + SLACK and point >= slower:
            return  # by this estimate nothing faster is within


def _try_neighbours(search: LayoutSearch, front: LayoutFront, target: ChoiceTarget) -> None:
    """Measure neighbours of the best layout so far that may be better, and go on from each that is."""
    while search.left > 0:
        candidate = _most_promising(search, front, target, search.best(target))
        if candidate is None:
            return
        search.cost(candidate)


def _most_promising(
    search: LayoutSearch, front: LayoutFront, target: ChoiceTarget, best: np.ndarray | None
) -> np.ndarray | None:
    """The next layout to measure: what is gained by it, times how likely it is within the bound, is the most."""
    space = search.space
    base = np.zeros(space.costs.num_layers, np.int8) if best is None else best
    around = np.concatenate([_neighbours(space, base), front.chosen])
    mean, spread = search.believed(around)
    seconds = space.costs.totals(around)[0]
    worth = np.array([one.tobytes() not in search.measured for one in around])
    if target.max_nats is not None:
        gain = np.maximum(search.seconds(base) - seconds, 0.0)
        likely = _normal((target.max_nats - mean) / (spread + 1e-9))
        score = np.where(likely > UNLIKELY, gain * likely, 0.0)
    else:
        assert target.min_speedup is not None
        worth &= space.speedup(seconds) >= target.min_speedup * (1 - SLACK)
        below = (search.cost(base) - mean) / (spread + 1e-9)  # expected improvement
        score = (spread + 1e-9) * (below * _normal(below) + np.exp(-(below**2) / 2) / math.sqrt(2 * math.pi))
    score = np.where(worth, score, 0.0)
    index = int(np.argmax(score))
    return around[index] if score[index] > 0 else None


def _normal(values: np.ndarray) -> np.ndarray:
    """The probability of the standard normal distribution below each value."""
    return np.array([0.5 * math.erfc(-value / math.sqrt(2)) for value in values.tolist()])


def _neighbours(space: TimedLayouts, chosen: np.ndarray) -> np.ndarray:
    """Layouts that differ from ``chosen`` in the options of one layer or of two: [count, L]. Of two, as many as
    promise most by their sums."""
    layers = np.arange(space.costs.num_layers)
    single = [
        (layer, option)
        for layer in layers
        for option in range(len(LAYER_OPTIONS))
        if option != chosen[layer] and np.isfinite(space.costs.nats[layer, option])
    ]
    one = np.repeat(chosen[None], len(single), 0)
    one[np.arange(len(single)), [layer for layer, _ in single]] = [option for _, option in single]
    if not single:
        return one
    seconds, nats = space.costs.totals(one)
    here_seconds, here_nats = space.costs.totals(chosen)
    first, second = np.triu_indices(len(single), 1)
    where = np.array([layer for layer, _ in single])
    apart = where[first] != where[second]
    first, second = first[apart], second[apart]
    faster = here_seconds - seconds
    dearer = nats - here_nats
    gain, price = faster[first] + faster[second], dearer[first] + dearer[second]
    order = np.flatnonzero(gain > 0)
    if len(order) > NEIGHBOURS:  # those that cost least for what they save, of small and of large steps
        order = order[np.argsort(price[order] / gain[order] ** 0.5, kind="stable")[:NEIGHBOURS]]
    two = one[first[order]]
    changed = second[order]
    two[np.arange(len(order)), where[changed]] = [single[index][1] for index in changed]
    return np.concatenate([one, two])
