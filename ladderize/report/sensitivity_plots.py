"""The plots of each layer's sensitivity."""

import math
import statistics
from pathlib import Path
from typing import Any

from ladderize.convert.sensitivity_file import LADDER, SPD, SPD_LADDER, SensitivityDocument, dense_line
from ladderize.report.documents import FoundDocuments
from ladderize.report.plot import ReportPlot
from ladderize.report.tables import make_table, number_cell
from ladderize.report.vega import PlotPanel, Spec, intervals, level, looks, make_spec, marks, quantitative

KIND_LOOKS = {LADDER: ("ladder", "circle"), SPD: ("spd", "square"), SPD_LADDER: ("both", "diamond")}
WIDE_RANGE = 20  # times the middle value: where the highest is above, the scale is logarithmic away from 0


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
                "increase of perplexity": number_cell(cost.sensitivity, "{:.5g}"),
                "low": number_cell(cost.low, "{:.5g}"),
                "high": number_cell(cost.high, "{:.5g}"),
                "nats per token": number_cell(cost.nats, "{:+.5f}"),
                "class": cost.sensitivity_class,
            }
            for cost in document.costs
        ),
    )
    return ReportPlot(
        name=name,
        title="Sensitivity of each layer",
        caption=f"{_measured(document)}: {dense_line(document)}. Dashed lines: tau1 {document.tau1:g}, tau2"
        f" {document.tau2:g}, the ends of the classes.",
        summary=f"The cost of {document.num_layers} layers as {', '.join(document.kinds)}, each with its interval.",
        panels=[_panel(document)],
        table=table,
        legend=[(kind, *KIND_LOOKS[kind]) for kind in document.kinds],
    )


def _measured(document: SensitivityDocument) -> str:
    """Return the model, the windows and the intervals, for a title."""
    ranks = f", {document.sync_tp_size} virtual ranks" if document.sync_tp_size else ""
    aligned = ", aligned" if document.aligned is not None else ""
    samples = f"{document.data.samples} x {document.data.seq_len} tokens"
    return f"{Path(document.model).name}{ranks}{aligned}; {samples}, {document.interval:.0%} bootstrap intervals"


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
    values = [cost.sensitivity for cost in document.costs]
    highest = max(cost.high for cost in document.costs)
    y = quantitative("y", "increase of perplexity")
    threshold = max(statistics.median(map(abs, values)), document.tau1, 1e-3)
    if highest > WIDE_RANGE * threshold:
        y |= _symlog(min(cost.low for cost in document.costs), highest, threshold)
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


def _symlog(lowest: float, highest: float, threshold: float) -> Spec:
    """Return a scale that is linear about 0 and logarithmic beyond the threshold, with its axis."""
    axis = {"values": value_ticks(lowest, highest, threshold), "format": "~g"}
    return {"scale": {"type": "symlog", "constant": threshold, "nice": False, "padding": 8}, "axis": axis}


def value_ticks(lowest: float, highest: float, threshold: float) -> list[float]:
    """Return 0, and the powers of ten outside of +-threshold that the values reach, at most about six on a side."""
    first = math.ceil(math.log10(threshold))

    def side(most: float) -> list[float]:
        exponents = range(first, math.floor(math.log10(most)) + 1) if most > threshold else range(0)
        return [10.0**exponent for exponent in exponents[:: max(1, -(-len(exponents) // 6))]]

    return [*(-value for value in reversed(side(-lowest))), 0.0, *side(highest)]
