"""The picture of a choice: what each speed-up costs in perplexity, what was measured, and what was chosen."""

import math
from pathlib import Path
from typing import Any

from ladderize.figure import (
    PlotPanel,
    Spec,
    intervals,
    level,
    lines,
    looks,
    make_spec,
    marks,
    picture_spec,
    quantitative,
    save_pictures,
)
from ladderize.planning.planner.document import PlanChoice, PlannedLayout

STAR = "M0,-1L.22,-.31L.95,-.31L.36,.12L.59,.81L0,.38L-.59,.81L-.36,.12L-.95,-.31L-.22,-.31Z"
SPEEDUP_OF = {"end_to_end": "prefill and decode", "prefill": "prefill", "decode": "decode"}


def draw_front(choice: PlanChoice, stem: Path) -> list[Path]:
    """Write ``stem``.png and ``stem``.svg; returns their paths."""
    front = "front, measured by the sweep" if choice.costs == "sweep" else "front, estimated"
    chosen = f"chosen ({choice.statement})"
    table = {
        front: ("ladder", "circle"),
        (measured := "measured, with its standard error"): ("spd", "circle"),
        (held_out := "measured on held-out windows, with its standard error"): ("both", "diamond"),
        (beyond := "suggested by estimates, not retrained"): ("spd", "cross"),
        chosen: ("good", STAR),
    }
    rows: list[dict[str, Any]] = []

    def add(name: str, speedup: float, nats: float, stderr: float = 0.0, size: int = 40) -> None:
        ends = {f"y{end}": _percent_of(nats + side * stderr) for end, side in ((1, -1), (2, 1)) if stderr}
        rows.append({"name": name, "x": speedup, "y": _percent_of(nats), **ends, "size": size})

    for point in choice.front:
        add(front, point.speedup, point.nats, size=30 if len(choice.front) < 40 else 0)
    checked = choice.verification.layouts if choice.verification is not None else []
    for one in checked:
        for name, nll in ((measured, one.measured), (held_out, one.held_out)):
            if nll is not None:
                add(name, one.speedup, nll.increase, nll.increase_stderr or 0.0)
    if choice.beyond is not None and choice.beyond.nats is not None:
        add(beyond, choice.beyond.speedup, choice.beyond.nats, size=120)
    add(chosen, choice.chosen.speedup, choice.chosen.nats or 0.0, size=160)
    bounds, title = [], []
    if (most := choice.target.max_nats) is not None:
        bounds.append(level("y", _percent_of(most), dashed=True))
        title.append(f"most allowed: {_percent_of(most):.3g}%")
    if (least := choice.target.min_speedup) is not None:
        bounds.append(level("x", least, dashed=True))
        title.append(f"least asked for: {least:g}x")
    drawn = {name: look for name, look in table.items() if any(row["name"] == name for row in rows)}
    encoding, look = _axes(choice, checked), looks("name", drawn)
    size: Spec = {"field": "size", "type": "quantitative", "scale": None, "legend": None}
    points = marks({**encoding, **look, "size": size}, 40)
    layers = [
        *bounds,
        {**lines({**encoding, "color": look["color"]}), "transform": [{"filter": {"field": "name", "equal": front}}]},
        intervals("y", {**encoding, "color": look["color"]}),
        points,
    ]
    for layer in layers:
        layer["mark"]["clip"] = True
    spec = make_spec("What each speed-up costs in perplexity", 320, rows, layers)
    dashed = f"dashed: {', '.join(title)}" if title else ""
    return save_pictures(picture_spec([PlotPanel(spec, picture_title=dashed)], width=560), stem)


def _axes(choice: PlanChoice, checked: list[PlannedLayout]) -> Spec:
    """Show what lies about the target: the far end of a front is often a broken model, which would dwarf all else."""
    known = [one.nats for one in (choice.chosen, choice.beyond, *checked) if one is not None and one.nats is not None]
    measured = [_percent_of(nats) for nats in known]
    shown = [*measured, *([_percent_of(choice.target.max_nats)] if choice.target.max_nats else [])]
    heights = [_percent_of(point.nats) for point in choice.front]
    top = min(max([*heights, *measured]), 2.5 * max([*shown, 1e-3]))
    low = min([0.0, *shown, *heights])
    inside = [point.speedup for point, height in zip(choice.front, heights, strict=True) if height <= 1.1 * top]
    right = max([*inside, choice.chosen.speedup, *(one.speedup for one in checked), choice.target.min_speedup or 1.0])
    across = {"domain": [1 - 0.03 * (right - 1), right + 0.05 * (right - 1)], "nice": False}
    up = {"domain": [low - 0.04 * (top - low), top + 0.08 * (top - low)], "nice": False}
    return {
        "x": quantitative("x", f"speed-up, {SPEEDUP_OF[choice.phase]} (predicted)", scale=across),
        "y": quantitative("y", "increase of the perplexity (%)", scale=up),
    }


def _percent_of(nats: float) -> float:
    return 100 * math.expm1(min(nats, 30.0))
