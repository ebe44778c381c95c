"""The picture of a sensitivity: S of each block with its interval, coloured by class."""

import math
from pathlib import Path
from typing import TYPE_CHECKING

from ladderize.convert.sensitivity_file import CLASSES, SensitivityDocument
from ladderize.figure import save_figure

if TYPE_CHECKING:
    from matplotlib.axes import Axes

COLOURS = dict(zip(CLASSES, ("#55a868", "#dd8452", "#c44e52"), strict=True))
TITLES = {
    "spd": "S: increase of perplexity when block i joins the dropped blocks i+1..L-1",
    "ladder": "S: increase of perplexity when block i joins the ladder blocks i+1..L-1",
    "each": "Increase of perplexity when block i alone is dropped",
    "each-ladder": "Increase of perplexity when block i alone is a ladder block",
}


def draw_sensitivity(document: SensitivityDocument, stem: Path) -> list[Path]:
    """Write ``stem``.png and ``stem``.svg; returns their paths."""
    from matplotlib.figure import Figure

    blocks = document.blocks
    figure = Figure(figsize=(max(6.0, 2 + 0.28 * len(blocks)), 4.2), layout="constrained")
    axes = figure.subplots()
    for kind in CLASSES:
        chosen = [entry for entry in blocks if entry.sensitivity_class == kind]
        if not chosen:
            continue
        heights = [entry.sensitivity for entry in chosen]
        spread = [
            [max(0.0, entry.sensitivity - entry.low) for entry in chosen],
            [max(0.0, entry.high - entry.sensitivity) for entry in chosen],
        ]
        axes.bar(
            [entry.block for entry in chosen],
            heights,
            color=COLOURS[kind],
            label=kind,
            yerr=spread,
            ecolor="#444444",
            capsize=2,
        )
    highest = max(entry.high for entry in blocks)
    for name, tau in (("tau1", document.tau1), ("tau2", document.tau2)):
        if tau <= 2 * highest:
            axes.axhline(tau, color="#888888", linewidth=0.8, linestyle="--")
            axes.annotate(
                name,
                (1, tau),
                xycoords=("axes fraction", "data"),
                fontsize=8,
                color="#666666",
                xytext=(3, -3),
                textcoords="offset points",
            )
    threshold = max(document.tau1, 1e-3)
    if highest > 20 * threshold:  # a few blocks dwarf the others: linear around 0, logarithmic above
        draw_symlog(axes, min(entry.low for entry in blocks), highest, threshold)
    axes.axhline(0, color="black", linewidth=0.6)
    axes.set_xticks(block_ticks(len(blocks)))
    axes.set_xlabel("block i")
    axes.set_ylabel("S (perplexity)")
    axes.set_title(TITLES[document.mode], fontsize=10)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False, fontsize=8)
    ranks = f", {document.sync_tp_size} virtual ranks" if document.sync_tp_size else ""
    aligned = ", aligned" if document.aligned is not None else ""
    samples = f"{document.data.samples} x {document.data.seq_len} tokens"
    figure.suptitle(
        f"{Path(document.model).name}{ranks}{aligned}; {samples}, {document.interval:.0%} bootstrap intervals",
        fontsize=9,
    )
    return save_figure(figure, stem)


def block_ticks(count: int) -> list[int]:
    """The blocks whose number is written: all, or so many that numbers stay apart."""
    step = next(step for step in (1, 2, 4, 5, 10, 20, 50, 100, 200, 500, 1000) if count <= 26 * step or step == 1000)
    return list(range(0, count, step))


def value_ticks(lowest: float, highest: float, threshold: float) -> list[float]:
    """0, and the powers of ten outside of +-threshold that the values reach, at most about six on a side."""
    first = math.ceil(math.log10(threshold))

    def side(most: float) -> list[float]:
        exponents = range(first, math.floor(math.log10(most)) + 1) if most > threshold else range(0)
        return [10.0**exponent for exponent in exponents[:: max(1, -(-len(exponents) // 6))]]

    return [*(-value for value in reversed(side(-lowest))), 0.0, *side(highest)]


def draw_symlog(axes: "Axes", lowest: float, highest: float, threshold: float) -> None:
    """A scale that is linear within the threshold; the axis ends where the values do, also below 0."""
    axes.set_yscale("symlog", linthresh=threshold, linscale=0.6)
    axes.set_ylim(min(0.0, 1.5 * lowest) - 0.1 * threshold, 1.5 * highest)
    ticks = value_ticks(lowest, highest, threshold)
    axes.set_yticks(ticks, [f"{tick:g}" for tick in ticks])
    axes.minorticks_off()
