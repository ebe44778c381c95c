"""Sensitivities for people: the table and the picture of what each layer costs. Reports show the picture too."""

import math
import statistics
from pathlib import Path
from typing import Any

from ladderize.convert.sensitivity_file import LADDER, SPD, SPD_LADDER, SensitivityDocument
from ladderize.figure import (
    PlotPanel,
    Spec,
    intervals,
    level,
    looks,
    make_spec,
    marks,
    picture_spec,
    quantitative,
    save_pictures,
)

KIND_LOOKS = {LADDER: ("ladder", "circle"), SPD: ("spd", "square"), SPD_LADDER: ("both", "diamond")}
WIDE_RANGE = 20  # times the middle value: where the highest is above, the scale is logarithmic away from 0


def cost_rows(document: SensitivityDocument) -> list[dict[str, str]]:
    """Return a row for each layer: S of each kind and half of its interval, and the class of a dropped one."""
    classes = document.of_kind(SPD) or document.costs
    return [
        {
            "layer": str(layer),
            **{
                cost.kind: f"{cost.sensitivity:+.4f} ±{(cost.high - cost.low) / 2:.4f}"
                for cost in document.costs
                if cost.layer == layer
            },
            "class": classes[layer].sensitivity_class,
        }
        for layer in range(document.num_layers)
    ]


def dense_line(document: SensitivityDocument) -> str:
    """Return what the costs are added to, and what they are."""
    meaning = "each layer alone is changed" if document.mode == "layers" else "a layer joins the dropped ones after it"
    return (
        f"increase of the perplexity where {meaning}; the dense model's is {document.dense_perplexity:.4f}"
        f" ({document.dense_nll:.4f} nats per token)"
    )


def measured_text(document: SensitivityDocument) -> str:
    """Return the model, the windows and the intervals, for a title."""
    ranks = f", {document.sync_tp_size} virtual ranks" if document.sync_tp_size else ""
    aligned = ", aligned" if document.aligned is not None else ""
    samples = f"{document.data.samples} x {document.data.seq_len} tokens"
    return f"{Path(document.model).name}{ranks}{aligned}; {samples}, {document.interval:.0%} bootstrap intervals"


def draw_sensitivity(document: SensitivityDocument, stem: Path) -> list[Path]:
    """Write ``stem``.png and ``stem``.svg; returns their paths."""
    title = f"{measured_text(document)}; dashed: tau1 {document.tau1:g}, tau2 {document.tau2:g}"
    width = max(480, 12 * len(document.costs))
    return save_pictures(picture_spec([sensitivity_panel(document)], title=title, width=width), stem)


def sensitivity_panel(document: SensitivityDocument) -> PlotPanel:
    """Return S of each layer by kind with its interval; logarithmic where a few dwarf the others."""
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
        y |= symlog(min(cost.low for cost in document.costs), highest, threshold)
    x: Spec = {"field": "layer", "type": "ordinal", "title": "layer", "axis": {"labelAngle": 0, "labelOverlap": True}}
    look = looks("kind", {kind: KIND_LOOKS[kind] for kind in document.kinds})
    encoding = {"x": x, "y": y, "xOffset": {"field": "kind", "type": "nominal", "sort": document.kinds}}
    layers = [
        level("y", 0),
        *(level("y", tau, dashed=True) for tau in (document.tau1, document.tau2) if tau <= 2 * highest),
        intervals("y", {**encoding, "color": look["color"]}, width=2),
        marks({**encoding, **look}, 50),
    ]
    title = "Sensitivity of each layer"
    return PlotPanel(make_spec(title, 280, rows, layers), picture_title=f"{title}: {dense_line(document)}")


def symlog(lowest: float, highest: float, threshold: float) -> Spec:
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
