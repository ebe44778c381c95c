"""Differences to the dense model, task by task."""

from typing import Any

from ladderize.tradeoff.report.content.join import ReportContent
from ladderize.tradeoff.report.content.subjects import Subject, TaskScore, WithInterval
from ladderize.tradeoff.report.content.tables import ReportTable, TableCell, TableColumn
from ladderize.tradeoff.report.content.words import interval_text, number_text, points_text, subject_text
from ladderize.tradeoff.report.plots.base import (
    SIGNED_LABEL,
    PlotPanel,
    ReportPlot,
    Spec,
    family_colour,
    family_legend,
    make_spec,
    row_height,
    rule,
)

MOST_DRAWN = 12  # models in the plot: its table has all


def task_plots(content: ReportContent, commands: list[str]) -> list[ReportPlot]:
    """One plot with a panel for each task; none where nothing was compared."""
    others = [subject for subject in content.models if subject is not content.reference]
    pairs = [(subject, score) for subject in others for score in subject.scores if score.difference is not None]
    tasks = list(dict.fromkeys(score.task for _, score in pairs if score.main and score.points))
    if not tasks:
        return []
    drawn = _drawn([subject for subject in others if subject.scores])
    paired = all(score.paired for _, score in pairs)
    summary = f"Differences of {len(drawn)} models to dense in {len(tasks)} tasks, in points, with 95 % intervals."
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
            summary=summary,
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
        rows.append(
            {
                "name": subject.name,
                "family": subject.family,
                "x": points.value,
                "x1": points.low,
                "x2": points.high,
                "words": f"{subject_text(subject)}; {task}: {points_text(points)} points",
            }
        )
    x = {
        "field": "x",
        "type": "quantitative",
        "title": f"points of {metric} from dense",
        "axis": {"labelExpr": SIGNED_LABEL, "tickCount": 5},
    }
    y: Spec = {"field": "name", "type": "nominal", "title": None, "sort": None, "axis": {"labelLimit": 170}}
    colour = family_colour(rows)
    layers = [
        rule({"x": {"datum": 0}}, color="var(--muted)"),
        rule({"x": {"datum": -content.margin}}, color="var(--muted)", strokeDash=[6, 4]),
        {
            **rule(
                {"x": {**x, "field": "x1"}, "x2": {"field": "x2"}, "y": y, "color": colour}, strokeWidth=3, opacity=0.8
            ),
            "transform": [{"filter": "isValid(datum.x1) && isValid(datum.x2)"}],
        },
        {
            "mark": {"type": "point", "filled": True, "size": 90, "opacity": 1},
            "encoding": {"x": x, "y": y, "color": colour, "description": {"field": "words"}},
        },
    ]
    spec = make_spec(f"{task}: points from dense", row_height(len(rows)), layers, data={"values": rows})
    return PlotPanel(spec, task)


def _table(pairs: list[tuple[Subject, TaskScore]]) -> ReportTable:
    columns = [TableColumn(label) for label in ("model", "task", "metric")]
    columns += [
        TableColumn(label, True)
        for label in ("value", "difference", "95 % interval", "right to wrong", "wrong to right")
    ]
    table = ReportTable("Differences task by task: the data", [*columns, TableColumn("interval is")])
    for subject, score in pairs:
        assert score.difference is not None
        shown = score.difference.scaled(100) if score.points else score.difference
        digits = 1 if score.points else 4
        flips = score.flips
        table.add(
            subject.name,
            score.task,
            score.metric,
            TableCell(f"{100 * score.value:.1f} %" if score.points else f"{score.value:.4f}", score.value),
            TableCell(number_text(shown.value, digits, sign=True), shown.value),
            TableCell(interval_text(shown, digits, sign=True), shown.low),
            TableCell("" if flips is None else str(flips[0]), None if flips is None else float(flips[0])),
            TableCell("" if flips is None else str(flips[1]), None if flips is None else float(flips[1])),
            _interval_kind(score.difference, score.paired),
        )
    return table


def _interval_kind(difference: WithInterval, paired: bool) -> str:
    if difference.low is None:
        return "unknown"
    return "paired" if paired else "unpaired"
