"""Differences to the dense model, task by task, and what adaptation wins back."""

from collections.abc import Iterator
from typing import Any

from ladderize.figure import (
    SIGNED_LABEL,
    PlotPanel,
    Spec,
    intervals,
    level,
    lines,
    make_spec,
    marks,
    nominal,
    quantitative,
)
from ladderize.tradeoff.report.join import ReportContent
from ladderize.tradeoff.report.plot import (
    BY_ACCURACY,
    BY_PERPLEXITY,
    TOKENS_AXIS,
    Measure,
    ReportPlot,
    dots,
    family_colour,
    family_legend,
)
from ladderize.tradeoff.report.retraining_plot import retraining_plots
from ladderize.tradeoff.report.subjects import Subject, TaskScore, WithInterval
from ladderize.tradeoff.report.words import (
    TableCell,
    interval_cell,
    make_table,
    number_cell,
    number_text,
    percent_cell,
    points_text,
    subject_text,
)
from ladderize.workflows.sweep_document import AS_CONVERTED, THEN

MOST_DRAWN = 12  # models in the plot: its table has all


def task_plots(content: ReportContent) -> list[ReportPlot]:
    """One plot with a panel for each task; none where nothing was compared."""
    others = [subject for subject in content.models if subject is not content.reference]
    found = [(one, score, score.difference) for one in others for score in one.scores if score.difference is not None]
    tasks = dict.fromkeys(score.task for _, score, _ in found if score.main and score.points)
    if not tasks:
        return []
    most_accurate_first = sorted(
        (one for one in others if one.scores), key=lambda one: -(one.accuracy.value if one.accuracy else 0.0)
    )
    drawn = {id(one) for one in most_accurate_first[:MOST_DRAWN]}
    rows = [
        {
            "task": score.task,
            "metric": score.metric,
            "name": subject.name,
            "family": subject.family,
            **difference.scaled(100).fields("x"),
            "words": f"{subject_text(subject)}; {score.task}: {points_text(difference.scaled(100))} points",
        }
        for subject, score, difference in found
        if score.main and score.points and id(subject) in drawn
    ]
    paired = all(score.paired for _, score, _ in found)
    how = " of paired differences" if paired else ", unpaired where the results hold no samples"
    left_out = f" Drawn are the {MOST_DRAWN} most accurate; the table has all." if len(others) > MOST_DRAWN else ""
    return [
        ReportPlot(
            name="tasks",
            title="Differences task by task",
            caption=f"Points from dense on the same questions; bars are 95 % intervals{how}. Left of 0 is worse. The"
            f" dashed line is the margin.{left_out}",
            summary=f"Differences of {len(drawn)} models to dense in {len(tasks)} tasks, in points, with 95 %"
            " intervals.",
            panels=[_task_panel(task, [row for row in rows if row["task"] == task], content.margin) for task in tasks],
            table=make_table("Differences task by task: the data", (_task_row(*one) for one in found)),
            legend=family_legend(rows),
        )
    ]


def _task_panel(task: str, rows: list[dict[str, Any]], margin: float) -> PlotPanel:
    title = f"points of {rows[-1]['metric'] if rows else ''} from dense"
    x = quantitative("x", title, axis={"labelExpr": SIGNED_LABEL, "tickCount": 5})
    levels = [level("x", 0), level("x", -margin, dashed=True)]
    return PlotPanel(dots(f"{task}: points from dense", rows, x, levels), task)


def _task_row(subject: Subject, score: TaskScore, difference: WithInterval) -> dict[str, str | TableCell]:
    shown = difference.scaled(100) if score.points else difference
    digits = 1 if score.points else 4
    return {
        "model": subject.name,
        "task": score.task,
        "metric": score.metric,
        "value": percent_cell(score.value) if score.points else number_cell(score.value, "{:.4f}"),
        "difference": number_cell(shown.value, lambda value: number_text(value, digits, sign=True)),
        "95 % interval": interval_cell(shown, digits, sign=True),
        "right to wrong": number_cell(score.flips[0], "{:.0f}"),
        "wrong to right": number_cell(score.flips[1], "{:.0f}"),
        "interval is": "unknown" if difference.low is None else "paired" if score.paired else "unpaired",
    }


# ---- recovery: models of one layout against the tokens that their adaptation read ----


def recovery_plots(content: ReportContent) -> list[ReportPlot]:
    """Points of one layout with other tokens, and each retraining; nothing where no model was adapted."""
    return [*_points_plot(content), *retraining_plots(content.found.retrainings)]


def _adapted(content: ReportContent) -> Iterator[Subject]:
    """The models of each layout of which one read tokens, the fewest tokens first."""
    known = [subject for subject in content.models if subject.adapted is not None]
    for modes in dict.fromkeys(subject.modes for subject in known):
        same = [subject for subject in known if subject.modes == modes]
        if any(subject.tokens for subject in same):
            yield from sorted(same, key=lambda subject: subject.tokens or 0)


def _points_plot(content: ReportContent) -> list[ReportPlot]:
    adapted = list(_adapted(content))
    measure = BY_ACCURACY if any(subject.difference is not None for subject in adapted) else BY_PERPLEXITY
    found = [(one, value) for one in adapted if (value := measure.value(one, content.reference)) is not None]
    if len(found) < 2:
        return []
    rows = [
        {
            "name": subject.name,
            "layout": subject.layout_words,
            "method": subject.adapted,
            "family": subject.family,
            "tokens": subject.tokens or 0,
            **value.fields("y"),
            "words": f"{subject_text(subject)}; {measure.words(value)}",
        }
        for subject, value in found
    ]
    table = make_table(
        "Recovery: the data",
        (
            {
                "model": subject.name,
                "layout": subject.layout_words,
                "method": str(subject.adapted),
                "tokens": number_cell(subject.tokens or 0, "{:,.0f}"),
                measure.title: TableCell(measure.text(value), value.value),
            }
            for subject, value in found
        ),
    )
    return [
        ReportPlot(
            name="recovery",
            title="Recovery against tokens",
            caption=f"Each line is one layout and way of adapting it: {measure.title} against the tokens that it read;"
            " 0 tokens is the converted model as it is. A line goes through what its stages made: align + full begins"
            " at none, and then at align. Bars are 95 % intervals.",
            summary=f"{measure.title.capitalize()} of {len(rows)} models against the tokens that their adaptation"
            " read.",
            panels=[PlotPanel(_points_spec(rows, measure, content.margin))],
            table=table,
            legend=family_legend(rows),
        )
    ]


def _begins(method: str, other: str) -> bool:
    """Whether the models of one way of adapting become those of the other by further stages, or by none."""
    return method == AS_CONVERTED or f"{other}{THEN}".startswith(f"{method}{THEN}")


def _ends(methods: set[str]) -> list[str]:
    """Those that no other goes on with."""
    return sorted(one for one in methods if not any(_begins(one, other) for other in methods - {one}))


def _points_spec(rows: list[dict[str, Any]], measure: Measure, margin: float) -> Spec:
    on_lines = [
        {**row, "line": f"{row['layout']}, {end}"}
        for row in rows
        for end in _ends({one["method"] for one in rows if one["layout"] == row["layout"]})
        if _begins(row["method"], end)
    ]
    x = quantitative(
        "tokens",
        "tokens read",
        scale={"type": "symlog", "constant": max(1.0, max(row["tokens"] for row in rows) / 100)},
        axis=TOKENS_AXIS,
    )
    y = quantitative("y", measure.title, scale={"zero": False})
    levels = []
    if measure.more:
        y["axis"] = {"labelExpr": SIGNED_LABEL, "tickCount": 6}
        levels = [level("y", 0), level("y", -margin, dashed=True)]
    encoding = {"x": x, "y": y, "color": family_colour(rows)}
    by_line = lines({**encoding, "detail": nominal("line")}, opacity=0.8)
    layers = [*levels, by_line, intervals("y", encoding), marks(encoding, 80)]
    return make_spec(f"{measure.title} against tokens read", 300, on_lines, layers)
