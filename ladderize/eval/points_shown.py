"""What single sync points cost, for people: tables and a picture."""

import math
import statistics
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from ladderize.convert.point_sensitivity import PointCost, PointSensitivity
from ladderize.eval.sensitivity_plot import block_ticks, draw_symlog
from ladderize.figure import save_figure
from ladderize.layout import BLOCKING, DROPPED, OVERLAPPED, format_ranges

if TYPE_CHECKING:
    from matplotlib.axes import Axes

# name -> what changes in a layer: the mode of the MLP sync point that enters it, and of its attention's; and how it is
# drawn
CHANGES_OF_A_LAYER = {
    "attention overlapped": (BLOCKING, OVERLAPPED),
    "entering MLP overlapped": (OVERLAPPED, BLOCKING),
    "ladder": (OVERLAPPED, OVERLAPPED),
    "attention dropped": (BLOCKING, DROPPED),
    "both": (OVERLAPPED, DROPPED),
}
MARKS_OF_CHANGES = dict(
    zip(
        CHANGES_OF_A_LAYER,
        (("#4c72b0", "o"), ("#55a868", "s"), ("#8172b3", "^"), ("#dd8452", "D"), ("#c44e52", "v")),
        strict=True,
    )
)
DWARFED = 20  # times the median: where the highest cost is above, the scale is logarithmic from the median on


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
    from matplotlib.figure import Figure

    panels = 2 if document.pairs else 1
    figure = Figure(figsize=(max(7.0, 2 + 0.34 * document.num_layers), 0.6 + 3.8 * panels), layout="constrained")
    axes = figure.subplots(panels, 1, squeeze=False)[:, 0]
    kinds = shown_kinds(document)
    for number, kind in enumerate(kinds):
        offset = 0.14 * (number - (len(kinds) - 1) / 2)
        costs = [cost for (layers, name), cost in costs_by_place(document).items() if name == kind]
        single = [cost for cost in costs if len(cost.layers) == 1]
        colour, marker = MARKS_OF_CHANGES[kind]
        style = {"color": colour, "marker": marker, "markersize": 4, "linestyle": "none", "label": kind}
        axes[0].errorbar(
            [cost.layers[0] + offset for cost in single],
            [cost.nats for cost in single],
            yerr=[
                [max(0.0, cost.nats - cost.low) for cost in single],
                [max(0.0, cost.high - cost.nats) for cost in single],
            ],
            ecolor=colour,
            elinewidth=0.8,
            **style,
        )
        if document.pairs:
            pairs = [cost for cost in costs if len(cost.layers) == 2]
            places = [cost.layers[0] + 0.5 + offset for cost in pairs]
            axes[1].plot(places, [beyond_sum(document, cost) for cost in pairs], **style)
    _finish(axes[0], document, [cost.nats for cost in document.costs if len(cost.layers) == 1])
    axes[0].set_title("What the change of one layer costs", fontsize=10)
    if document.pairs:
        _finish(
            axes[1],
            document,
            [beyond_sum(document, cost) for (layers, _), cost in costs_by_place(document).items() if len(layers) == 2],
        )
        axes[1].set_title("What neighbours changed alike cost beyond the sum of each alone", fontsize=10)
    handles, labels = axes[0].get_legend_handles_labels()
    figure.legend(handles, labels, frameon=False, fontsize=8, ncols=3, loc="outside lower center")
    ranks = f", {document.sync_tp_size} virtual ranks" if document.sync_tp_size else ""
    aligned = ", aligned" if document.aligned is not None else ""
    samples = f"{document.data.samples} x {document.data.seq_len} tokens"
    figure.suptitle(
        f"{Path(document.model).name}{ranks}{aligned}; {samples}, {document.interval:.0%} bootstrap intervals",
        fontsize=9,
    )
    return save_figure(figure, stem)


def _finish(axes: "Axes", document: PointSensitivity, values: list[float]) -> None:
    """Axes of values in nats per token; logarithmic where a few dwarf the others."""
    axes.axhline(0, color="black", linewidth=0.6)
    threshold = max(statistics.median(map(abs, values)), 1e-3) if values else 1.0
    if max(values, default=0.0) > DWARFED * threshold:
        draw_symlog(axes, min(values), max(values), threshold)
    axes.set_xticks(block_ticks(document.num_layers))
    axes.set_xlim(-0.6, document.num_layers - 0.4)
    axes.set_xlabel("layer")
    axes.set_ylabel("nats per token")
    axes.spines[["top", "right"]].set_visible(False)


def dense_line(document: PointSensitivity) -> str:
    """What the costs are added to."""
    return (
        f"dense perplexity {math.exp(document.dense_nll):.4f} ({document.dense_nll:.4f} nats per token); 0.01 nats more"
        " are a perplexity 1 % higher"
    )
