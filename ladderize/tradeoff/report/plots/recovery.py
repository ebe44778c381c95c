"""How much of the accuracy adaptation wins back, against the tokens that it read; and the curves of training."""

import math
from typing import Any

from ladderize.tradeoff.report.content.documents import FoundCurves
from ladderize.tradeoff.report.content.join import ReportContent
from ladderize.tradeoff.report.content.subjects import Subject, WithInterval
from ladderize.tradeoff.report.content.tables import ReportTable, TableCell, TableColumn
from ladderize.tradeoff.report.content.words import estimate_text, points_text, subject_text
from ladderize.tradeoff.report.plots.base import (
    SIGNED_LABEL,
    PlotPanel,
    ReportPlot,
    Spec,
    family_colour,
    family_legend,
    make_spec,
    rule,
)
from ladderize.workflows.sweep_document import AS_CONVERTED, THEN

LOOK_COLOURS = ("ladder", "spd", "both", "baseline", "dense")
LOOK_SHAPES = ("circle", "square", "diamond", "triangle-up")


def recovery_plots(content: ReportContent, commands: list[str]) -> list[ReportPlot]:
    """Points of one layout with other tokens, and curves; nothing where no model was adapted."""
    curves = [found for found in content.found.curves if _heldout(found)]
    return [*_points_plot(content, commands), *([_curves_plot(curves, commands)] if curves else [])]


def _heldout(found: FoundCurves) -> list[tuple[int, float]]:
    """A training that broke down has values that are no numbers."""
    return [(step, value) for step, value in found.curves.heldout if math.isfinite(value)]


def _series(content: ReportContent) -> list[list[Subject]]:
    """Of each layout that was adapted: its models, the fewest tokens first."""
    by_layout: dict[tuple[object, ...], list[Subject]] = {}
    for subject in content.models:
        if subject.adapted is not None:
            key = (tuple(subject.attention_sync), tuple(subject.mlp_sync), subject.sync_tp_size)
            by_layout.setdefault(key, []).append(subject)
    adapted = [group for group in by_layout.values() if any(subject.tokens for subject in group)]
    return [sorted(group, key=lambda subject: subject.tokens or 0) for group in adapted]


def _points_plot(content: ReportContent, commands: list[str]) -> list[ReportPlot]:
    series = _series(content)
    by_accuracy = any(s.accuracy is not None and s.accuracy.difference is not None for group in series for s in group)
    rows = [row for group in series for subject in group for row in _row(subject, by_accuracy, content.reference)]
    if len(rows) < 2:
        return []
    what = "points from dense" if by_accuracy else "perplexity"
    columns = [TableColumn("model"), TableColumn("layout"), TableColumn("method"), TableColumn("tokens", True)]
    table = ReportTable("Recovery: the data", [*columns, TableColumn(what, True)])
    for row in rows:
        value = WithInterval(row["y"], row["y1"], row["y2"])
        text = points_text(value) if by_accuracy else estimate_text(value, 3)
        table.add(
            row["name"],
            row["layout"],
            row["method"],
            TableCell(f"{row['tokens']:,}", float(row["tokens"])),
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
    value = (subject.accuracy.difference if subject.accuracy else None) if by_accuracy else subject.perplexity
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
    lines = [
        {**row, "line": f"{row['layout']}, {end}"}
        for row in rows
        for end in _ends({one["method"] for one in rows if one["layout"] == row["layout"]})
        if _begins(row["method"], end)
    ]
    highest = max(row["tokens"] for row in rows)
    x: Spec = {
        "field": "tokens",
        "type": "quantitative",
        "title": "tokens read",
        "scale": {"type": "symlog", "constant": max(1.0, highest / 100)},
        "axis": {"format": "~s", "labelExpr": "datum.value === 0 ? '0' : datum.label", "tickCount": 5},
    }
    title = "points from dense" if by_accuracy else "perplexity"
    y: Spec = {"field": "y", "type": "quantitative", "title": title, "scale": {"zero": False}}
    if by_accuracy:
        y["axis"] = {"labelExpr": SIGNED_LABEL, "tickCount": 6}
    colour = family_colour(rows)
    ends = {"x": x, "y": {**y, "field": "y1"}, "y2": {"field": "y2"}, "color": colour}
    layers: list[Spec] = [
        {
            "mark": {"type": "line", "aria": False, "strokeWidth": 1.5, "opacity": 0.8},
            "encoding": {"x": x, "y": y, "color": colour, "detail": {"field": "line", "type": "nominal"}},
        },
        {
            **rule(ends, strokeWidth=1.5, opacity=0.8),
            "transform": [{"filter": "isValid(datum.y1) && isValid(datum.y2)"}],
        },
        {
            "mark": {"type": "point", "filled": True, "size": 80, "opacity": 1},
            "encoding": {"x": x, "y": y, "color": colour, "description": {"field": "words"}},
        },
    ]
    if by_accuracy:
        layers.insert(0, rule({"y": {"datum": 0}}, color="var(--muted)"))
        layers.insert(1, rule({"y": {"datum": -margin}}, color="var(--muted)", strokeDash=[6, 4]))
    return make_spec(f"{title} against tokens read", 300, layers, data={"values": lines})


def _curves_plot(found: list[FoundCurves], commands: list[str]) -> ReportPlot:
    names = _names(found)
    columns = [TableColumn("training"), TableColumn("step", True), TableColumn("held-out perplexity", True)]
    table = ReportTable("Held-out perplexity: the data", columns)
    rows: list[dict[str, Any]] = []
    for name, one in zip(names, found, strict=True):
        for step, value in _heldout(one):
            rows.append(
                {"name": name, "step": step, "y": value, "words": f"{name}: step {step}, perplexity {value:.4g}"}
            )
            table.add(name, TableCell(str(step), float(step)), TableCell(f"{value:.4f}", value))
    dense = sorted(
        {
            round(one.curves.dense, 6)
            for one in found
            if one.curves.dense is not None and math.isfinite(one.curves.dense)
        }
    )
    spec = _curves_spec(rows, dense)
    at = f" The dashed line is the dense model, {', '.join(f'{value:.4g}' for value in dense)}." if dense else ""
    return ReportPlot(
        name="heldout",
        title="Held-out perplexity while retraining",
        caption=f"Of text that was held out, by step.{at}",
        summary=f"Held-out perplexity of {len(found)} trainings, by step.",
        panels=[PlotPanel(spec)],
        table=table,
        legend=[(name, *_look(number)) for number, name in enumerate(dict.fromkeys(names))],
        commands=commands,
    )


def _names(found: list[FoundCurves]) -> list[str]:
    names = [one.name or one.curves.name for one in found]
    if len(set(names)) == len(names):
        return names
    return [f"{one.folder.parent.name}/{one.curves.name}" for one in found]


def _look(number: int) -> tuple[str, str]:
    """Colour and shape of a training: different for the first twenty."""
    return LOOK_COLOURS[number % len(LOOK_COLOURS)], LOOK_SHAPES[number % len(LOOK_SHAPES)]


def _curves_spec(rows: list[dict[str, Any]], dense: list[float]) -> Spec:
    lowest, highest = min(row["y"] for row in rows), max(row["y"] for row in rows)
    # a log scale has no zero to leave out
    scale: Spec = {"type": "log", "nice": False} if lowest > 0 and highest > 4 * lowest else {"zero": False}
    y: Spec = {"field": "y", "type": "quantitative", "title": "held-out perplexity", "scale": scale}
    y["axis"] = {"format": "~g", "tickCount": 6}
    x: Spec = {"field": "step", "type": "quantitative", "title": "step", "axis": {"tickCount": 6, "tickMinStep": 1}}
    names = list(dict.fromkeys(row["name"] for row in rows))
    looks = [_look(number) for number in range(len(names))]
    colours = {"domain": names, "range": [f"var(--{colour})" for colour, _ in looks]}
    shapes = {"domain": names, "range": [shape for _, shape in looks]}
    colour = {"field": "name", "type": "nominal", "scale": colours}
    shape = {"field": "name", "type": "nominal", "scale": shapes}
    layers: list[Spec] = [
        *(rule({"y": {"datum": value}}, color="var(--muted)", strokeDash=[6, 4]) for value in dense),
        {
            "mark": {"type": "line", "aria": False, "strokeWidth": 1.5},
            "encoding": {"x": x, "y": y, "color": colour},
        },
        {
            "mark": {"type": "point", "filled": True, "size": 55, "opacity": 1},
            "encoding": {"x": x, "y": y, "color": colour, "shape": shape, "description": {"field": "words"}},
        },
    ]
    return make_spec("Held-out perplexity by step", 280, layers, data={"values": rows})
