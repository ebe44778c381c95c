"""The picture of a sensitivity: S of each block with its interval, coloured by class. Reports show the same panel."""

import math
from pathlib import Path
from typing import Any

from ladderize.convert.point_sensitivity import PointSensitivity
from ladderize.convert.sensitivity_file import CLASSES, SensitivityDocument
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

CLASS_LOOKS = dict(zip(CLASSES, (("good", "circle"), ("spd", "square"), ("bad", "triangle-up")), strict=True))
TITLES = {
    "spd": "S: increase of perplexity when block i joins the dropped blocks i+1..L-1",
    "ladder": "S: increase of perplexity when block i joins the ladder blocks i+1..L-1",
    "each": "Increase of perplexity when block i alone is dropped",
    "each-ladder": "Increase of perplexity when block i alone is a ladder block",
}
WIDE_RANGE = 20  # times the threshold: where the highest value is above, the scale is logarithmic away from 0


def sensitivity_picture(document: SensitivityDocument) -> Spec:
    """The panel as a file of its own."""
    width = max(480, 24 * len(document.blocks))
    title = f"{measured_text(document)}; dashed: tau1 {document.tau1:g}, tau2 {document.tau2:g}"
    return picture_spec([sensitivity_panel(document)], title=title, width=width)


def measured_text(document: SensitivityDocument | PointSensitivity) -> str:
    """What was measured, and on what."""
    ranks = f", {document.sync_tp_size} virtual ranks" if document.sync_tp_size else ""
    aligned = ", aligned" if document.aligned is not None else ""
    samples = f"{document.data.samples} x {document.data.seq_len} tokens"
    return f"{Path(document.model).name}{ranks}{aligned}; {samples}, {document.interval:.0%} bootstrap intervals"


def draw_sensitivity(document: SensitivityDocument, stem: Path) -> list[Path]:
    """Write ``stem``.png and ``stem``.svg; returns their paths."""
    return save_pictures(sensitivity_picture(document), stem)


def sensitivity_panel(document: SensitivityDocument) -> PlotPanel:
    rows: list[dict[str, Any]] = [
        {
            "block": block.block,
            "y": block.sensitivity,
            "y1": block.low,
            "y2": block.high,
            "kind": block.sensitivity_class,
            "words": f"block {block.block}: {block.sensitivity:.4g} ({block.low:.4g} to {block.high:.4g}),"
            f" {block.sensitivity_class}",
        }
        for block in document.blocks
    ]
    highest = max((block.high for block in document.blocks), default=0.0)
    y = quantitative("y", "increase of perplexity")
    threshold = max(document.tau1, 1e-3)
    if highest > WIDE_RANGE * threshold:
        y |= symlog(min(block.low for block in document.blocks), highest, threshold)
    x: Spec = {"field": "block", "type": "ordinal", "title": "block", "axis": {"labelAngle": 0, "labelOverlap": True}}
    look = looks("kind", CLASS_LOOKS)
    layers = [
        level("y", 0),
        *(level("y", tau, dashed=True) for tau in (document.tau1, document.tau2) if tau <= 2 * highest),
        intervals("y", {"x": x, "y": y, "color": look["color"]}, width=2),
        marks({"x": x, "y": y, **look}, 80),
    ]
    spec = make_spec("Sensitivity of each block", 280, rows, layers)
    return PlotPanel(spec, picture_title=TITLES.get(document.mode, ""))


def symlog(lowest: float, highest: float, threshold: float) -> Spec:
    """A scale that is linear about 0 and logarithmic beyond the threshold, with its axis."""
    axis = {"values": value_ticks(lowest, highest, threshold), "format": "~g"}
    return {"scale": {"type": "symlog", "constant": threshold, "nice": False, "padding": 8}, "axis": axis}


def value_ticks(lowest: float, highest: float, threshold: float) -> list[float]:
    """0, and the powers of ten outside of +-threshold that the values reach, at most about six on a side."""
    first = math.ceil(math.log10(threshold))

    def side(most: float) -> list[float]:
        exponents = range(first, math.floor(math.log10(most)) + 1) if most > threshold else range(0)
        return [10.0**exponent for exponent in exponents[:: max(1, -(-len(exponents) // 6))]]

    return [*(-value for value in reversed(side(-lowest))), 0.0, *side(highest)]
