"""A choice that was measured, and confirmed on windows that nothing was chosen by: real costs are more than the sums
that estimates are, so an estimate alone is often over budget. Imports no torch.

Of at most N measurements, most go to the search. It measures what the estimates choose, then again and again what
promises most by all that was measured: of the front, of the neighbours of the best layout so far, and where none is
within the budget yet, of the way back from the cheapest to the dense layout. Then the best is measured on held-out
windows. What is over budget there is given up, and the next best is measured.

What measured layouts tell of others is a Gaussian process of how far real costs are from estimates. A layout's real
cost is taken as its estimate times a factor that all share (unknown, above 1 where costs are more than sums), and apart
from that each changed layer, and each pair of neighbours that are both changed, costs more or less than estimated,
alike in every layout that has it. So a measured layout tells much of one that differs in a layer or two: all that they
share is known, and only the difference is estimated.
"""

import math
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
from scipy.special import ndtr

from ladderize.console import SILENT, Console
from ladderize.errors import UserError
from ladderize.layout import Layout
from ladderize.planning.plans.document import LayoutNll, MeasuredCheck, PlannedLayout
from ladderize.planning.plans.layout_space import ROUNDING, LayoutSpace, choose_point
from ladderize.planning.plans.options import ChoiceTarget

FACTOR, FACTOR_SPREAD = 1.3, 0.5  # of all costs to their estimates, before anything is measured
LAYER_SPREAD = 0.2  # of a layer's real cost about its estimate, as a part of it
PAIR_SPREAD = 0.2  # of what a pair costs more, as a part of the geometric mean of both
NOISE = 0.01  # of a layout's cost, of its own
FLOOR = 0.02  # of the mean cost of a changed layer: what the cheapest is unsure by at least
NOTHING_KNOWN = 1e-3  # nats of a changed layer, where all estimates are 0
UNLIKELY = 1e-4  # to be within the budget: such layouts are not measured
NEIGHBOURS = 2000  # that are looked at, the most promising by their sums


class MeasuresLayouts(Protocol):
    """What knows real costs. held_out: on the windows that nothing is chosen by."""

    def measure(self, layout: Layout, held_out: bool) -> LayoutNll: ...


def verified_choice(
    space: LayoutSpace,
    front: np.ndarray,
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
    search = _Search(space, front, target, measurer, limit, console)
    search.cost(front[choose_point(space.speedups(front), space.totals(front)[1], target)])
    # some are kept for held-out windows; where there are many, also for what to do if these say no
    kept = 1 if limit < 6 else 3 if limit < 12 else 5
    while search.made < limit - kept and (candidate := search.most_promising()) is not None:
        search.cost(candidate)
    chosen = _confirmed(search)
    check = MeasuredCheck(
        verified=chosen.tobytes() in search.held_out,
        limit=limit,
        made=search.made,
        layouts=[search.described(one) for one in search.candidates()],
        notes=search.notes,
        borderline=_is_borderline(search, search.held_out.get(chosen.tobytes())),
    )
    return search.described(chosen), check


@dataclass
class _Search:
    """What is known so far, by the bytes of a layout's options. limit: of measurements. bar: what layouts may cost as
    measured and as estimated, since others cost more on held-out windows."""

    space: LayoutSpace
    front: np.ndarray
    target: ChoiceTarget
    measurer: MeasuresLayouts
    limit: int
    console: Console
    measured: dict[bytes, LayoutNll] = field(default_factory=dict)
    held_out: dict[bytes, LayoutNll] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    bar: float = math.inf

    @property
    def made(self) -> int:
        return len(self.measured) + len(self.held_out)

    @property
    def budget(self) -> float:
        return math.inf if self.target.max_nats is None else self.target.max_nats + ROUNDING

    def cost(self, chosen: np.ndarray, *, held_out: bool = False) -> float:
        """Measured, the first time that it is asked for."""
        known = self.held_out if held_out else self.measured
        if chosen.tobytes() not in known:
            found = known[chosen.tobytes()] = self.measurer.measure(self.space.layout(chosen), held_out)
            estimate = self.space.totals(chosen)[1]
            self.console.note(
                f"{self.made} of {self.limit}: {self.space.layout(chosen)}: {self.space.speedups(chosen):.3f}x,"
                f" {found.increase:+.4f} nats{' on held-out windows' if held_out else f' (estimated {estimate:+.4f})'}"
            )
        return known[chosen.tobytes()].increase

    def described(self, chosen: np.ndarray) -> PlannedLayout:
        key = chosen.tobytes()
        return self.space.described(chosen, self.measured.get(key), self.held_out.get(key))

    def candidates(self) -> list[np.ndarray]:
        """All that were measured to choose by."""
        return [np.frombuffer(key, np.int8) for key in self.measured]

    def dearest(self, chosen: np.ndarray) -> float:
        """Of what it costs as measured and as estimated, the more."""
        return max(self.cost(chosen), float(self.space.totals(chosen)[1]))

    def passes(self, chosen: np.ndarray) -> bool:
        return self.cost(chosen) <= self.budget and self.dearest(chosen) <= self.bar

    def best(self) -> np.ndarray | None:
        """The fastest that passes and that no held-out windows have spoken against, or the least costly that is fast
        enough."""
        if self.target.max_nats is None:
            return min(self.candidates(), key=lambda one: (self.cost(one), self.space.totals(one)[0]))
        left = [one for one in self.candidates() if one.tobytes() not in self.held_out and self.passes(one)]
        return min(left, key=lambda one: (self.space.totals(one)[0], self.cost(one)), default=None)

    def most_promising(self) -> np.ndarray | None:
        """The next layout to measure: what is gained by it, times how likely it is within the bound, is the most."""
        best, space = self.best(), self.space
        base = space.dense if best is None else best
        others = _way_back(space, min(self.candidates(), key=self.cost)) if best is None else _neighbours(space, best)
        asked = np.concatenate([others, self.front])
        known = self.candidates()
        mean, spread = believed_costs(space, np.array(known), np.array([self.cost(one) for one in known]), asked)
        seconds, estimates = space.totals(asked)
        worth = np.array([one.tobytes() not in self.measured for one in asked])
        if self.target.max_nats is not None:
            gain = np.where(estimates <= self.bar, np.maximum(space.totals(base)[0] - seconds, 0.0), 0.0)
            most = min(self.budget, self.bar)
            likely = ndtr((most - mean) / (spread + 1e-9))
            tells = (space.nats[np.isfinite(space.nats)] > 0).any()  # else nothing is known to be unlikely
            score = np.where(likely > UNLIKELY, gain * likely, 0.0) if tells else gain * likely
            if best is None and (hopeful := worth & (gain > 0)).any():  # first of all find one that is within it
                if (hopeful & (mean <= most)).any():
                    score = gain * (mean <= most)
                elif self.bar == math.inf:
                    score = 1.0 * (hopeful & (mean <= mean[hopeful].min()))
        else:
            assert self.target.min_speedup is not None
            worth &= space.speedups(asked) >= self.target.min_speedup * (1 - ROUNDING)
            below = (self.cost(base) - mean) / (spread + 1e-9)  # expected improvement
            score = (spread + 1e-9) * (below * ndtr(below) + np.exp(-(below**2) / 2) / math.sqrt(2 * math.pi))
        score = np.where(worth, score, 0.0)
        index = int(np.argmax(score))
        return asked[index] if score[index] > 0 else None


# ---- what others tell of a layout ----


def believed_costs(
    space: LayoutSpace, measured: np.ndarray, increases: np.ndarray, asked: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Mean and standard deviation of the real costs of layouts, in nats per token: [A] each.

    measured: [M, L] options of layouts, whose real costs are ``increases`` [M]. asked: [A, L].
    """
    finite = space.nats[np.isfinite(space.nats) & (space.nats > 0)]
    least = FLOOR * float(finite.mean()) if len(finite) else NOTHING_KNOWN
    known, wanted = _Terms(space, measured, least), _Terms(space, asked, least)
    covariance = known.covariance(known)
    covariance[np.diag_indices(len(measured))] += (NOISE * known.estimates) ** 2 + 1e-12
    cross = wanted.covariance(known)
    weights = np.linalg.solve(covariance, cross.T).T
    off = increases - FACTOR * known.estimates
    mean = FACTOR * wanted.estimates + weights @ off
    # where measured costs are further from the estimates than was believed, others are, too
    surprise = max(1.0, float(off @ np.linalg.solve(covariance, off)) / len(measured))
    return mean, np.sqrt(math.sqrt(surprise) * np.maximum(wanted.own_variance() - (weights * cross).sum(1), 0.0))


class _Terms:
    """Of layouts [P, L] their estimates [P], and how large what may differ is, by layer [P, L] and pair [P, L - 1]."""

    def __init__(self, space: LayoutSpace, chosen: np.ndarray, least: float) -> None:
        self.chosen = chosen.astype(np.int64)
        self.pairs = self.chosen[:, :-1] * 8 + self.chosen[:, 1:]
        changed = self.chosen > 0
        # of a layer that estimates say nothing of, all may differ
        sizes = space.nats[np.arange(space.num_layers), self.chosen]
        sizes = sizes + least if sizes.any() else sizes + least / LAYER_SPREAD
        self.layer_sizes = np.where(changed, sizes, 0.0)
        self.pair_sizes = np.sqrt(self.layer_sizes[:, :-1] * self.layer_sizes[:, 1:])
        self.estimates = space.totals(chosen)[1] + least * changed.sum(1)

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


# ---- what may be measured ----


def _way_back(space: LayoutSpace, chosen: np.ndarray) -> np.ndarray:
    """From a layout to the dense one: its changed layers are given back one by one, first the dearest for what it saves
    as far as estimates tell."""
    layers = np.flatnonzero(chosen)
    options = chosen[layers]
    saved = space.seconds[layers, 0] - space.seconds[layers, options]
    dearness = space.nats[layers, options] / np.maximum(saved, np.finfo(float).tiny)
    way = np.repeat(chosen[None], len(layers) + 1, 0)
    for step, layer in enumerate(layers[np.argsort(-dearness, kind="stable")], 1):
        way[step:, layer] = 0
    return way


def _neighbours(space: LayoutSpace, chosen: np.ndarray) -> np.ndarray:
    """Layouts that differ from ``chosen`` in the options of one layer or of two: [count, L]. Of two, as many as
    promise most by their sums."""
    changes = np.argwhere(np.isfinite(space.nats))
    changes = changes[chosen[changes[:, 0]] != changes[:, 1]]
    where, option = changes.T
    one = np.repeat(chosen[None], len(changes), 0)
    one[np.arange(len(changes)), where] = option
    (seconds, nats), (here_seconds, here_nats) = space.totals(one), space.totals(chosen)
    first, second = np.triu_indices(len(changes), 1)
    gain = 2 * here_seconds - seconds[first] - seconds[second]
    price = nats[first] + nats[second] - 2 * here_nats
    order = np.flatnonzero((where[first] != where[second]) & (gain > 0))
    if len(order) > NEIGHBOURS:  # those that cost least for what they save, of small and of large steps
        order = order[np.argsort(price[order] / gain[order] ** 0.5, kind="stable")[:NEIGHBOURS]]
    two = one[first[order]]
    two[np.arange(len(order)), where[second[order]]] = option[second[order]]
    return np.concatenate([one, two])


# ---- held-out windows ----


def _confirmed(search: _Search) -> np.ndarray:
    """The best layout that was measured on held-out windows: one after the other, until one is within the budget there
    too; if none is left that was measured and may be, another is. Of none, the best that was not measured there."""
    while search.made < search.limit:
        best = search.best()
        if best is None:
            best = search.most_promising() if search.made + 2 <= search.limit else None
            if best is None:
                break
            search.cost(best)
            continue
        cost = search.cost(best, held_out=True)
        if cost <= search.budget:
            found = search.held_out[best.tobytes()]
            if _is_borderline(search, found):
                search.notes.append(
                    f"borderline: on other windows it may well be over budget. {found.windows} held-out windows say"
                    f" {found.increase:+.4f} nats of {search.budget:.4f}, with a standard error of"
                    f" {found.increase_stderr or 0:.4f}; to confirm it on more windows, give --held-out-data, or"
                    " measure the sensitivity with more --samples"
                )
            return best
        search.notes.append(
            f"{search.space.layout(best)} is over budget on held-out windows ({cost:+.4f} nats of"
            f" {search.target.max_nats:.4f}), so another was taken"
        )
        # Where held-out windows cost more than the others or the estimates say, they do so for all layouts
        search.bar = min(search.bar, search.dearest(best) * search.budget / cost)
    return _unconfirmed(search)


def _is_borderline(search: _Search, found: LayoutNll | None) -> bool:
    """Whether held-out windows are too few to be sure of a layout that is within the budget on them."""
    error = None if found is None else found.increase_stderr
    return found is not None and error is not None and search.budget - found.increase < error


def _unconfirmed(search: _Search) -> np.ndarray:
    """The least costly that no held-out windows have spoken against, if it is within the budget at all."""
    left = [one for one in search.candidates() if one.tobytes() not in search.held_out]
    best = min(left, key=lambda one: (not search.passes(one), search.cost(one)), default=None)
    if best is None or search.cost(best) > search.budget:
        worst = [
            max(found.increase, search.held_out.get(key, found).increase) for key, found in search.measured.items()
        ]
        raise UserError(
            f"none of the {len(search.measured)} layouts that were measured stays within --max-ppl-increase"
            f" {search.target.max_ppl_increase} ({search.target.max_nats or 0.0:.4f} nats) on all windows; the least"
            f" increase is {min(worst):.4f} nats, so give a larger budget, or a larger --verify"
        )
    reason = "no other layout is likely enough to be within the budget there"
    if search.made + 2 > search.limit:
        reason = f"the {search.limit} measurements of --verify did not suffice"
    if not search.passes(best):
        reason += "; where it costs as much more there, it is over budget too"
    search.notes.append(f"{search.space.layout(best)} was not measured on held-out windows: {reason}")
    return best
