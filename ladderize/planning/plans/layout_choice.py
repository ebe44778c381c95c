"""From times and costs to the layout to choose, measured where that is asked for. Imports no torch."""

import math
from collections.abc import Mapping
from dataclasses import replace

import numpy as np

from ladderize.console import SILENT, Console
from ladderize.errors import UserError
from ladderize.planning.passes import PointSeconds
from ladderize.planning.plans.costs import AccuracyCosts, PlanCosts, RetrainedCosts
from ladderize.planning.plans.document import PlanChoice
from ladderize.planning.plans.layout_space import (
    LayoutSpace,
    choose_point,
    chosen_options,
    option_seconds,
)
from ladderize.planning.plans.options import ChoiceTarget, TimedPhase
from ladderize.planning.plans.search import MeasuresLayouts, verified_choice


def plan_layout(
    seconds: Mapping[str, PointSeconds],
    decode_steps: int,
    phase: TimedPhase,
    target: ChoiceTarget,
    costs: PlanCosts,
    *,
    measurer: MeasuresLayouts | None = None,
    limit: int = 0,
    console: Console = SILENT,
) -> PlanChoice:
    """The fastest layout within the budget, or the most accurate that is fast enough, and the front that it is from.

    seconds: of the phases ``prefill`` and ``decode`` (one step), as far as ``phase`` needs them. measurer, limit: real
    costs are measured, at most so often (``--verify N``); not where there are those of a sweep, which are preferred to
    estimates. What a sensitivity file suggests is then beside them, as not retrained. Raises UserError where nothing
    meets the target.
    """
    constant, layer = option_seconds(seconds, decode_steps, phase)
    if costs.retrained is None:
        assert costs.points is not None
        return _by_estimates(constant, layer, phase, target, costs.points, measurer, limit, console)
    assert measurer is None
    choice = _among_retrained(constant, layer, phase, target, costs.retrained)
    if costs.points is None:
        return choice
    try:
        beyond = _by_estimates(constant, layer, phase, target, costs.points, None, 0, console).chosen
    except UserError as error:
        return replace(choice, notes=[*choice.notes, f"of what was not retrained: {error}"])
    return choice if beyond.as_layout == choice.chosen.as_layout else replace(choice, beyond=beyond)


def _by_estimates(
    constant: float,
    layer: np.ndarray,
    phase: TimedPhase,
    target: ChoiceTarget,
    points: AccuracyCosts,
    measurer: MeasuresLayouts | None,
    limit: int,
    console: Console,
) -> PlanChoice:
    seconds = np.tile(layer, (len(points.nats), 1))
    space = LayoutSpace(seconds, points.nats, points.pairs, constant, points.sync_tp_size)
    target = target.in_nats(points.dense_nll)
    front = space.front()
    point = choose_point(space.speedups(front), space.totals(front)[1], target)
    chosen, check = space.described(front[point]), None
    if measurer is not None:
        chosen, check = verified_choice(space, front, target, measurer, limit, console=console)
    return PlanChoice(
        target=target,
        phase=phase,
        costs="sensitivity",
        costs_file=points.file,
        dense_ms=1000 * float(space.totals(space.dense)[0]),
        dense_perplexity=math.exp(points.dense_nll),
        chosen=chosen,
        front=space.front_points(front),
        notes=points.notes,
        verification=check,
        aligned=points.aligned,
    )


def _among_retrained(
    constant: float, layer: np.ndarray, phase: TimedPhase, target: ChoiceTarget, retrained: RetrainedCosts
) -> PlanChoice:
    """Of the layouts of a sweep; of one that was retrained in several ways, the best."""
    layouts = [one.layout for one in retrained.layouts]
    count, sync_tp_size = layouts[0].num_layers, next(iter(retrained.sync_tp_sizes), None)
    nothing = np.zeros((count, 6)), np.zeros((count - 1, 6, 6))
    space = LayoutSpace(np.tile(layer, (count, 1)), *nothing, constant, sync_tp_size)
    every = np.array([[0] * count, *map(chosen_options, layouts)], np.int8)
    nats = np.array([0.0, *(one.cost.increase for one in retrained.layouts)])
    target = target.in_nats(retrained.dense_nll)
    point = choose_point(space.speedups(every[1:]), nats[1:], target)
    chosen = retrained.layouts[point]
    # those that no other is faster and at most as costly as, the fastest first
    order = np.lexsort((nats, space.totals(every)[0]))
    least = np.minimum.accumulate(np.append(np.inf, nats[order]))[:-1]
    front = order[nats[order] < least]
    return PlanChoice(
        target=target,
        phase=phase,
        costs="sweep",
        costs_file=retrained.file,
        dense_ms=1000 * float(space.totals(space.dense)[0]),
        dense_perplexity=math.exp(retrained.dense_nll),
        chosen=replace(space.described(every[1 + point], measured=chosen.cost), estimated_nats=None),
        front=space.front_points(every[front], nats[front]),
        notes=retrained.notes,
        model=chosen.model,
    )
