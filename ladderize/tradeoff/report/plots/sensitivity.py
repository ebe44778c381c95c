"""How much each block minds being changed: from sensitivity.json."""

from pathlib import Path
from typing import Any

from ladderize.convert.sensitivity_file import CLASSES, SensitivityDocument
from ladderize.eval.sensitivity_plot import value_ticks
from ladderize.tradeoff.report.content.documents import FoundSensitivity
from ladderize.tradeoff.report.content.tables import ReportTable, TableCell, TableColumn
from ladderize.tradeoff.report.plots.base import PlotPanel, ReportPlot, Spec, make_spec, rule

CLASS_COLOURS = dict(zip(CLASSES, ("good", "spd", "bad"), strict=True))
CLASS_SHAPES = dict(zip(CLASSES, ("circle", "square", "triangle-up"), strict=True))
WIDE_RANGE = 20  # times tau1: beyond, the scale is logarithmic away from 0
MEANINGS = {
    "spd": "when it joins the dropped blocks after it",
    "ladder": "when it joins the ladder blocks after it",
    "each": "when it alone is dropped",
    "each-ladder": "when it alone is a ladder block",
}


def sensitivity_plots(found: list[FoundSensitivity], commands: list[str]) -> list[ReportPlot]:
    """One plot for each file."""
    return [
        _plot(one.document, "sensitivity" if number == 1 else f"sensitivity-{number}", commands)
        for number, one in enumerate(found, 1)
    ]


def _plot(document: SensitivityDocument, name: str, commands: list[str]) -> ReportPlot:
    meaning = MEANINGS.get(document.mode, "when it is changed")
    ranks = f", {document.sync_tp_size} virtual ranks" if document.sync_tp_size else ""
    aligned = ", after alignment" if document.aligned is not None else ""
    classes = [kind for kind in CLASSES if any(block.sensitivity_class == kind for block in document.blocks)]
    return ReportPlot(
        name=name,
        title=f"Sensitivity of each block to {document.kind}{ranks}{aligned}",
        caption=f"How far the perplexity of {Path(document.model).name} rises for each block {meaning}, on"
        f" {document.data.samples} x {document.data.seq_len} tokens. Bars are {document.interval:.0%} bootstrap"
        f" intervals. Dashed lines: tau1 {document.tau1:g}, tau2 {document.tau2:g}, the ends of the classes.",
        summary=f"Sensitivity of {len(document.blocks)} blocks to {document.kind}, each with its interval and class.",
        panels=[PlotPanel(_spec(document))],
        table=_table(document),
        legend=[(kind, CLASS_COLOURS[kind], CLASS_SHAPES[kind]) for kind in classes],
        commands=commands,
    )


def _spec(document: SensitivityDocument) -> Spec:
    rows: list[dict[str, Any]] = [
        {
            "block": block.block,
            "s": block.sensitivity,
            "low": block.low,
            "high": block.high,
            "kind": block.sensitivity_class,
            "words": f"block {block.block}: {block.sensitivity:.4g} ({block.low:.4g} to {block.high:.4g}),"
            f" {block.sensitivity_class}",
        }
        for block in document.blocks
    ]
    highest = max((block.high for block in document.blocks), default=0.0)
    threshold = max(document.tau1, 1e-3)
    wide = highest > WIDE_RANGE * threshold
    y: Spec = {"field": "s", "type": "quantitative", "title": "increase of perplexity"}
    if wide:
        y["scale"] = {"type": "symlog", "constant": threshold}
        lowest = min(block.low for block in document.blocks)
        y["axis"] = {"values": value_ticks(lowest, highest, threshold), "format": "~g"}
    x: Spec = {"field": "block", "type": "ordinal", "title": "block", "axis": {"labelAngle": 0, "labelOverlap": True}}
    colours = {"domain": list(CLASSES), "range": [f"var(--{CLASS_COLOURS[kind]})" for kind in CLASSES]}
    shapes = {"domain": list(CLASSES), "range": [CLASS_SHAPES[kind] for kind in CLASSES]}
    colour = {"field": "kind", "type": "nominal", "scale": colours}
    lines = [
        rule({"y": {"datum": tau}}, color="var(--muted)", strokeDash=[6, 4])
        for tau in (document.tau1, document.tau2)
        if tau <= 2 * highest
    ]
    layers = [
        rule({"y": {"datum": 0}}, color="var(--muted)"),
        *lines,
        rule(
            {"x": x, "y": {**y, "field": "low"}, "y2": {"field": "high"}, "color": colour}, strokeWidth=2, opacity=0.8
        ),
        {
            "mark": {"type": "point", "filled": True, "size": 80, "opacity": 1},
            "encoding": {
                "x": x,
                "y": y,
                "color": colour,
                "shape": {"field": "kind", "type": "nominal", "scale": shapes},
                "description": {"field": "words"},
            },
        },
    ]
    return make_spec("Sensitivity of each block", 280, layers, data={"values": rows})


def _table(document: SensitivityDocument) -> ReportTable:
    columns = [TableColumn("block", True), TableColumn("increase of perplexity", True), TableColumn("low", True)]
    columns += [TableColumn("high", True), TableColumn("class")]
    table = ReportTable(f"Sensitivity to {document.kind}: the data", columns)
    for block in document.blocks:
        table.add(
            TableCell(str(block.block), float(block.block)),
            TableCell(f"{block.sensitivity:.5g}", block.sensitivity),
            TableCell(f"{block.low:.5g}", block.low),
            TableCell(f"{block.high:.5g}", block.high),
            block.sensitivity_class,
        )
    return table
