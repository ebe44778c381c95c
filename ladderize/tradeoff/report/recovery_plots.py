"""How much of the accuracy adaptation wins back, against the tokens that it read; and the curves of training."""

from dataclasses import replace
from typing import Any

from ladderize.adapt.retrain.curves import dense_perplexities, finite_heldout, heldout_panel
from ladderize.figure import (
    SIGNED_LABEL,
    PlotPanel,
    Spec,
    intervals,
    level,
    line_look,
    lines,
    make_spec,
    marks,
    nominal,
    quantitative,
)
from ladderize.tradeoff.report.documents import FoundCurves
from ladderize.tradeoff.report.join import ReportContent
from ladderize.tradeoff.report.plot import ReportPlot, family_colour, family_legend
from ladderize.tradeoff.report.subjects import Subject, WithInterval
from ladderize.tradeoff.report.words import (
    ReportTable,
    TableCell,
    estimate_text,
    number_cell,
    points_text,
    subject_text,
)
from ladderize.workflows.sweep_document import AS_CONVERTED, THEN


def recovery_plots(content: ReportContent, commands: list[str]) -> list[ReportPlot]:
    """Points of one layout with other tokens, and curves; nothing where no model was adapted."""
    curves = [found for found in content.found.curves if finite_heldout(found.curves)]
    return [*_points_plot(content, commands), *([_curves_plot(curves, commands)] if curves else [])]


def _series(content: ReportContent) -> list[list[Subject]]:
    """Of each layout that was adapted: its models, the fewest tokens first."""
    by_layout: dict[object, list[Subject]] = {}
    for subject in content.models:
        if subject.adapted is not None:
            by_layout.setdefault(subject.modes, []).append(subject)
    adapted = [group for group in by_layout.values() if any(subject.tokens for subject in group)]
    return [sorted(group, key=lambda subject: subject.tokens or 0) for group in adapted]


def _points_plot(content: ReportContent, commands: list[str]) -> list[ReportPlot]:
    series = _series(content)
    by_accuracy = any(subject.difference is not None for group in series for subject in group)
    rows = [row for group in series for subject in group for row in _row(subject, by_accuracy, content.reference)]
    if len(rows) < 2:
        return []
    what = "points from dense" if by_accuracy else "perplexity"
    table = ReportTable("Recovery: the data", ["model", "layout", "method", "tokens", what])
    for row in rows:
        value = WithInterval(row["y"], row["y1"], row["y2"])
        text = points_text(value) if by_accuracy else estimate_text(value, 3)
        table.add(
            row["name"],
            row["layout"],
            row["method"],
            number_cell(row["tokens"], "{:,.0f}"),
            TableCell(text, row["y"]),
        )
    return [
        ReportPlot(
            name="recovery",
            title="Recovery against tokens",
            caption=f"Each line is one layout and way of adapting it: {what} against the tokens that it read; 0 tokens"
            " is the converted model as it is. A line goes through what its stages made: align + full begins at none,"
            " and then at align. Bars are 95 % intervals.",
            summary=f"{what.capitalize()} of {len(rows)} models against the tokens that their adaptation read.",
            panels=[PlotPanel(_points_spec(rows, by_accuracy, content.margin))],
            table=table,
            legend=family_legend({row["family"] for row in rows}),
            commands=commands,
        )
    ]


def _row(subject: Subject, by_accuracy: bool, reference: Subject | None) -> list[dict[str, Any]]:
    value = subject.difference if by_accuracy else subject.perplexity
    if by_accuracy and subject is reference:
        value = WithInterval(0.0)
    if value is None:
        return []
    shown = f"{points_text(value)} points from dense" if by_accuracy else f"perplexity {estimate_text(value, 3)}"
    return [
        {
            "name": subject.name,
            "layout": subject.layout_words,
            "method": subject.adapted or AS_CONVERTED,
            "family": subject.family,
            "tokens": subject.tokens or 0,
            "y": value.value,
            "y1": value.low,
            "y2": value.high,
            "words": f"{subject_text(subject)}; {shown}",
        }
    ]


def _begins(method: str, other: str) -> bool:
    """Whether the models of one way of adapting become those of the other by further stages, or by none."""
    return method == AS_CONVERTED or f"{other}{THEN}".startswith(f"{method}{THEN}")


def _ends(methods: set[str]) -> list[str]:
    """Those that no other goes on with."""
    return sorted(one for one in methods if not any(_begins(one, other) for other in methods - {one}))


def _points_spec(rows: list[dict[str, Any]], by_accuracy: bool, margin: float) -> Spec:
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
        axis={"format": "~s", "labelExpr": "datum.value === 0 ? '0' : datum.label", "tickCount": 5},
    )
    title = "points from dense" if by_accuracy else "perplexity"
    y = quantitative("y", title, scale={"zero": False})
    if by_accuracy:
        y["axis"] = {"labelExpr": SIGNED_LABEL, "tickCount": 6}
    encoding = {"x": x, "y": y, "color": family_colour(rows)}
    layers = [
        *([level("y", 0), level("y", -margin, dashed=True)] if by_accuracy else []),
        lines({**encoding, "detail": nominal("line")}, opacity=0.8),
        intervals("y", encoding),
        marks(encoding, 80),
    ]
    return make_spec(f"{title} against tokens read", 300, on_lines, layers)


def _curves_plot(found: list[FoundCurves], commands: list[str]) -> ReportPlot:
    names = [one.name or one.curves.name for one in found]
    if len(set(names)) < len(names):
        names = [f"{one.folder.parent.name}/{one.curves.name}" for one in found]
    runs = [replace(one.curves, name=name) for name, one in zip(names, found, strict=True)]
    table = ReportTable("Held-out perplexity: the data", ["training", "step", "held-out perplexity"])
    for run in runs:
        for step, value in finite_heldout(run):
            table.add(run.name, number_cell(step, "{:.0f}"), number_cell(value, "{:.4f}"))
    dense = dense_perplexities(runs)
    at = f" The dashed line is the dense model, {', '.join(f'{value:.4g}' for value in dense)}." if dense else ""
    return ReportPlot(
        name="heldout",
        title="Held-out perplexity while retraining",
        caption=f"Of text that was held out, by step.{at}",
        summary=f"Held-out perplexity of {len(found)} trainings, by step.",
        panels=[heldout_panel(runs)],
        table=table,
        legend=[(name, *line_look(number)) for number, name in enumerate(dict.fromkeys(names))],
        commands=commands,
    )
