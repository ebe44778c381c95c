"""Differences to the dense model, task by task."""

from typing import Any

from ladderize.figure import SIGNED_LABEL, PlotPanel, intervals, level, make_spec, marks, quantitative
from ladderize.tradeoff.report.join import ReportContent
from ladderize.tradeoff.report.plot import MODEL_ROWS, ReportPlot, family_colour, family_legend, row_height
from ladderize.tradeoff.report.subjects import Subject, TaskScore, WithInterval
from ladderize.tradeoff.report.words import (
    ReportTable,
    TableCell,
    interval_cell,
    number_cell,
    number_text,
    points_text,
    subject_text,
)

MOST_DRAWN = 12  # models in the plot: its table has all


def task_plots(content: ReportContent, commands: list[str]) -> list[ReportPlot]:
    """One plot with a panel for each task; none where nothing was compared."""
    others = [subject for subject in content.models if subject is not content.reference]
    pairs = [(one, score, score.difference) for one in others for score in one.scores if score.difference is not None]
    tasks = list(dict.fromkeys(score.task for _, score, _ in pairs if score.main and score.points))
    if not tasks:
        return []
    drawn = _drawn([subject for subject in others if subject.scores])
    paired = all(score.paired for _, score, _ in pairs)
    left_out = f" Drawn are the {MOST_DRAWN} most accurate; the table has all." if len(others) > MOST_DRAWN else ""
    caption = (
        f"Points from dense on the same questions; bars are 95 % intervals"
        f"{' of paired differences' if paired else ', unpaired where the results hold no samples'}."
        f" Left of 0 is worse. The dashed line is the margin.{left_out}"
    )
    return [
        ReportPlot(
            name="tasks",
            title="Differences task by task",
            caption=caption,
            summary=f"Differences of {len(drawn)} models to dense in {len(tasks)} tasks, in points, with 95 %"
            " intervals.",
            panels=[_panel(content, task, drawn) for task in tasks],
            table=_table(pairs),
            legend=family_legend({subject.family for subject in drawn}),
            commands=commands,
        )
    ]


def _drawn(subjects: list[Subject]) -> list[Subject]:
    """The most accurate ones, in the report's order."""
    best = sorted(subjects, key=lambda s: -(s.accuracy.value if s.accuracy else 0.0))[:MOST_DRAWN]
    return [subject for subject in subjects if subject in best]


def _panel(content: ReportContent, task: str, drawn: list[Subject]) -> PlotPanel:
    rows: list[dict[str, Any]] = []
    metric = ""
    for subject in drawn:
        score = next((score for score in subject.scores if score.task == task and score.main and score.points), None)
        if score is None or score.difference is None:
            continue
        points, metric = score.difference.scaled(100), score.metric
        row = {"name": subject.name, "family": subject.family, "x": points.value, "x1": points.low, "x2": points.high}
        rows.append({**row, "words": f"{subject_text(subject)}; {task}: {points_text(points)} points"})
    x = quantitative("x", f"points of {metric} from dense", axis={"labelExpr": SIGNED_LABEL, "tickCount": 5})
    encoding = {"x": x, "y": MODEL_ROWS, "color": family_colour(rows)}
    layers = [
        level("x", 0),
        level("x", -content.margin, dashed=True),
        intervals("x", encoding, width=3),
        marks(encoding, 90),
    ]
    return PlotPanel(make_spec(f"{task}: points from dense", row_height(rows), rows, layers), task)


def _table(pairs: list[tuple[Subject, TaskScore, WithInterval]]) -> ReportTable:
    columns = ["model", "task", "metric", "value", "difference", "95 % interval", "right to wrong", "wrong to right"]
    table = ReportTable("Differences task by task: the data", [*columns, "interval is"])
    for subject, score, difference in pairs:
        shown = difference.scaled(100) if score.points else difference
        digits = 1 if score.points else 4
        table.add(
            subject.name,
            score.task,
            score.metric,
            TableCell(f"{100 * score.value:.1f} %" if score.points else f"{score.value:.4f}", score.value),
            TableCell(number_text(shown.value, digits, sign=True), shown.value),
            interval_cell(shown, digits, sign=True),
            *(number_cell(count, "{:.0f}") for count in score.flips),
            "unknown" if difference.low is None else "paired" if score.paired else "unpaired",
        )
    return table
