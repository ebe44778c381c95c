"""The picture of one or several trainings: the loss, the held-out perplexity beside the dense model's, the blocks that
were distilled, and the layers that were aligned."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from ladderize.adapt.align.reports import GROUPS
from ladderize.adapt.curves.read import Curves
from ladderize.figure import save_figure

if TYPE_CHECKING:
    from matplotlib.axes import Axes

RUN_COLOURS = ("#4c72b0", "#dd8452", "#55a868", "#c44e52", "#8172b3", "#937860", "#da8bc3", "#8c8c8c")
SMOOTHED_POINTS = 20  # about as many points does a smoothed loss have


def draw_curves(runs: Sequence[Curves], stem: Path) -> list[Path]:
    """Write ``stem``.png and ``stem``.svg; returns their paths."""
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator

    aligned = [run for run in runs if run.aligned]
    distilled = [run for run in runs if run.blocks]
    retrained = [run for run in runs if run.loss or run.heldout or not (run.aligned or run.blocks)]
    panels = len(aligned) + len(distilled) + 2 * bool(retrained)
    figure = Figure(figsize=(1 + 4.6 * panels, 4.0), layout="constrained")
    axes = list(figure.subplots(1, panels, squeeze=False)[0])
    for run in aligned:
        _draw_layers(axes.pop(0), run)
    for run in distilled:
        _draw_blocks(axes.pop(0), run)
    if retrained:
        _draw_losses(axes.pop(0), retrained)
        _draw_perplexities(axes.pop(0), retrained)
    for number, own in enumerate(figure.axes):
        own.spines[["top", "right"]].set_visible(False)
        own.xaxis.set_major_locator(MaxNLocator(integer=True))
        own.set_xlabel("layer" if number < len(aligned) else "step")
    return save_figure(figure, stem)


def colour(number: int) -> str:
    return RUN_COLOURS[number % len(RUN_COLOURS)]


def smoothed(points: Sequence[tuple[int, float]]) -> list[tuple[float, float]]:
    """Means of consecutive points, about ``SMOOTHED_POINTS`` of them; fewer points than twice that stay as they are."""
    width = max(1, len(points) // SMOOTHED_POINTS)
    if width < 2:
        return [(float(step), value) for step, value in points]
    parts = [points[begin : begin + width] for begin in range(0, len(points), width)]
    return [(sum(s for s, _ in part) / len(part), sum(v for _, v in part) / len(part)) for part in parts]


def _draw_losses(axes: "Axes", runs: Sequence[Curves]) -> None:
    labels = sorted({run.label for run in runs})
    for number, run in enumerate(runs):
        if not run.loss:
            continue
        name = run.name if len(labels) == 1 else f"{run.name}: {run.label}"
        axes.plot(*zip(*run.loss, strict=True), color=colour(number), linewidth=0.6, alpha=0.35)
        axes.plot(*zip(*smoothed(run.loss), strict=True), color=colour(number), linewidth=1.6, label=name)
    axes.set_ylabel(f"training {labels[0] if len(labels) == 1 else 'loss'}, nats per token")
    axes.set_title("Training loss", fontsize=10)
    if len(runs) > 1:
        axes.legend(frameon=False, fontsize=8)


def _draw_perplexities(axes: "Axes", runs: Sequence[Curves]) -> None:
    values = []
    for number, run in enumerate(runs):
        if run.heldout:
            values += [value for _, value in run.heldout]
            axes.plot(*zip(*run.heldout, strict=True), color=colour(number), marker="o", markersize=3, label=run.name)
    targets = sorted({round(run.dense, 6) for run in runs if run.dense is not None})
    for target in targets:
        axes.axhline(target, color="#444444", linewidth=0.9, linestyle="--", label=f"dense model: {target:.4g}")
    if values and max(values) > 5 * min([*values, *targets]):
        axes.set_yscale("log")
    axes.set_ylabel("held-out perplexity")
    axes.set_title("Held-out perplexity", fontsize=10)
    if values or targets:
        axes.legend(frameon=False, fontsize=8)
    else:
        axes.text(0.5, 0.5, "nothing was held out", ha="center", transform=axes.transAxes, fontsize=9)


def _draw_blocks(axes: "Axes", run: Curves) -> None:
    """Every block's held-out loss as a share of what it was before."""
    import matplotlib

    shades = matplotlib.colormaps["viridis"]
    many = len(run.blocks) > 10
    for number, (block, curve) in enumerate(sorted(run.blocks.items())):
        first = curve[0][1] or 1.0
        shade = shades(number / max(1, len(run.blocks) - 1) * 0.9)
        points = [(step, value / first) for step, value in curve]
        label = f"block {block}" if not many or number in (0, len(run.blocks) - 1) else None
        axes.plot(*zip(*points, strict=True), color=shade, linewidth=1.2, label=label)
    axes.set_ylim(bottom=0)
    axes.set_ylabel("held-out block loss (MSE), of that before")
    axes.set_title(f"{run.name}: distilled blocks", fontsize=10)
    axes.legend(frameon=False, fontsize=8, ncols=2)


def _draw_layers(axes: "Axes", run: Curves) -> None:
    """The error of every layer's reads and writes, before its alignment and after it."""
    from matplotlib.lines import Line2D

    handles = []
    for number, name in enumerate(GROUPS):
        points = [(report.layer, errors) for report in run.aligned if (errors := report.errors(name)) is not None]
        layers = [layer for layer, _ in points]
        before, after = ([100 * errors[which] for _, errors in points] for which in (0, 1))
        axes.plot(layers, before, color=colour(number), linestyle=":", linewidth=1.2, marker="o", markersize=3, mfc="w")
        handles += axes.plot(layers, after, color=colour(number), linewidth=1.6, marker="o", markersize=3, label=name)
    handles.append(Line2D([], [], color="#444444", linestyle=":", marker="o", markersize=3, mfc="w", label="before"))
    handles.append(Line2D([], [], color="#444444", marker="o", markersize=3, label="after"))
    axes.set_ylim(bottom=0)
    axes.set_ylabel("held-out squared error, % of the target's")
    axes.set_title(f"{run.name}: aligned layers", fontsize=10)
    axes.legend(handles=handles, frameon=False, fontsize=8, ncols=2)
