"""The picture of a sensitivity: S of each block with its interval, coloured by class."""

from pathlib import Path

from ladderize.convert.sensitivity_file import CLASSES, SensitivityDocument
from ladderize.figure import save_figure

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
    if highest > 20 * max(document.tau1, 1e-3):  # a few blocks dwarf the others: linear around 0, logarithmic above
        axes.set_yscale("symlog", linthresh=max(document.tau1, 1e-3))
    axes.axhline(0, color="black", linewidth=0.6)
    axes.set_xticks([entry.block for entry in blocks][:: max(1, len(blocks) // 40)])
    axes.set_xlabel("block i")
    axes.set_ylabel("S (perplexity)")
    axes.set_title(TITLES[document.mode], fontsize=10)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False, fontsize=8)
    ranks = f", {document.sync_tp_size} virtual ranks" if document.sync_tp_size else ""
    samples = f"{document.data.samples} x {document.data.seq_len} tokens"
    figure.suptitle(
        f"{Path(document.model).name}{ranks}; {samples}, {document.interval:.0%} bootstrap intervals", fontsize=9
    )
    return save_figure(figure, stem)
