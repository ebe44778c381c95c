"""A choice that was measured, and confirmed on windows that nothing was chosen by. Imports no torch.

Of at most N measurements, most go to the search. Then the best is measured on held-out windows. What is over budget
there is given up, and the next best is measured.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from ladderize.console import SILENT, Console
from ladderize.errors import UserError
from ladderize.planning.planner.choose import SLACK, TimedLayouts
from ladderize.planning.planner.document import ChoiceTarget, MeasuredCheck, PlannedLayout
from ladderize.planning.planner.front import LayoutFront
from ladderize.planning.planner.search import LayoutSearch, MeasuresLayouts, find_layouts, way_back


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
    search = LayoutSearch(space, measurer, limit, console)
    find_layouts(search, front, target)
    chosen, verified = _confirmed(search, front, target)
    check = MeasuredCheck(
        verified=verified,
        limit=limit,
        made=search.made,
        layouts=[search.described(one) for one in search.candidates()],
        notes=search.notes,
    )
    return search.described(chosen), check


@dataclass
class _Bar:
    """What a layout has to stay within to be worth a held-out measurement: as measured, and as estimated."""

    measured: float
    estimated: float = math.inf

    def passes(self, search: LayoutSearch, chosen: np.ndarray) -> bool:
        return search.cost(chosen) <= self.measured and search.estimate(chosen) <= self.estimated

    def lower(self, search: LayoutSearch, failed: np.ndarray, budget: float) -> None:
        """Where held-out windows cost more than the others, they do so for all layouts, so the next has to be within as
        much less. Where the others say next to nothing of what held-out ones do, estimates tell how much less."""
        held_out, measured = search.cost(failed, held_out=True), search.cost(failed)
        if 2 * measured >= held_out:
            self.measured = min(self.measured, measured * budget / held_out)
        else:
            self.estimated = min(self.estimated, search.estimate(failed) * budget / held_out)


def _confirmed(search: LayoutSearch, front: LayoutFront, target: ChoiceTarget) -> tuple[np.ndarray, bool]:
    """The best layout, and whether it was measured on held-out windows: one after the other, until one is within the
    budget there too; if none is left that was measured and may be, another is."""
    if target.max_nats is None:
        best = search.best(target)
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


def _note_doubt(search: LayoutSearch, chosen: np.ndarray, budget: float) -> None:
    """Say where the held-out windows are too few to be sure of."""
    found = search.held_out[chosen.tobytes()]
    if found.increase_stderr is not None and budget - found.increase < found.increase_stderr:
        search.notes.append(
            f"on other windows it may well be over budget: {found.windows} held-out windows say {found.increase:+.4f}"
            f" nats of {budget:.4f}, with a standard error of {found.increase_stderr:.4f}; a"
            " sensitivity of more --samples is confirmed on more windows"
        )


def _less_costly(search: LayoutSearch, front: LayoutFront, bar: _Bar) -> np.ndarray | None:
    """The fastest point of the front that was not measured and is well believed to pass; where there is none, the
    cheapest layout that was measured with half as many changed layers."""
    halved = way_back(search.space, min(search.candidates(), key=search.cost)).chosen
    others = np.concatenate([front.chosen, halved[len(halved) // 2, None]])
    mean, spread = search.believed(front.chosen)
    believed = np.append((mean + spread <= bar.measured) & (front.nats <= bar.estimated), True)
    new = np.array([one.tobytes() not in search.measured for one in others])
    faster = search.space.speedup(search.space.costs.totals(others)[0]) > 1 + SLACK
    fitting = np.flatnonzero(believed & new & faster)
    return others[fitting[0]] if len(fitting) else None


def _unconfirmed(search: LayoutSearch, target: ChoiceTarget, left: Sequence[np.ndarray], bar: _Bar) -> np.ndarray:
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


def _why_not(search: LayoutSearch, chosen: np.ndarray, bar: _Bar) -> str:
    if search.made + 2 > search.limit:
        reason = f"the {search.limit} measurements of --verify did not suffice"
    else:
        reason = "no other layout is likely enough to be within the budget there"
    return (
        reason if bar.passes(search, chosen) else f"{reason}; where it costs as much more there, it is over budget too"
    )
