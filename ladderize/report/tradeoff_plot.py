"""The trade-off: speed-up against accuracy, or against perplexity, with the Pareto front."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from ladderize.eval.table import margin_text
from ladderize.report.join import ReportContent
from ladderize.report.models import Setting, speedup_text
from ladderize.report.plot import (
    ACCURACY,
    DRAWING_WIDTH,
    PERPLEXITY,
    Measure,
    PlotRows,
    ReportPlot,
    Spec,
    family_colour,
    intervals,
    kind_shape,
    level,
    lines,
    make_spec,
    quantitative,
)

Anchor = tuple[int, int, str]  # of a name: its distance from its mark to the right and down, and its alignment
Box = tuple[float, float, float, float]  # left, right, top and bottom, in pixels
HEIGHT = 380
EDGE = 24  # pixels between the outermost marks and the edges of the drawing
MARK_RADIUS, NAME_HEIGHT, CHARACTER = 9, 16, 7  # pixels; of a character: its width
NAME_ANCHORS: Sequence[Anchor] = (
    (10, -12, "left"), (-10, -12, "right"), (0, -20, "center"), (10, 12, "left"), (-10, 12, "right"),
    (0, 20, "center"), (14, 0, "left"), (-14, 0, "right"), (0, -36, "center"), (0, 36, "center"),
)  # fmt: skip
MARK_SIZES = (70, 120, 180)  # as converted; aligned; trained


def tradeoff_plots(content: ReportContent, first: Setting | None) -> list[ReportPlot]:
    """Return a plot for each measure that was taken, with a panel for each setting; none without times of checkpoints.

    first: the setting that is shown first.
    """
    settings = sorted(content.real_settings, key=lambda setting: setting != first)
    plots = []
    for measure in (ACCURACY, PERPLEXITY):
        rows = {setting: _rows(content, measure, setting) for setting in settings}
        panels = [_panel(content, measure, setting, placed) for setting, placed in rows.items() if len(placed) > 1]
        is_accuracy = measure is ACCURACY
        margin = f" The dashed line is the margin, {margin_text(content.margin)}." if is_accuracy else ""
        caption = (
            "From end to end. Up and to the right is better. Bars are 95 % intervals of the speed-up and of the"
            " difference to dense. Filled marks are on the Pareto front: no other model is both faster and better,"
            f" intervals aside. Only these are named here; point at a mark for its name and numbers.{margin}"
            " Circles are measured; diamonds are emulated. Small marks are models as converted, larger ones are"
            " aligned, the largest trained, with a dot in them."
        )
        name = "tradeoff" if is_accuracy else "tradeoff-perplexity"
        title = f"Speed-up against {'accuracy' if is_accuracy else 'perplexity'}"
        if panels:
            plots.append(ReportPlot(name, title, caption, panels))
    return plots


def _rows(content: ReportContent, measure: Measure, setting: Setting) -> list[dict[str, Any]]:
    """Return a row for each model that was timed in a setting."""
    placed = [
        (one, timing.whole, score)
        for one in content.models
        if (timing := one.timing(setting)) is not None and (score := getattr(one, measure.name)) is not None
    ]
    front = pareto_front([(speed.value, measure.scaled(score.value)) for _, speed, score in placed])
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
            "words": f"{one.title}; end to end {speedup_text(speed)}, {setting.words}; {one.scores}"
            f"{'; on the Pareto front' if on_front else ''}",
        }
        for (one, speed, score), on_front in zip(placed, front, strict=True)
    ]


def pareto_front(points: Sequence[tuple[float, float]]) -> list[bool]:
    """Return True for each (speed-up, score) that is on the Pareto front: more of both is better.

    A point is off it if another is at least as good in both and better in one. Equal points are on it or off it
    together.
    """
    return [not any(other != one and other[0] >= one[0] and other[1] >= one[1] for other in points) for one in points]


def name_anchors(names: Sequence[str | None], marks: Sequence[tuple[float, float]], bars: Sequence[Box]) -> list[Any]:
    """Return where each mark's name lies, of NAME_ANCHORS; None: there is no name, or no room for it.

    No name lies on a mark or on another name. Those of the fastest come first.
    """
    taken: list[Box] = [(x - MARK_RADIUS, x + MARK_RADIUS, y - MARK_RADIUS, y + MARK_RADIUS) for x, y in marks]
    anchors: dict[int, Anchor] = {}
    for number in sorted(range(len(names)), key=lambda number: -marks[number][0]):
        boxes = {anchor: _name_box(names[number] or "", marks[number], anchor) for anchor in NAME_ANCHORS}
        free = [anchor for anchor in NAME_ANCHORS if names[number] and not _count(boxes[anchor], taken)]
        if free:
            anchors[number] = min(free, key=lambda anchor: _drawbacks(anchor, boxes[anchor], bars))
            taken.append(boxes[anchors[number]])
    return [anchors.get(number) for number in range(len(names))]


def _name_box(name: str, mark: tuple[float, float], anchor: Anchor) -> Box:
    right, down, align = anchor
    width = CHARACTER * len(name)
    left = mark[0] + right - {"left": 0, "center": width / 2, "right": width}[align]
    top = mark[1] + down - NAME_HEIGHT / 2
    return left, left + width, top, top + NAME_HEIGHT


def _drawbacks(anchor: Anchor, box: Box, bars: Sequence[Box]) -> tuple[bool, bool, int]:
    """Return whether a name is out of the drawing, whether it is far from its mark, and how many bars it crosses."""
    is_outside = box[0] < 0 or box[1] > DRAWING_WIDTH or box[2] < 0 or box[3] > HEIGHT
    return is_outside, abs(anchor[1]) > 20, _count(box, bars)


def _count(box: Box, others: Sequence[Box]) -> int:
    """Return the number of the others that a box lies on."""
    left, right, top, bottom = box
    return sum(left < other[1] and other[0] < right and top < other[3] and other[2] < bottom for other in others)


def _values(rows: PlotRows, field: str) -> np.ndarray:
    """Return a row for each model: the value, and the ends of its interval, which are the value where it has none."""
    values = np.array([(row[field], row[f"{field}1"], row[f"{field}2"]) for row in rows], dtype=float)
    return np.where(np.isnan(values), values[:, :1], values)


def _panel(content: ReportContent, measure: Measure, setting: Setting, rows: list[dict[str, Any]]) -> Spec:
    levels = [0.0, -content.margin] if measure is ACCURACY else [0.0]
    x_values, y_values = _values(rows, "x"), _values(rows, "y")
    x_ends = [min(0.95, float(x_values.min())), max(1.05, float(x_values.max()))]
    y_ends = [min(*levels, float(y_values.min())), max(measure.linear / 2, float(y_values.max()))]
    across = np.interp(x_values, x_ends, (EDGE, DRAWING_WIDTH - EDGE))
    down = np.interp(measure.scaled(y_values), sorted(map(measure.scaled, y_ends)), (HEIGHT - EDGE, EDGE))
    bars = [*zip(across[:, 1], across[:, 2], down[:, 0], down[:, 0], strict=True)]
    bars += zip(across[:, 0], across[:, 0], down[:, 1:].min(1), down[:, 1:].max(1), strict=True)
    names = [row["name"] if row["front"] else None for row in rows]
    anchors = name_anchors(names, [*zip(across[:, 0], down[:, 0], strict=True)], bars)
    placed = [{**row, "anchor": anchor} for row, anchor in zip(rows, anchors, strict=True)]
    scale = {"domain": x_ends, "zero": False, "nice": False, "padding": EDGE}
    axis = {"format": ".2~f", "labelExpr": "datum.label + '\u00d7'", "tickCount": 6}
    x = quantitative("x", "speed-up over dense", scale=scale, axis=axis)
    y = measure.axis("y", domain=y_ends, padding=EDGE)
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
        level("x", 1),
        *(level("y", value, dashed=value != 0) for value in levels),
        {**front, "transform": [{"filter": "datum.front"}]},
        intervals("x", {**place, "color": colour}),
        intervals("y", {**place, "color": colour}),
        {"mark": {"type": "point", "strokeWidth": 2, "opacity": 1}, "encoding": points},
        {**dot, "transform": [{"filter": "datum.trained"}]},
        _names(place, stroke="var(--page)", strokeWidth=4, strokeJoin="round"),  # so that no line runs through a name
        _names(place),
    ]
    return make_spec(setting.words, HEIGHT, placed, layers)


def _names(place: Spec, **look: Any) -> Spec:
    """Draw the names for which there is room."""
    offsets = {key: {"expr": f"datum.anchor[{number}]"} for number, key in enumerate(("dx", "dy", "align"))}
    return {
        "transform": [{"filter": "isValid(datum.anchor)"}],
        "mark": {"type": "text", "aria": False, "limit": 0, **offsets, **look},
        "encoding": {**place, "text": {"field": "name"}},
    }
