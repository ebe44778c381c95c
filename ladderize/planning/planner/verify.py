"""A choice that was measured: real costs are more than the sums that estimates are, so an estimate alone is often over
budget. Imports no torch.

Three steps, of at most N measurements in all: find where on the front the budget really ends; try faster neighbours of
the best layout found there, since the front is only as good as its estimates; and measure the best on windows that
nothing was chosen by. What is over budget there is given up, and the next best is measured.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np

from ladderize.console import SILENT, Console
from ladderize.errors import UserError
from ladderize.layout import Layout
from ladderize.planning.planner.belief import believed_costs
from ladderize.planning.planner.choose import SLACK, TimedLayouts, choose_point
from ladderize.planning.planner.document import ChoiceTarget, LayoutNll, MeasuredCheck, PlannedLayout
from ladderize.planning.planner.front import LAYER_OPTIONS, LayoutFront

FRONT_MEASUREMENTS = 5  # at most, to find where on the front the budget ends
UNLIKELY = 0.01  # to be within the budget: such layouts are not measured
NEAR_ENOUGH = 0.01  # of the most that can be saved: nearer than that, the front is not searched further
NEIGHBOURS = 2000  # that are looked at, the most promising by their sums


class MeasuresLayouts(Protocol):
    """What knows real costs. held_out: on the windows that nothing is chosen by."""

    def measure(self, layouts: Sequence[Layout], held_out: bool) -> list[LayoutNll]: ...


@dataclass
class _Search:
    """What is known so far, by the bytes of a layout's options."""

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


def verified_choice(
    space: TimedLayouts,
    front: LayoutFront,
    target: ChoiceTarget,
    measurer: MeasuresLayouts,
    limit: int,
    *,
    console: Console = SILENT,
) -> tuple[PlannedLayout, MeasuredCheck]:
    """The best layout found by at most ``limit`` measurements, and all of them.

    Its measured cost is within the budget on the windows that it was chosen by, and on held-out windows where those
    were measured; the check says whether they were. Raises UserError where no layout measured so.
    """
    search = _Search(space, measurer, limit, console)
    if target.max_nats is not None:
        _search_front(
            search, front, target.max_nats, start=choose_point(space.speedup(front.seconds), front.nats, target)
        )
        _try_neighbours(search, front, target)
    else:
        start = choose_point(space.speedup(front.seconds), front.nats, target)
        search.cost(front.chosen[start])
        _try_neighbours(search, front, target)
    chosen, verified = _confirmed(search, front, target)
    check = MeasuredCheck(
        verified=verified,
        limit=limit,
        made=search.made,
        layouts=[search.described(one) for one in search.candidates()],
        notes=search.notes,
    )
    return search.described(chosen), check


def _reserved(limit: int) -> int:
    """Measurements that are kept for held-out windows; where there are many, also for what to do if these say no:
    measure a less costly layout on both."""
    return 1 if limit < 6 else 3 if limit < 12 else 5


def _search_front(search: _Search, front: LayoutFront, budget: float, start: int) -> None:
    """Find the fastest point of the front whose measured cost is within the budget.

    Costs grow along the front about as their estimates do, so the next point to measure is where the estimate, longer
    by as much as the last measured one was, meets the budget; or half-way, where that leads nowhere.
    """
    faster, slower = -1, len(front) - 1  # over budget, and within: what lies between is not known; the last is dense
    allowed = min(FRONT_MEASUREMENTS, search.limit - _reserved(search.limit))
    whole = front.seconds[-1] - front.seconds[0]
    point = start
    while allowed > 0 and slower - faster > 1:
        if front.seconds[slower] - front.seconds[faster + 1] <= NEAR_ENOUGH * whole:
            break
        if not faster < point < slower:
            point = (faster + slower) // 2
        cost = search.cost(front.chosen[point])
        allowed -= 1
        if cost <= budget + SLACK:
            slower = point
        else:
            faster = point
        estimate = front.nats[point]
        aim = estimate * budget / cost if cost > 0 and estimate > 0 else math.inf
        point = int(np.argmax(front.nats <= aim)) if (front.nats <= aim).any() else slower
        if cost <= budget + SLACK and point >= slower:
            return  # by this estimate nothing faster is within


def _try_neighbours(search: _Search, front: LayoutFront, target: ChoiceTarget) -> None:
    """Measure neighbours of the best layout so far that may be better, and go on from each that is."""
    while search.made < search.limit - _reserved(search.limit):
        best = _best(search, target, search.candidates())
        candidate = _most_promising(search, front, target, best)
        if candidate is None:
            return
        search.cost(candidate)


def _best(search: _Search, target: ChoiceTarget, among: Sequence[np.ndarray]) -> np.ndarray | None:
    """The fastest that is within the budget as far as it was measured, or the least costly that is fast enough."""
    if target.max_nats is not None:
        meeting = [one for one in among if search.cost(one) <= target.max_nats + SLACK]
        return min(meeting, key=lambda one: (search.seconds(one), search.cost(one)), default=None)
    return min(among, key=lambda one: (search.cost(one), search.seconds(one)), default=None)


def _most_promising(
    search: _Search, front: LayoutFront, target: ChoiceTarget, best: np.ndarray | None
) -> np.ndarray | None:
    """The next layout to measure: what is gained by it, times how likely it is within the bound, is the most."""
    space = search.space
    base = np.zeros(space.costs.num_layers, np.int8) if best is None else best
    around = np.concatenate([_neighbours(space, base), front.chosen])
    known = np.array(search.candidates()).reshape(-1, space.costs.num_layers)
    mean, spread = believed_costs(space.costs, known, np.array([search.cost(one) for one in known]), around)
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


@dataclass
class _Bar:
    """What a layout has to stay within to be worth a held-out measurement: as measured, and as estimated."""

    measured: float
    estimated: float = math.inf

    def passes(self, search: _Search, chosen: np.ndarray) -> bool:
        return search.cost(chosen) <= self.measured and search.estimate(chosen) <= self.estimated

    def lower(self, search: _Search, failed: np.ndarray, budget: float) -> None:
        """Where held-out windows cost more than the others, they do so for all layouts, so the next has to be within as
        much less. Where the others say next to nothing of what held-out ones do, estimates tell how much less."""
        held_out, measured = search.cost(failed, held_out=True), search.cost(failed)
        if 2 * measured >= held_out:
            self.measured = min(self.measured, measured * budget / held_out)
        else:
            self.estimated = min(self.estimated, search.estimate(failed) * budget / held_out)


def _confirmed(search: _Search, front: LayoutFront, target: ChoiceTarget) -> tuple[np.ndarray, bool]:
    """The best layout, and whether it was measured on held-out windows: one after the other, until one is within the
    budget there too; if none is left that was measured and may be, another of the front is."""
    if target.max_nats is None:
        best = _best(search, target, search.candidates())
        assert best is not None
        search.cost(best, held_out=True)
        return best, True
    budget = target.max_nats + SLACK
    bar = _Bar(budget)
    while True:
        left = [one for one in search.candidates() if one.tobytes() not in search.held_out]
        best = min((one for one in left if bar.passes(search, one)), key=search.seconds, default=None)
        if best is None and search.made + 2 <= search.limit:
            best = _less_costly(search, front, bar)
            if best is not None and not bar.passes(search, best):
                continue
        if best is None or search.made >= search.limit:
            return _unconfirmed(search, target, left, bar), False
        cost = search.cost(best, held_out=True)
        if cost <= budget:
            _note_doubt(search, best, target.max_nats)
            return best, True
        search.notes.append(
            f"{search.space.layout(best)} is over budget on held-out windows ({cost:+.4f} nats of"
            f" {target.max_nats:.4f}), so another was taken"
        )
        bar.lower(search, best, budget)


def _note_doubt(search: _Search, chosen: np.ndarray, budget: float) -> None:
    """Say where the held-out windows are too few to be sure of."""
    found = search.held_out[chosen.tobytes()]
    if found.increase_stderr is not None and budget - found.increase < found.increase_stderr:
        search.notes.append(
            f"on other windows it may well be over budget: {found.windows} held-out windows say {found.increase:+.4f}"
            f" nats of {budget:.4f}, with a standard error of {found.increase_stderr:.4f}; a"
            " sensitivity of more --samples is confirmed on more windows"
        )


def _less_costly(search: _Search, front: LayoutFront, bar: _Bar) -> np.ndarray | None:
    """The fastest point of the front that was not measured and is well believed to pass."""
    known = np.array(search.candidates())
    mean, spread = believed_costs(
        search.space.costs, known, np.array([search.cost(one) for one in known]), front.chosen
    )
    new = np.array([one.tobytes() not in search.measured for one in front.chosen])
    within = (mean + spread <= bar.measured) & (front.nats <= bar.estimated)
    fitting = np.flatnonzero(new & within & (search.space.speedup(front.seconds) > 1 + SLACK))
    return front.chosen[fitting[0]] if len(fitting) else None


def _unconfirmed(search: _Search, target: ChoiceTarget, left: Sequence[np.ndarray], bar: _Bar) -> np.ndarray:
    """The least costly of what is left, if it is within the budget at all."""
    hopeful = [one for one in left if bar.passes(search, one)]
    best = min(hopeful or left, key=search.cost, default=None)
    if best is None or target.max_nats is None or search.cost(best) > target.max_nats + SLACK:
        worst = [
            max(found.increase, search.held_out.get(key, found).increase) for key, found in search.measured.items()
        ]
        raise UserError(
            f"none of the {len(search.measured)} layouts that were measured stays within --max-ppl-increase"
            f" {target.max_ppl_increase} ({target.max_nats or 0.0:.4f} nats) on all windows; the least increase is"
            f" {min(worst):.4f} nats, so give a larger budget, or a larger --verify"
        )
    search.notes.append(
        f"{search.space.layout(best)} was not measured on held-out windows: {_why_not(search, best, bar)}"
    )
    return best


def _why_not(search: _Search, chosen: np.ndarray, bar: _Bar) -> str:
    if search.made + 2 > search.limit:
        reason = f"the {search.limit} measurements of --verify did not suffice"
    else:
        reason = "no other layout is likely enough to be within the budget there"
    return (
        reason if bar.passes(search, chosen) else f"{reason}; where it costs as much more there, it is over budget too"
    )
