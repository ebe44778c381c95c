"""What single sync points cost, for people: tables and a picture."""

import math
import statistics
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from ladderize.convert.point_sensitivity import PointCost, PointSensitivity
from ladderize.eval.sensitivity_plot import WIDE_RANGE, measured_text, symlog
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
from ladderize.layout import BLOCKING, DROPPED, OVERLAPPED, format_ranges

# name -> what changes in a layer: the mode of the MLP sync point that enters it, and of its attention's
CHANGES_OF_A_LAYER = {
    "attention overlapped": (BLOCKING, OVERLAPPED),
    "entering MLP overlapped": (OVERLAPPED, BLOCKING),
    "ladder": (OVERLAPPED, OVERLAPPED),
    "attention dropped": (BLOCKING, DROPPED),
    "both": (OVERLAPPED, DROPPED),
}
LOOKS_OF_CHANGES = {
    "attention overlapped": ("ladder", "circle"),
    "entering MLP overlapped": ("both", "square"),
    "ladder": ("baseline", "triangle-up"),
    "attention dropped": ("spd", "diamond"),
    "both": ("bad", "triangle-down"),
}


def shown_kinds(document: PointSensitivity) -> list[str]:
    """The kinds of change that a file has costs of, in the order of ``CHANGES_OF_A_LAYER``."""
    found = {(cost.entering, cost.attention) for cost in document.costs}
    return [name for name, step in CHANGES_OF_A_LAYER.items() if step in found]


def costs_by_place(document: PointSensitivity) -> dict[tuple[tuple[int, ...], str], PointCost]:
    """(layers, kind of change) -> its cost; of neighbours those that are changed alike."""
    names = {step: name for name, step in CHANGES_OF_A_LAYER.items()}
    return {(cost.layers, names[cost.entering, cost.attention]): cost for cost in document.costs if not cost.before}


def beyond_sum(document: PointSensitivity, pair: PointCost) -> float:
    """How much more two neighbours cost together than both alone, in nats per token."""
    alone = {(cost.layers[0], cost.steps[0]): cost.nats for cost in document.costs if len(cost.layers) == 1}
    return pair.nats - sum(alone[layer, step] for layer, step in zip(pair.layers, pair.steps, strict=True))


def point_rows(document: PointSensitivity) -> Iterator[dict[str, str]]:
    """A row for each layer: what each change of it costs, in nats per token, and half of the interval."""
    costs, kinds = costs_by_place(document), shown_kinds(document)
    for layer in range(document.num_layers):
        row = {"layer": str(layer)}
        for kind in kinds:
            cost = costs.get(((layer,), kind))
            row[kind] = f"{cost.nats:+.4f} ±{(cost.high - cost.low) / 2:.4f}" if cost is not None else ""
        yield row


def pair_rows(document: PointSensitivity) -> Iterator[dict[str, str]]:
    """A row for each two neighbours: what changing both alike costs beyond the sum of each alone."""
    costs, kinds = costs_by_place(document), shown_kinds(document)
    for layer in range(document.num_layers - 1 if document.pairs else 0):
        row = {"layers": format_ranges((layer, layer + 1))}
        for kind in kinds:
            cost = costs.get(((layer, layer + 1), kind))
            row[kind] = f"{cost.nats:+.4f} ({beyond_sum(document, cost):+.4f})" if cost is not None else ""
        yield row


def draw_points(document: PointSensitivity, stem: Path) -> list[Path]:
    """Write ``stem``.png and ``stem``.svg: the costs by layer, and of neighbours what they cost beyond their sum;
    returns their paths."""
    costs = costs_by_place(document)
    single = [
        {"place": layers[0], "kind": kind, "y": cost.nats, "y1": cost.low, "y2": cost.high}
        for (layers, kind), cost in costs.items()
        if len(layers) == 1
    ]
    pairs = [
        {"place": format_ranges(layers), "kind": kind, "y": beyond_sum(document, cost)}
        for (layers, kind), cost in costs.items()
        if len(layers) == 2
    ]
    panels = [_panel(document, single, "layer", "What the change of one layer costs")]
    if document.pairs:
        title = "What neighbours changed alike cost beyond the sum of each alone"
        panels.append(_panel(document, pairs, "layers", title))
    return save_pictures(
        picture_spec(panels, title=measured_text(document), width=max(560, 28 * document.num_layers)), stem
    )


def _panel(document: PointSensitivity, rows: list[dict[str, Any]], place: str, title: str) -> PlotPanel:
    """Values in nats per token; logarithmic where a few dwarf the others."""
    values = [row["y"] for row in rows]
    y = quantitative("y", "nats per token")
    threshold = max(statistics.median(map(abs, values)), 1e-3) if values else 1.0
    if max(values, default=0.0) > WIDE_RANGE * threshold:
        y |= symlog(min(values), max(values), threshold)
    kinds = shown_kinds(document)
    x: Spec = {"field": "place", "type": "ordinal", "title": place, "sort": None}
    x["axis"] = {"labelAngle": 0, "labelOverlap": True}
    look = looks("kind", {kind: LOOKS_OF_CHANGES[kind] for kind in kinds})
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
