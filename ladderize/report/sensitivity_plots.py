"""How much each block, or each sync point, minds a change."""

from collections.abc import Iterator
from functools import partial
from pathlib import Path

from ladderize.convert.point_sensitivity import PointSensitivity
from ladderize.convert.sensitivity_file import CLASSES, SensitivityDocument
from ladderize.eval.sensitivity_plot import (
    CLASS_LOOKS,
    KIND_LOOKS,
    beyond_sum,
    costs_by_kind,
    dense_line,
    measured_text,
    point_panels,
    sensitivity_panel,
)
from ladderize.layout import format_ranges
from ladderize.report.documents import FoundDocuments
from ladderize.report.plot import ReportPlot
from ladderize.report.tables import TableCell, make_table, number_cell

MEANINGS = {
    "spd": "when it joins the dropped blocks after it",
    "ladder": "when it joins the ladder blocks after it",
    "each": "when it alone is dropped",
    "each-ladder": "when it alone is a ladder block",
}


def sensitivity_plots(found: FoundDocuments) -> list[ReportPlot]:
    """One plot for each file."""
    of_blocks = [partial(_block_plot, one.document) for one in found.sensitivities]
    of_points = [partial(_point_plot, one.document) for one in found.points]
    return [
        plot("sensitivity" if number == 1 else f"sensitivity-{number}")
        for number, plot in enumerate((*of_blocks, *of_points), 1)
    ]


def _block_plot(document: SensitivityDocument, name: str) -> ReportPlot:
    meaning = MEANINGS.get(document.mode, "when it is changed")
    ranks = f", {document.sync_tp_size} virtual ranks" if document.sync_tp_size else ""
    aligned = ", after alignment" if document.aligned is not None else ""
    table = make_table(
        f"Sensitivity to {document.kind}: the data",
        (
            {
                "block": number_cell(block.block, "{:.0f}"),
                "increase of perplexity": number_cell(block.sensitivity, "{:.5g}"),
                "low": number_cell(block.low, "{:.5g}"),
                "high": number_cell(block.high, "{:.5g}"),
                "class": block.sensitivity_class,
            }
            for block in document.blocks
        ),
    )
    classes = {block.sensitivity_class for block in document.blocks}
    return ReportPlot(
        name=name,
        title=f"Sensitivity of each block to {document.kind}{ranks}{aligned}",
        caption=f"How far the perplexity of {Path(document.model).name} rises for each block {meaning}, on"
        f" {document.data.samples} x {document.data.seq_len} tokens. Bars are {document.interval:.0%} bootstrap"
        f" intervals. Dashed lines: tau1 {document.tau1:g}, tau2 {document.tau2:g}, the ends of the classes.",
        summary=f"Sensitivity of {len(document.blocks)} blocks to {document.kind}, each with its interval and class.",
        panels=[sensitivity_panel(document)],
        table=table,
        legend=[(kind, *CLASS_LOOKS[kind]) for kind in CLASSES if kind in classes],
    )


def _point_plot(document: PointSensitivity, name: str) -> ReportPlot:
    kinds = costs_by_kind(document)
    rows: Iterator[dict[str, str | TableCell]] = (
        {
            "layers": format_ranges(cost.layers),
            "change": kind,
            "nats per token": number_cell(cost.nats, "{:+.5f}"),
            "low": number_cell(cost.low, "{:+.5f}"),
            "high": number_cell(cost.high, "{:+.5f}"),
            **({"beyond the sum": number_cell(extra, "{:+.5f}")} if document.pairs else {}),
        }
        for kind, costs in kinds.items()
        for cost in costs.values()
        for extra in [beyond_sum(document, cost) if len(cost.layers) > 1 else None]
    )
    return ReportPlot(
        name=name,
        title="What changes of single sync points cost",
        caption=f"Increase of the mean negative log-likelihood of {measured_text(document)}; {dense_line(document)}.",
        summary=f"The cost of {len(kinds)} changes of each of {document.num_layers} layers, with its interval.",
        panels=point_panels(document),
        table=make_table("Changes of single sync points: the data", rows),
        legend=[(kind, *KIND_LOOKS[kind]) for kind in kinds],
    )
