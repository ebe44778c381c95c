"""The trade-off: speed-up against accuracy, or against perplexity, with the Pareto front."""

import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any

from ladderize.eval.table import margin_text
from ladderize.report.join import ReportContent
from ladderize.report.models import PHASE_WORDS, Setting, WithInterval, speedup_text
from ladderize.report.plot import (
    BY_ACCURACY,
    BY_PERPLEXITY,
    SIGNED_LABEL,
    Measure,
    PlotChoice,
    PlotPanel,
    ReportPlot,
    Spec,
    family_colour,
    family_legend,
    intervals,
    is_wide,
    kind_shape,
    level,
    lines,
    make_spec,
    quantitative,
)

CLOSE_ACROSS, CLOSE_UP = 0.25, 0.06  # shares of the axes: names of marks that are closer would overlap
WIDE_SPAN = 12  # points; beyond, the scale is logarithmic away from 0, so that small losses stay apart
POINT_TICKS = (-100, -50, -20, -10, -5, -2, -1, 0, 1, 2, 5, 10, 20, 50)
MARK_SIZES = (70, 120, 180)  # as converted; aligned; trained
BEYOND = 2  # points from dense, beyond which a wide scale is logarithmic


def tradeoff_plots(content: ReportContent, first: Setting | None) -> list[ReportPlot]:
    """Return a plot for each measure that was taken; none without times of checkpoints.

    first: the setting that is shown at first.
    """
    settings = sorted(content.real_settings, key=lambda setting: setting != first)
    plots = []
    for measure in (BY_ACCURACY, BY_PERPLEXITY):
        places = itertools.product(enumerate(settings), PHASE_WORDS)
        rows = [row for (number, setting), phase in places for row in _rows(content, measure, number, setting, phase)]
        if content.reference is not None and any(row["name"] != content.reference.name for row in rows):
            plots.append(_plot(content, measure, rows))
    return plots


def _rows(content: ReportContent, measure: Measure, number: int, setting: Setting, phase: str) -> list[dict[str, Any]]:
    """Return a row for each model that was timed in a setting, for a phase.

    number: of the setting, since two documents may have settings of the same words.
    """
    placed = [
        (one, timing.speedup(phase), score)
        for one in content.models
        if (timing := one.timing(setting)) is not None and (score := measure.value(one, content.reference)) is not None
    ]
    if not placed:
        return []
    sign = 1 if measure.is_more_better else -1
    front = pareto_front([(speed.value, sign * score.value) for _, speed, score in placed])
    across = _shares([speed for _, speed, _ in placed])
    up = _shares([score for _, _, score in placed], lambda value: sign * math.asinh(value / 2))  # about the scales' way
    sides = name_sides(list(zip(across, up, strict=True)), front)
    return [
        {
            "setting": f"s{number}",
            "place": setting.words,
            "phase": phase,
            "kind": setting.kind,
            "family": one.family,
            "size": MARK_SIZES[bool(one.adaptation) + one.was_trained],
            "trained": one.was_trained,
            "name": one.name,
            **speed.fields("x"),
            **score.fields("y"),
            "front": on_front,
            "label": side,
            "words": f"{one.title}; {PHASE_WORDS[phase]} {speedup_text(speed)}, {setting.words};"
            f" {measure.title} {measure.text(score)}{'; on the Pareto front' if on_front else ''}",
        }
        for (one, speed, score), on_front, side in zip(placed, front, sides, strict=True)
    ]


def pareto_front(points: Sequence[tuple[float, float]]) -> list[bool]:
    """Return True for each (speed-up, score) that is on the Pareto front: more of both is better.

    A point is off it if another is at least as good in both and better in one. Equal points are on it or off it
    together.
    """
    best: dict[float, float] = {}
    for speed, score in points:
        best[speed] = max(score, best.get(speed, score))
    needed, highest = {}, -math.inf  # the score that a point of a speed must have: the best, and above all faster ones
    for speed in sorted(best, reverse=True):
        needed[speed] = best[speed] if best[speed] > highest else math.inf
        highest = max(highest, best[speed])
    return [score == needed[speed] for speed, score in points]


def name_sides(places: list[tuple[float, float]], front: list[bool]) -> list[int]:
    """Return the side of each mark's name: 1 above it, -1 below it, 0 no name.

    Marks of the front come first, the fastest of them before the others. No name lies on another one or on a mark; one
    of the front may lie on a mark that is not.

    places: of each mark, to the right and up, as shares of the axes.
    """
    sides = [0] * len(places)

    def is_covered(place: int, side: int, other: int) -> bool:
        across, above = (b - a for a, b in zip(places[place], places[other], strict=True))
        on_name = sides[other] != 0 and abs(above + (sides[other] - side) * CLOSE_UP) <= CLOSE_UP
        on_mark = (front[other] or not front[place]) and 0 < side * above <= 2 * CLOSE_UP
        return (on_name or on_mark) and abs(across) <= CLOSE_ACROSS

    for place in sorted(range(len(places)), key=lambda place: (not front[place], -places[place][0])):
        free = (s for s in (1, -1) if not any(is_covered(place, s, other) for other in range(len(places))))
        sides[place] = next(free, 0)
    return sides


def _shares(estimates: list[WithInterval], stretch: Callable[[float], float] = float) -> list[float]:
    """Return where each value lies on an axis that shows all intervals, as a share of its length."""
    ends = [stretch(end) for one in estimates for end in (one.value, one.low, one.high) if end is not None]
    return [stretch(one.value) / (max(ends) - min(ends) or 1.0) for one in estimates]


def _plot(content: ReportContent, measure: Measure, rows: list[dict[str, Any]]) -> ReportPlot:
    quality = "accuracy" if measure.is_more_better else "perplexity"
    settings = {row["setting"]: row["place"] for row in rows}
    at_first = rows[0]["place"]
    choices = [PlotChoice("setting", "Setting", list(settings.items()))] if len(settings) > 1 else []
    summary = (
        f"Scatter plot of {len({row['name'] for row in rows})} models: speed-up over dense on the horizontal axis,"
        f" {quality} on the vertical one; at first {at_first}, end to end."
    )
    margin = f"The dashed line is the margin, {margin_text(content.margin)}. " if measure.is_more_better else ""
    return ReportPlot(
        name="tradeoff" if measure.is_more_better else "tradeoff-perplexity",
        title=f"Speed-up against {quality}",
        caption="Up and to the right is better. Bars are 95 % intervals. Filled marks are on the Pareto front: no other"
        f" model is both faster and better, intervals aside. {margin}Circles are measured; diamonds are emulated. Small"
        " marks are models as converted, larger ones are aligned, the largest trained, with a dot in them. At first:"
        f" {at_first}.",
        summary=summary,
        panels=[PlotPanel(_spec(content, measure, rows, summary), picture_title=at_first)],
        legend=family_legend(rows),
        choices=[*choices, PlotChoice("phase", "Time of", list(PHASE_WORDS.items()))],
        interactive=True,
    )


def _spec(content: ReportContent, measure: Measure, rows: list[dict[str, Any]], summary: str) -> Spec:
    x = quantitative(
        "x",
        "speed-up over dense",
        scale={"zero": False, "nice": True, "padding": 24},
        axis={"format": ".2~f", "labelExpr": "datum.label + '\u00d7'", "tickCount": 6},
    )
    y = _vertical(measure, [row[key] for row in rows for key in ("y", "y1", "y2") if row[key] is not None])
    place, colour = {"x": x, "y": y}, family_colour(rows)
    front = lines({**place, "order": {"field": "x", "type": "quantitative"}}, color="var(--muted)", strokeDash=[2, 3])
    points = {
        **place,
        "color": colour,
        "fill": {"condition": {"test": "datum.front", **colour}, "value": "var(--page)"},
        "shape": kind_shape(rows),
        "size": {"field": "size", "type": "quantitative", "scale": None, "legend": None},
        "description": {"field": "words"},
    }
    dot = {"mark": {"type": "point", "filled": True, "size": 22, "opacity": 1, "aria": False}}
    dot |= {"encoding": {**place, "color": {"condition": {"test": "datum.front", "value": "var(--page)"}, **colour}}}
    layers = [
        *([level("y", 0, strokeWidth=1), level("y", -content.margin, dashed=True)] if measure.is_more_better else []),
        level("x", 1, strokeWidth=1),
        {**front, "transform": [{"filter": "datum.front"}]},
        intervals("x", {**place, "color": colour}),
        intervals("y", {**place, "color": colour}),
        {"mark": {"type": "point", "strokeWidth": 2, "opacity": 1}, "encoding": points},
        {**dot, "transform": [{"filter": "datum.trained"}]},
        _labels(place, stroke="var(--page)", strokeWidth=4, strokeJoin="round"),  # so that no line runs through a name
        _labels(place),
    ]
    return make_spec(
        summary,
        380,
        rows,
        layers,
        params=[{"name": "setting", "value": rows[0]["setting"]}, {"name": "phase", "value": "end_to_end"}],
        transform=[{"filter": "datum.setting === setting && datum.phase === phase"}],
    )


def _labels(place: Spec, **look: Any) -> Spec:
    """Draw the models' names: to the left of marks on the right half, to the right of the others.

    A phone has room for the names of the front only.
    """
    right = "scale('x', datum.x) > width / 2"
    return {
        "transform": [{"filter": "datum.label !== 0"}],
        "mark": {
            "type": "text",
            "aria": False,
            "align": {"expr": f"{right} ? 'right' : 'left'"},
            "dx": {"expr": f"{right} ? -6 : 6"},
            "dy": {"expr": "-12 * datum.label"},
            "opacity": {"expr": "datum.front || width > 500 ? 1 : 0"},
            "limit": {"expr": "min(180, width / 2 - 8)"},  # half the drawing is free on that side, on a phone as well
            **look,
        },
        "encoding": {**place, "text": {"field": "name"}},
    }


def _vertical(measure: Measure, values: list[float]) -> Spec:
    """Return the vertical axis, wide enough for the values."""
    low, high = min(values), max(values)
    scale: Spec = {"padding": 16, "nice": False}
    if not measure.is_more_better:
        is_log = is_wide(values)
        scale |= {"reverse": True, **({"type": "log"} if is_log else {"zero": False})}
        title = f"perplexity ({'logarithmic, ' * is_log}axis turned round: up is better)"
        return quantitative("y", title, scale=scale, axis={"format": "~g", "tickCount": 7})
    title, axis = "mean accuracy, points from dense", {"labelExpr": SIGNED_LABEL, "tickCount": 7}
    scale["zero"] = False
    if high - low > WIDE_SPAN:
        scale |= {"type": "symlog", "constant": BEYOND}
        axis = {"values": [tick for tick in POINT_TICKS if low - 5 <= tick <= high + 1], "labelExpr": SIGNED_LABEL}
        title += f" (logarithmic beyond \u00b1{BEYOND})"
    return quantitative("y", title, scale=scale, axis=axis)
