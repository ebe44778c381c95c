"""The trade-off: speed-up against accuracy, or against perplexity, with the Pareto front."""

import math
from collections.abc import Callable, Sequence
from typing import Any

from ladderize.eval.table import margin_text
from ladderize.report.join import ReportContent
from ladderize.report.models import Setting, WithInterval, speedup_text
from ladderize.report.plot import (
    DRAWING_WIDTH,
    MEASURES,
    SIGNED_LABEL,
    ReportPlot,
    Spec,
    family_colour,
    intervals,
    kind_shape,
    level,
    lines,
    make_spec,
    positive_scale,
    quantitative,
)

HEIGHT = 380
CLOSE_UP = 0.06  # the height of a name, and its distance from its mark, as a share of the axis
MARK_SHARE = 0.02  # half the width of a mark, as a share of the axis
NAME_LIMIT, CHARACTER = 180, 6.5  # the most pixels of a name, and those of a character
POINT_TICKS = (-100, -50, -20, -10, -5, -2, -1, -0.5, 0, 0.5, 1, 2, 5, 10, 20, 50)
BEYOND = 2  # points from dense, beyond which the scale is logarithmic, so that small losses stay apart
MARK_SIZES = (70, 120, 180)  # as converted; aligned; trained


def tradeoff_plots(content: ReportContent, first: Setting | None) -> list[ReportPlot]:
    """Return a plot for each measure that was taken, with a panel for each setting; none without times of checkpoints.

    first: the setting that is shown first.
    """
    settings = sorted(content.real_settings, key=lambda setting: setting != first)
    plots = []
    for measure in MEASURES:
        rows = {setting: _rows(content, measure, setting) for setting in settings}
        panels = [_panel(content, measure, setting, placed) for setting, placed in rows.items() if len(placed) > 1]
        is_accuracy = measure == "difference"
        margin = f" The dashed line is the margin, {margin_text(content.margin)}." if is_accuracy else ""
        caption = (
            "From end to end. Up and to the right is better. Bars are 95 % intervals of the speed-up and of the"
            " difference to dense. Filled marks are on the Pareto front: no other model is both faster and better,"
            f" intervals aside.{margin} Circles are measured; diamonds are emulated. Small marks are models as"
            " converted, larger ones are aligned, the largest trained, with a dot in them."
        )
        name = "tradeoff" if is_accuracy else "tradeoff-perplexity"
        title = f"Speed-up against {'accuracy' if is_accuracy else 'perplexity'}"
        if panels:
            plots.append(ReportPlot(name, title, caption, panels))
    return plots


def _rows(content: ReportContent, measure: str, setting: Setting) -> list[dict[str, Any]]:
    """Return a row for each model that was timed in a setting."""
    placed = [
        (one, timing.whole, score)
        for one in content.models
        if (timing := one.timing(setting)) is not None and (score := getattr(one, measure)) is not None
    ]
    sign = 1 if measure == "difference" else -1
    front = pareto_front([(speed.value, sign * score.value) for _, speed, score in placed])
    across = _shares([one for _, one, _ in placed])
    up = _shares([score for _, _, score in placed], lambda end: sign * math.asinh(end / BEYOND))  # as the scale
    sides = name_sides(
        up, across, [name_span(one.name, x) for (one, _, _), x in zip(placed, across, strict=True)], front
    )
    return [
        {
            "kind": setting.kind,
            "family": one.family,
            "size": MARK_SIZES[bool(one.adaptation) + one.was_trained],
            "trained": one.was_trained,
            "name": one.name,
            **speed.fields("x"),
            **score.fields("y"),
            "front": on_front,
            "label": side,
            "words": f"{one.title}; end to end {speedup_text(speed)}, {setting.words}; {one.scores}"
            f"{'; on the Pareto front' if on_front else ''}",
        }
        for (one, speed, score), on_front, side in zip(placed, front, sides, strict=True)
    ]


def pareto_front(points: Sequence[tuple[float, float]]) -> list[bool]:
    """Return True for each (speed-up, score) that is on the Pareto front: more of both is better.

    A point is off it if another is at least as good in both and better in one. Equal points are on it or off it
    together.
    """
    return [not any(other != one and other[0] >= one[0] and other[1] >= one[1] for other in points) for one in points]


def name_span(name: str, across: float) -> tuple[float, float]:
    """Return the ends of a mark's name, as shares of the axis: it runs to the left of marks on the right half."""
    width = min(NAME_LIMIT, CHARACTER * len(name)) / DRAWING_WIDTH
    return (across - width, across) if across > 0.5 else (across, across + width)


def name_sides(
    up: Sequence[float], across: Sequence[float], spans: Sequence[tuple[float, float]], front: Sequence[bool]
) -> list[int]:
    """Return the side of each mark's name: 1 above it, -1 below it, 0 no name.

    Marks of the front come first, the fastest of them before the others. No name lies on another one or on a mark; one
    of the front may lie on a mark that is not.

    up, across: of each mark, as shares of the axes.
    spans: of each name, see ``name_span``.
    """
    sides = [0] * len(up)

    def is_covered(place: int, side: int, other: int) -> bool:
        above, (left, right), (start, end) = up[other] - up[place], spans[place], spans[other]
        is_as_high = abs(above + (sides[other] - side) * CLOSE_UP) <= CLOSE_UP
        on_name = sides[other] != 0 and is_as_high and left < end and start < right
        on_mark = (front[other] or not front[place]) and 0 < side * above <= 2 * CLOSE_UP
        return on_name or (on_mark and left - MARK_SHARE <= across[other] <= right + MARK_SHARE)

    for place in sorted(range(len(up)), key=lambda place: (not front[place], -across[place])):
        free = (s for s in (1, -1) if not any(is_covered(place, s, other) for other in range(len(up))))
        sides[place] = next(free, 0)
    return sides


def _shares(values: Sequence[WithInterval], scale: Callable[[float], float] = float) -> list[float]:
    """Return where each value lies on an axis that shows all of them and their intervals, as a share of its length."""
    ends = [scale(end) for one in values for end in (one.value, one.low, one.high) if end is not None] or [0.0]
    margin = 0.1 * (max(ends) - min(ends)) or 0.5  # axes end at round numbers
    return [(scale(one.value) - min(ends) + margin) / (max(ends) - min(ends) + 2 * margin) for one in values]


def _panel(content: ReportContent, measure: str, setting: Setting, rows: list[dict[str, Any]]) -> Spec:
    x = quantitative(
        "x",
        "speed-up over dense",
        scale={"zero": False, "nice": True, "padding": 24},
        axis={"format": ".2~f", "labelExpr": "datum.label + '\u00d7'", "tickCount": 6},
    )
    levels = [level("x", 1)]
    if measure == "difference":
        title = f"points from dense (logarithmic beyond \u00b1{BEYOND})"
        axis: Spec = {"values": POINT_TICKS, "labelExpr": SIGNED_LABEL, "labelOverlap": True}
        scale: Spec = {"type": "symlog", "constant": BEYOND, "zero": False}
        levels += [level("y", 0), level("y", -content.margin, dashed=True)]
    else:
        title, axis = "perplexity (axis turned round: up is better)", {"tickCount": 7, "format": "~g"}
        ends = [row[key] for row in rows for key in ("y", "y1", "y2") if row[key] is not None]
        scale = {**positive_scale(ends), "reverse": True}
    y = quantitative("y", title, scale={**scale, "padding": 16, "nice": False}, axis=axis)
    place, colour = {"x": x, "y": y}, family_colour(rows)
    front = lines({**place, "order": {"field": "x", "type": "quantitative"}}, color="var(--muted)", strokeDash=[2, 3])
    points = {
        **place,
        "color": colour,
        "fill": {"condition": {"test": "datum.front", **colour}, "value": "var(--page)"},
        "shape": kind_shape(),
        "size": {"field": "size", "type": "quantitative", "scale": None, "legend": None},
        "description": {"field": "words"},
    }
    dot = {"mark": {"type": "point", "filled": True, "size": 22, "opacity": 1, "aria": False}}
    dot |= {"encoding": {**place, "color": {"condition": {"test": "datum.front", "value": "var(--page)"}, **colour}}}
    layers = [
        *levels,
        {**front, "transform": [{"filter": "datum.front"}]},
        intervals("x", {**place, "color": colour}),
        intervals("y", {**place, "color": colour}),
        {"mark": {"type": "point", "strokeWidth": 2, "opacity": 1}, "encoding": points},
        {**dot, "transform": [{"filter": "datum.trained"}]},
        _labels(place, stroke="var(--page)", strokeWidth=4, strokeJoin="round"),  # so that no line runs through a name
        _labels(place),
    ]
    return make_spec(setting.words, HEIGHT, rows, layers)


def _labels(place: Spec, **look: Any) -> Spec:
    """Draw the models' names: to the left of marks on the right half, to the right of the others."""
    right = f"scale('x', datum.x) > {DRAWING_WIDTH / 2}"
    return {
        "transform": [{"filter": "datum.label !== 0"}],
        "mark": {
            "type": "text",
            "aria": False,
            "align": {"expr": f"{right} ? 'right' : 'left'"},
            "dx": {"expr": f"{right} ? -6 : 6"},
            "dy": {"expr": "-12 * datum.label"},
            "limit": NAME_LIMIT,
            **look,
        },
        "encoding": {**place, "text": {"field": "name"}},
    }
