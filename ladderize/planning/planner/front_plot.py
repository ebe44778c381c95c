"""The picture of a choice: what each speed-up costs in perplexity, what was measured, and what was chosen."""

import math
from pathlib import Path
from typing import TYPE_CHECKING

from ladderize.figure import save_figure
from ladderize.planning.planner.document import PlanChoice, PlannedLayout

if TYPE_CHECKING:
    from matplotlib.axes import Axes

FRONT_COLOUR, MEASURED_COLOUR, CHOSEN_COLOUR, BOUND_COLOUR = "#4c72b0", "#dd8452", "#55a868", "#888888"


def draw_front(choice: PlanChoice, stem: Path) -> list[Path]:
    """Write ``stem``.png and ``stem``.svg; returns their paths."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(6.4, 4.2), layout="constrained")
    axes = figure.subplots()
    retrained = choice.costs == "sweep"
    axes.plot(
        [point.speedup for point in choice.front],
        [_percent_of(point.nats) for point in choice.front],
        color=FRONT_COLOUR,
        linewidth=1.2,
        marker="o" if len(choice.front) < 40 else "",
        markersize=4,
        label="front, measured by the sweep" if retrained else "front, estimated",
    )
    checked = choice.verification.layouts if choice.verification is not None else []
    if checked:
        _draw_measured(axes, checked)
    axes.plot(
        [choice.chosen.speedup],
        [_percent_of(choice.chosen.nats or 0.0)],
        linestyle="",
        marker="*",
        markersize=14,
        markeredgecolor="white",
        color=CHOSEN_COLOUR,
        label=f"chosen ({choice.statement})",
        zorder=5,
    )
    if choice.beyond is not None and choice.beyond.nats is not None:
        axes.plot(
            [choice.beyond.speedup],
            [_percent_of(choice.beyond.nats)],
            linestyle="",
            marker="P",
            markersize=9,
            markeredgecolor="white",
            color=MEASURED_COLOUR,
            label="suggested by estimates, not retrained",
            zorder=4,
        )
    target = choice.target
    if target.max_nats is not None:
        bound = _percent_of(target.max_nats)
        axes.axhline(bound, color=BOUND_COLOUR, linewidth=0.8, linestyle="--", label=f"most allowed: {bound:.3g}%")
    if target.min_speedup is not None:
        axes.axvline(
            target.min_speedup,
            color=BOUND_COLOUR,
            linewidth=0.8,
            linestyle="--",
            label=f"least asked for: {target.min_speedup:g}x",
        )
    _limit(axes, choice, checked)
    axes.set_xlabel(
        {"end_to_end": "speed-up, prefill and decode", "prefill": "speed-up, prefill", "decode": "speed-up, decode"}[
            choice.phase
        ]
        + " (predicted)"
    )
    axes.set_ylabel("increase of the perplexity (%)")
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False, fontsize=8, loc="upper left")
    return save_figure(figure, stem)


def _draw_measured(axes: "Axes", layouts: list[PlannedLayout]) -> None:
    for name, marker, found in (
        ("measured", "o", [(one.speedup, one.measured) for one in layouts if one.measured is not None]),
        ("measured on held-out windows", "D", [(one.speedup, one.held_out) for one in layouts if one.held_out]),
    ):
        if not found:
            continue
        heights = [_percent_of(nll.increase) for _, nll in found if nll is not None]
        ends = [
            [
                abs(_percent_of(nll.increase + side * (nll.increase_stderr or 0.0)) - _percent_of(nll.increase))
                for _, nll in found
                if nll is not None
            ]
            for side in (-1, 1)
        ]
        axes.errorbar(
            [speedup for speedup, _ in found],
            heights,
            yerr=ends,
            linestyle="",
            marker=marker,
            markersize=5,
            markeredgecolor="white",
            markeredgewidth=0.5,
            elinewidth=0.8,
            color=MEASURED_COLOUR if marker == "o" else CHOSEN_COLOUR,
            label=f"{name}, with its standard error",
            zorder=3,
        )


def _limit(axes: "Axes", choice: PlanChoice, checked: list[PlannedLayout]) -> None:
    """Show what lies about the target: the far end of a front is often a broken model, which would dwarf all else."""
    known = [one.nats for one in (choice.chosen, choice.beyond, *checked) if one is not None and one.nats is not None]
    shown = [_percent_of(nats) for nats in [*known, *([choice.target.max_nats] if choice.target.max_nats else [])]]
    heights = [_percent_of(point.nats) for point in choice.front]
    top = min(max(heights), 2.5 * max([*shown, 1e-3]))
    low = min([0.0, *shown, *heights])
    axes.set_ylim(low - 0.04 * (top - low), top + 0.08 * (top - low))
    inside = [point.speedup for point, height in zip(choice.front, heights, strict=True) if height <= 1.1 * top]
    right = max([*inside, choice.chosen.speedup, *(one.speedup for one in checked), choice.target.min_speedup or 1.0])
    axes.set_xlim(1 - 0.03 * (right - 1), right + 0.05 * (right - 1))


def _percent_of(nats: float) -> float:
    return 100 * math.expm1(min(nats, 30.0))
