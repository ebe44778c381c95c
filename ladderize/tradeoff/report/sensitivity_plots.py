"""How much each block minds being changed: from sensitivity.json."""

from pathlib import Path

from ladderize.convert.sensitivity_file import CLASSES, SensitivityDocument
from ladderize.eval.sensitivity_plot import CLASS_LOOKS, sensitivity_panel
from ladderize.tradeoff.report.documents import FoundDocument
from ladderize.tradeoff.report.plot import ReportPlot
from ladderize.tradeoff.report.words import ReportTable, number_cell

MEANINGS = {
    "spd": "when it joins the dropped blocks after it",
    "ladder": "when it joins the ladder blocks after it",
    "each": "when it alone is dropped",
    "each-ladder": "when it alone is a ladder block",
}


def sensitivity_plots(found: list[FoundDocument[SensitivityDocument]], commands: list[str]) -> list[ReportPlot]:
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
        panels=[sensitivity_panel(document)],
        table=_table(document),
        legend=[(kind, *CLASS_LOOKS[kind]) for kind in classes],
        commands=commands,
    )


def _table(document: SensitivityDocument) -> ReportTable:
    columns = ["block", "increase of perplexity", "low", "high", "class"]
    table = ReportTable(f"Sensitivity to {document.kind}: the data", columns)
    for block in document.blocks:
        values = (number_cell(value, "{:.5g}") for value in (block.sensitivity, block.low, block.high))
        table.add(number_cell(block.block, "{:.0f}"), *values, block.sensitivity_class)
    return table
