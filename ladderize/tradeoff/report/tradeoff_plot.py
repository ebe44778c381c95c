"""The trade-off: speed-up against accuracy, or against perplexity, with the Pareto front."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from ladderize.eval.paired.words import margin_text
from ladderize.figure import SIGNED_LABEL, PlotPanel, Spec, intervals, level, lines, make_spec, quantitative
from ladderize.tradeoff.front import pareto_front
from ladderize.tradeoff.report.answer import Answer
from ladderize.tradeoff.report.join import ReportContent
from ladderize.tradeoff.report.plot import PlotChoice, ReportPlot, family_colour, family_legend, kind_shape
from ladderize.tradeoff.report.subjects import PHASE_WORDS, Setting, Subject, WithInterval
from ladderize.tradeoff.report.words import (
    ReportTable,
    TableCell,
    estimate_text,
    number_cell,
    points_text,
    speedup_text,
    subject_text,
)

CLOSE_ACROSS, CLOSE_UP = 0.3, 0.06  # of the axes: names of marks that are closer would lie on each other
WIDE_SPAN = 12  # points; beyond, the scale is logarithmic away from 0, so that small losses stay apart
POINT_TICKS = (-100, -50, -20, -10, -5, -2, -1, 0, 1, 2, 5, 10, 20, 50)
MARK_SIZES = (70, 120, 180)  # as converted; aligned; trained
WIDE_RATIO = 4  # of the largest perplexity to the least: beyond, the scale is logarithmic


@dataclass(frozen=True)
class Measure:
    """What the vertical axis shows."""

    name: str
    title: str
    axis: str
    more: bool  # whether more is better


BY_ACCURACY = Measure("tradeoff", "Speed-up against accuracy", "mean accuracy, points from dense", True)
BY_PERPLEXITY = Measure(
    "tradeoff-perplexity", "Speed-up against perplexity", "perplexity (axis turned round: up is better)", False
)


def tradeoff_plots(content: ReportContent, answer: Answer, commands: list[str]) -> list[ReportPlot]:
    """One for each measure that was taken; none without times of checkpoints."""
    plots = []
    for measure in (BY_ACCURACY, BY_PERPLEXITY):
        rows = _rows(content, measure)
        if any(row["name"] != (content.reference.name if content.reference else "") for row in rows):
            plots.append(_plot(content, answer, measure, rows, commands))
    return plots


def _score(subject: Subject, measure: Measure, reference: Subject | None) -> WithInterval | None:
    if measure is BY_PERPLEXITY:
        return subject.perplexity
    return WithInterval(0.0) if subject is reference and subject.accuracy is not None else subject.difference


def _score_text(score: WithInterval, measure: Measure) -> str:
    return f"{points_text(score)} points" if measure.more else f"perplexity {estimate_text(score, 3)}"


def _rows(content: ReportContent, measure: Measure) -> list[dict[str, Any]]:
    reference = content.reference
    return [
        row
        for number, setting in enumerate(content.real_settings if reference is not None else [])
        for phase in PHASE_WORDS
        for row in _rows_of(content, reference, measure, number, setting, phase)
    ]


def _rows_of(
    content: ReportContent, reference: Subject | None, measure: Measure, number: int, setting: Setting, phase: str
) -> list[dict[str, Any]]:
    placed = []
    for subject in content.models:
        timing, score = subject.timing(setting), _score(subject, measure, reference)
        if timing is not None and score is not None:
            placed.append((subject, timing.speedup[phase], score))
    sign = 1 if measure.more else -1
    front = pareto_front([(speed.value, sign * score.value) for _, speed, score in placed])
    if not placed:
        return []
    across = _shares([speed for _, speed, _ in placed])
    up = _shares([score for _, _, score in placed], lambda value: sign * math.asinh(value / 2))  # about the scales' way
    labelled = _labelled(list(zip(across, up, strict=True)), front)
    return [
        {
            "setting": f"s{number}",
            "phase": phase,
            "kind": setting.kind,
            "family": subject.family,
            "size": MARK_SIZES[bool(subject.adaptation) + subject.was_trained],
            "name": subject.name,
            "x": speed.value,
            "x1": speed.low,
            "x2": speed.high,
            "y": score.value,
            "y1": score.low,
            "y2": score.high,
            "front": on_front,
            "label": has_label,
            "words": f"{subject_text(subject)}; {PHASE_WORDS[phase]} {speedup_text(speed)}, {setting.kind};"
            f" {_score_text(score, measure)}{'; on the Pareto front' if on_front else ''}",
        }
        for (subject, speed, score), on_front, has_label in zip(placed, front, labelled, strict=True)
    ]


def _labelled(places: list[tuple[float, float]], front: list[bool]) -> list[bool]:
    """Which marks of the front bear a name: the fastest first, none beside one that has it already, and none just below
    another mark of the front, on which the name would lie.

    places: of each mark, to the right and up, as shares of the axes.
    """
    labelled = [False] * len(places)
    for index in sorted(range(len(places)), key=lambda index: -places[index][0]):
        for other, (across, up) in enumerate(places):
            above = up - places[index][1]
            hidden = (labelled[other] and abs(above) <= CLOSE_UP) or (front[other] and 0 < above <= 2 * CLOSE_UP)
            if hidden and abs(across - places[index][0]) <= CLOSE_ACROSS:
                break
        else:
            labelled[index] = front[index]
    return labelled


def _shares(estimates: list[WithInterval], stretch: Callable[[float], float] = float) -> list[float]:
    """Where each value lies on an axis that shows all intervals, as a share of its length."""
    ends = [stretch(end) for one in estimates for end in (one.value, one.low, one.high) if end is not None]
    return [stretch(one.value) / (max(ends) - min(ends) or 1.0) for one in estimates]


def _plot(
    content: ReportContent, answer: Answer, measure: Measure, rows: list[dict[str, Any]], commands: list[str]
) -> ReportPlot:
    first = content.real_settings.index(answer.setting) if answer.setting in content.real_settings else 0
    used = sorted({row["setting"] for row in rows}, key=lambda name: int(name[1:]))
    chosen = f"s{first}" if f"s{first}" in used else used[0]
    names = [(name, content.real_settings[int(name[1:])].words) for name in used]
    first_in_front = sorted(names, key=lambda option: option[0] != chosen)
    choices = [PlotChoice("setting", "Setting", first_in_front)] if len(names) > 1 else []
    choices.append(PlotChoice("phase", "Time of", list(PHASE_WORDS.items())))
    where = dict(names)[chosen]
    axis = "accuracy" if measure.more else "perplexity"
    summary = (
        f"Scatter plot of {len({row['name'] for row in rows})} models: speed-up over dense on the horizontal axis,"
        f" {axis} on the vertical one; at first {where}, end to end."
    )
    margin = f"The dashed line is the margin, {margin_text(content.margin)}. " if measure.more else ""
    caption = (
        f"Up and to the right is better. Bars are 95 % intervals. Filled marks are on the Pareto front: no other model"
        f" is both faster and better, intervals aside. {margin}"
        "Circles are measured; diamonds are emulated; triangles are predicted. Small marks are models as converted,"
        " larger ones are aligned, the largest trained. At first:"
        f" {where}."
    )
    return ReportPlot(
        name=measure.name,
        title=measure.title,
        caption=caption,
        summary=summary,
        panels=[PlotPanel(_spec(content, measure, rows, chosen, summary), picture_title=where)],
        table=_table(content, measure, rows),
        legend=family_legend({row["family"] for row in rows}, {row["kind"] for row in rows}),
        choices=choices,
        commands=commands,
        interactive=True,
    )


def _spec(content: ReportContent, measure: Measure, rows: list[dict[str, Any]], chosen: str, summary: str) -> Spec:
    x = quantitative(
        "x",
        "speed-up over dense",
        scale={"zero": False, "nice": True, "padding": 24},
        axis={"format": ".2~f", "labelExpr": "datum.label + '\u00d7'", "tickCount": 6},
    )
    y = quantitative("y", measure.axis, scale=_y_scale(rows, measure), axis=_y_axis(rows, measure))
    place = {"x": x, "y": y}
    colour = family_colour(rows)
    front = lines({**place, "order": {"field": "x", "type": "quantitative"}}, color="var(--muted)", strokeDash=[2, 3])
    points = {
        **place,
        "color": colour,
        "fill": {"condition": {"test": "datum.front", **colour}, "value": "var(--page)"},
        "shape": kind_shape(rows),
        "size": {"field": "size", "type": "quantitative", "scale": None, "legend": None},
        "description": {"field": "words"},
    }
    layers = [
        level("x", 1, strokeWidth=1),
        {**front, "transform": [{"filter": "datum.front"}]},
        intervals("x", {**place, "color": colour}),
        intervals("y", {**place, "color": colour}),
        {"mark": {"type": "point", "strokeWidth": 2, "opacity": 1}, "encoding": points},
        _labels(x, y),
    ]
    if measure.more:
        layers = [level("y", 0, strokeWidth=1), level("y", -content.margin, dashed=True), *layers]
    return make_spec(
        summary,
        380,
        rows,
        layers,
        params=[{"name": "setting", "value": chosen}, {"name": "phase", "value": "end_to_end"}],
        transform=[{"filter": "datum.setting === setting && datum.phase === phase"}],
    )


def _labels(x: Spec, y: Spec) -> Spec:
    """Names of the models on the front: to the left of marks on the right half, to the right of the others."""
    right = "scale('x', datum.x) > width / 2"
    return {
        "transform": [{"filter": "datum.label"}],
        "mark": {
            "type": "text",
            "aria": False,
            "align": {"expr": f"{right} ? 'right' : 'left'"},
            "dx": {"expr": f"{right} ? -6 : 6"},
            "dy": -12,
            "limit": {"expr": "min(180, width / 2 - 8)"},  # half the drawing is free on that side, on a phone as well
        },
        "encoding": {"x": x, "y": y, "text": {"field": "name"}},
    }


def _ends(rows: list[dict[str, Any]]) -> tuple[float, float]:
    values = [row[key] for row in rows for key in ("y", "y1", "y2") if row[key] is not None]
    return min(values), max(values)


def _y_scale(rows: list[dict[str, Any]], measure: Measure) -> Spec:
    low, high = _ends(rows)
    if measure.more:
        scale: Spec = {"zero": False, "padding": 16, "nice": False}
        return {**scale, "type": "symlog", "constant": 2} if high - low > WIDE_SPAN else scale
    scale = {"reverse": True, "padding": 16, "nice": False}
    return {**scale, **({"type": "log"} if low > 0 and high / low > WIDE_RATIO else {"zero": False})}


def _y_axis(rows: list[dict[str, Any]], measure: Measure) -> Spec:
    low, high = _ends(rows)
    if measure.more and high - low > WIDE_SPAN:
        ticks = [tick for tick in POINT_TICKS if low - 5 <= tick <= high + 1]
        return {"values": ticks, "labelExpr": SIGNED_LABEL}
    return {"labelExpr": SIGNED_LABEL, "tickCount": 7} if measure.more else {"format": "~g", "tickCount": 7}


def _table(content: ReportContent, measure: Measure, rows: list[dict[str, Any]]) -> ReportTable:
    score = "points from dense" if measure.more else "perplexity"
    columns = ["model", "setting", "time of", "speed-up", "95 % interval of it", score, "Pareto front"]
    table = ReportTable(f"{measure.title}: the data", columns)
    for row in rows:
        setting = content.real_settings[int(row["setting"][1:])]
        value = WithInterval(row["y"], row["y1"], row["y2"])
        interval = f"{row['x1']:.3f} to {row['x2']:.3f}" if row["x1"] is not None else ""
        table.add(
            row["name"],
            setting.words,
            PHASE_WORDS[row["phase"]],
            number_cell(row["x"], "{:.3f}"),
            TableCell(interval, row["x1"]),
            TableCell(points_text(value) if measure.more else estimate_text(value, 3), row["y"]),
            "yes" if row["front"] else "no",
        )
    return table
