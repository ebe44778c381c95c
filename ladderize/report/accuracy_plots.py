"""Differences to the dense model, task by task."""

from typing import Any

from ladderize.eval.compare import metric_name
from ladderize.eval.comparison import TaskComparison
from ladderize.report.join import ReportContent
from ladderize.report.plot import ReportPlot, dots, family_legend
from ladderize.report.subjects import Subject, WithInterval, number_text, points_text
from ladderize.report.tables import TableCell, interval_cell, make_table, number_cell, percent_cell
from ladderize.report.vega import SIGNED_LABEL, PlotPanel, level, quantitative

MOST_DRAWN = 12  # models in the plot: its table has all


def task_plots(content: ReportContent) -> list[ReportPlot]:
    """Return one plot with a panel for each task; none where nothing was compared."""
    compared = [(one, task) for one in content.models if one.comparison is not None for task in one.comparison.tasks]
    tasks = dict.fromkeys(task.task for _, task in compared if _is_drawn(task))
    if not tasks:
        return []
    best_first = sorted((one for one in content.models if one.comparison), key=lambda one: -(one.accuracy or 0.0))
    names = {one.name for one in best_first[:MOST_DRAWN]}
    rows = [_row(one, task) for one, task in compared if _is_drawn(task) and one.name in names]
    left_out = f" Drawn are the {MOST_DRAWN} most accurate; the table has all." * (len(best_first) > MOST_DRAWN)
    return [
        ReportPlot(
            name="tasks",
            title="Differences task by task",
            caption="Points from dense on the same questions; bars are 95 % intervals of paired differences. Left of 0"
            f" is worse. The dashed line is the margin.{left_out}",
            summary=f"Differences of {len(names)} models to dense in {len(tasks)} tasks, in points, with 95 %"
            " intervals.",
            panels=[_panel(task, [row for row in rows if row["task"] == task], content.margin) for task in tasks],
            table=make_table("Differences task by task: the data", (_cells(*one) for one in compared)),
            legend=family_legend(rows),
        )
    ]


def _is_drawn(task: TaskComparison) -> bool:
    """Return True for the metric that stands for its task, where it has a meaning in points."""
    return task.main and task.verdict is not None


def _row(subject: Subject, task: TaskComparison) -> dict[str, Any]:
    points = WithInterval(task.difference, task.low, task.high).scaled(100)
    return {
        "task": task.task,
        "metric": metric_name(task.metric, task.filter),
        "name": subject.name,
        "family": subject.family,
        **points.fields("x"),
        "words": f"{subject.description}; {task.task}: {points_text(points)} points",
    }


def _panel(task: str, rows: list[dict[str, Any]], margin: float) -> PlotPanel:
    title = f"points of {rows[-1]['metric'] if rows else ''} from dense"
    x = quantitative("x", title, axis={"labelExpr": SIGNED_LABEL, "tickCount": 5})
    levels = [level("x", 0), level("x", -margin, dashed=True)]
    return PlotPanel(dots(f"{task}: points from dense", rows, x, levels), task)


def _cells(subject: Subject, task: TaskComparison) -> dict[str, str | TableCell]:
    in_points = task.verdict is not None
    digits, factor = (1, 100) if in_points else (4, 1)
    difference = WithInterval(task.difference, task.low, task.high).scaled(factor)
    return {
        "model": subject.name,
        "task": task.task,
        "metric": metric_name(task.metric, task.filter),
        "value": percent_cell(task.value) if in_points else number_cell(task.value, "{:.4f}"),
        "difference": number_cell(difference.value, lambda value: number_text(value, digits, sign=True)),
        "95 % interval": interval_cell(difference, digits, sign=True),
        "right to wrong": number_cell(task.right_to_wrong, "{:.0f}"),
        "wrong to right": number_cell(task.wrong_to_right, "{:.0f}"),
    }
