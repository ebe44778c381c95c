"""Sensitivities for people: tables and pictures of S of each block, and of what single sync points cost. Reports show
the pictures too."""

import math
import statistics
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from ladderize.convert.point_sensitivity import PointCost, PointSensitivity
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
from ladderize.layout import format_ranges

CLASS_LOOKS = dict(zip(CLASSES, (("good", "circle"), ("spd", "square"), ("bad", "triangle-up")), strict=True))
TITLES = {
    "spd": "S: increase of perplexity when block i joins the dropped blocks i+1..L-1",
    "ladder": "S: increase of perplexity when block i joins the ladder blocks i+1..L-1",
    "each": "Increase of perplexity when block i alone is dropped",
    "each-ladder": "Increase of perplexity when block i alone is a ladder block",
}
WIDE_RANGE = 20  # times the threshold: where the highest value is above, the scale is logarithmic away from 0


def sensitivity_rows(document: SensitivityDocument) -> Iterator[dict[str, str]]:
    """One row per block for people."""
    for entry, perplexity in zip(document.blocks, document.perplexity, strict=False):
        yield {
            "block": str(entry.block),
            "S": f"{entry.sensitivity:+.4f}",
            f"{document.interval:.0%} interval": f"{entry.low:+.4f} to {entry.high:+.4f}",
            "class": entry.sensitivity_class,
            "perplexity": f"{perplexity:.4f}",
        }


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


# ---- single sync points ----

# how the kinds of change of a layer look (``PointChange.kind``)
KIND_LOOKS = {
    "attention overlapped": ("ladder", "circle"),
    "entering MLP overlapped": ("both", "square"),
    "ladder": ("baseline", "triangle-up"),
    "attention dropped": ("spd", "diamond"),
    "both": ("bad", "triangle-down"),
}


def costs_by_kind(document: PointSensitivity) -> dict[str, dict[tuple[int, ...], PointCost]]:
    """The kinds of change that a file has costs of -> layers -> the cost; of neighbours those that are changed
    alike."""
    found: dict[str, dict[tuple[int, ...], PointCost]] = {kind: {} for kind in KIND_LOOKS}
    for cost in document.costs:
        if not cost.before:
            found[cost.kind][cost.layers] = cost
    return {kind: costs for kind, costs in found.items() if costs}


def beyond_sum(document: PointSensitivity, pair: PointCost) -> float:
    """How much more two neighbours cost together than both alone, in nats per token."""
    alone = {(cost.layers[0], cost.steps[0]): cost.nats for cost in document.costs if len(cost.layers) == 1}
    return pair.nats - sum(alone[layer, step] for layer, step in zip(pair.layers, pair.steps, strict=True))


def point_rows(document: PointSensitivity) -> Iterator[dict[str, str]]:
    """A row for each layer: what each change of it costs, in nats per token, and half of the interval."""
    costs = costs_by_kind(document)
    for layer in range(document.num_layers):
        row = {"layer": str(layer)}
        for kind, by_layers in costs.items():
            cost = by_layers.get((layer,))
            row[kind] = f"{cost.nats:+.4f} ±{(cost.high - cost.low) / 2:.4f}" if cost is not None else ""
        yield row


def pair_rows(document: PointSensitivity) -> Iterator[dict[str, str]]:
    """A row for each two neighbours: what changing both alike costs, and how much of it is beyond the sum of each
    alone."""
    costs = costs_by_kind(document)
    for layer in range(document.num_layers - 1 if document.pairs else 0):
        row = {"layers": format_ranges((layer, layer + 1))}
        for kind, by_layers in costs.items():
            cost = by_layers.get((layer, layer + 1))
            row[kind] = f"{cost.nats:+.4f} ({beyond_sum(document, cost):+.4f})" if cost is not None else ""
        yield row


def draw_points(document: PointSensitivity, stem: Path) -> list[Path]:
    """Write ``stem``.png and ``stem``.svg; returns their paths."""
    width = max(560, 28 * document.num_layers)
    return save_pictures(picture_spec(point_panels(document), title=measured_text(document), width=width), stem)


def point_panels(document: PointSensitivity) -> list[PlotPanel]:
    """The costs by layer, and, where they were measured, what neighbours cost beyond their sum."""
    single, pairs = [], []
    for kind, by_layers in costs_by_kind(document).items():
        for layers, cost in by_layers.items():
            if len(layers) == 1:
                single.append({"place": layers[0], "kind": kind, "y": cost.nats, "y1": cost.low, "y2": cost.high})
            else:
                pairs.append({"place": format_ranges(layers), "kind": kind, "y": beyond_sum(document, cost)})
    panels = [_points_panel(document, single, "layer", "What the change of one layer costs")]
    if document.pairs:
        title = "What neighbours changed alike cost beyond the sum of each alone"
        panels.append(_points_panel(document, pairs, "layers", title))
    return panels


def _points_panel(document: PointSensitivity, rows: list[dict[str, Any]], place: str, title: str) -> PlotPanel:
    """Values in nats per token; logarithmic where a few dwarf the others."""
    values = [row["y"] for row in rows]
    y = quantitative("y", "nats per token")
    threshold = max(statistics.median(map(abs, values)), 1e-3) if values else 1.0
    if max(values, default=0.0) > WIDE_RANGE * threshold:
        y |= symlog(min(values), max(values), threshold)
    kinds = list(costs_by_kind(document))
    x: Spec = {"field": "place", "type": "ordinal", "title": place, "sort": None}
    x["axis"] = {"labelAngle": 0, "labelOverlap": True}
    look = looks("kind", {kind: KIND_LOOKS[kind] for kind in kinds})
    encoding = {"x": x, "y": y, "xOffset": {"field": "kind", "type": "nominal", "sort": kinds}}
    layers = [
        level("y", 0),
        intervals("y", {**encoding, "color": look["color"]}),
        marks({**encoding, **look}, 35),
    ]
    return PlotPanel(make_spec(title, 260, rows, layers), picture_title=title)


def dense_line(document: PointSensitivity) -> str:
    """What the costs are added to."""
    return (
        f"dense perplexity {math.exp(document.dense_nll):.4f} ({document.dense_nll:.4f} nats per token); 0.01 nats more"
        " are a perplexity 1 % higher"
    )
