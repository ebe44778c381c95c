"""The plots of each layer's sensitivity."""

import statistics
from pathlib import Path
from typing import Any

from ladderize.convert.sensitivity_file import LADDER, SPD, SPD_LADDER, SensitivityDocument, dense_line
from ladderize.report.documents import FoundDocuments
from ladderize.report.models import WithInterval
from ladderize.report.plot import ReportPlot, estimate_cell, make_table, number_cell
from ladderize.report.vega import PlotPanel, Spec, intervals, level, looks, make_spec, marks, quantitative

KIND_LOOKS = {LADDER: ("ladder", "circle"), SPD: ("spd", "square"), SPD_LADDER: ("both", "diamond")}
WIDE_RANGE = 20  # times the middle value: where the highest is above, the scale is logarithmic away from 0
POWERS = [10.0**exponent for exponent in range(-3, 7)]


def sensitivity_plots(found: FoundDocuments) -> list[ReportPlot]:
    """Return one plot for each file."""
    return [
        _plot(one.document, "sensitivity" if number == 1 else f"sensitivity-{number}")
        for number, one in enumerate(found.sensitivities, 1)
    ]


def _plot(document: SensitivityDocument, name: str) -> ReportPlot:
    table = make_table(
        "Sensitivity: the data",
        (
            {
                "layer": number_cell(cost.layer, "{:.0f}"),
                "becomes": cost.kind,
                "increase of perplexity (95 %)": estimate_cell(
                    WithInterval(cost.sensitivity, cost.low, cost.high), lambda value: value.text(4)
                ),
                "nats per token": number_cell(cost.nats, "{:+.5f}"),
                "class": cost.sensitivity_class,
            }
            for cost in document.costs
        ),
    )
    ranks = f", {document.sync_tp_size} virtual ranks" if document.sync_tp_size else ""
    aligned = ", aligned" if document.aligned is not None else ""
    windows = f"{document.data.samples} x {document.data.seq_len} tokens"
    return ReportPlot(
        name=name,
        title="Sensitivity of each layer",
        caption=f"{Path(document.model).name}{ranks}{aligned}; {windows}, {document.interval:.0%} bootstrap intervals:"
        f" {dense_line(document)}. Dashed lines: tau1 {document.tau1:g}, tau2 {document.tau2:g}, the ends of the"
        " classes.",
        summary=f"The cost of {document.num_layers} layers as {', '.join(document.kinds)}, each with its interval.",
        panels=[_panel(document)],
        table=table,
        legend=[(kind, *KIND_LOOKS[kind]) for kind in document.kinds],
    )


def _panel(document: SensitivityDocument) -> PlotPanel:
    """Return a panel of each layer's sensitivity by kind, with its interval. Its scale is logarithmic where a few
    layers dwarf the others."""
    rows: list[dict[str, Any]] = [
        {
            "layer": cost.layer,
            "kind": cost.kind,
            "y": cost.sensitivity,
            "y1": cost.low,
            "y2": cost.high,
            "words": f"layer {cost.layer} as {cost.kind}: {cost.sensitivity:.4g} ({cost.low:.4g} to {cost.high:.4g}),"
            f" {cost.sensitivity_class}",
        }
        for cost in document.costs
    ]
    lowest, highest = min(cost.low for cost in document.costs), max(cost.high for cost in document.costs)
    y = quantitative("y", "increase of perplexity")
    threshold = max(statistics.median(abs(cost.sensitivity) for cost in document.costs), document.tau1, 1e-3)
    if highest > WIDE_RANGE * threshold:
        powers = [power for power in POWERS if power >= threshold]
        ticks = [*(-power for power in reversed(powers) if -power >= lowest), 0, *(p for p in powers if p <= highest)]
        y["scale"] = {"type": "symlog", "constant": threshold, "nice": False, "padding": 8}
        y["axis"] = {"values": ticks, "format": "~g", "labelOverlap": True}
    x: Spec = {"field": "layer", "type": "ordinal", "title": "layer", "axis": {"labelAngle": 0, "labelOverlap": True}}
    look = looks("kind", {kind: KIND_LOOKS[kind] for kind in document.kinds})
    encoding = {"x": x, "y": y, "xOffset": {"field": "kind", "type": "nominal", "sort": document.kinds}}
    layers = [
        level("y", 0),
        *(level("y", tau, dashed=True) for tau in (document.tau1, document.tau2) if tau <= 2 * highest),
        intervals("y", {**encoding, "color": look["color"]}, width=2),
        marks({**encoding, **look}, 50),
    ]
    spec = make_spec("Sensitivity of each layer", 280, rows, layers)
    return PlotPanel(spec, picture_title="Increase of the perplexity by each layer")
