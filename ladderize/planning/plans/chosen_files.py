"""What is written of a choice beside plan.json: a recipe for ``ladderize convert``, with how it came about in front,
and the picture of what each speed-up costs in perplexity. Imports no torch."""

import math
import textwrap
from pathlib import Path
from typing import Any

import yaml

from ladderize.convert.recipe import Recipe
from ladderize.convert.sensitivity_file import alignment_words
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
from ladderize.files.regular import resolved
from ladderize.files.temporaries import replacement
from ladderize.planning.plans.document import PlanChoice, PlannedLayout

STAR = "M0,-1L.22,-.31L.95,-.31L.36,.12L.59,.81L0,.38L-.59,.81L-.36,.12L-.95,-.31L-.22,-.31Z"
TIMED_PART = {"end_to_end": "prefill and decode", "prefill": "prefill", "decode": "decode"}


# ---- words ----


def percent_of(nats: float) -> float:
    """An increase of the perplexity in per cent."""
    return 100 * math.expm1(min(nats, 30.0))


def shown_increase(nats: float) -> str:
    """The same with its sign."""
    return f"{percent_of(nats):+.2f}%"


def cost_words(one: PlannedLayout) -> str:
    """``+1.20% estimated, +1.43% measured, +1.51% (standard error 0.30) on 16 held-out windows``."""
    told = [] if one.estimated_nats is None else [f"{shown_increase(one.estimated_nats)} estimated"]
    if one.measured is not None:
        told.append(f"{shown_increase(one.measured.increase)} measured")
    if (found := one.held_out) is not None:
        error = found.increase_stderr
        percent = "" if error is None else f" (standard error {100 * math.exp(min(found.increase, 30.0)) * error:.2f})"
        told.append(f"{shown_increase(found.increase)}{percent} on {found.windows} held-out windows")
    return ", ".join(told)


# ---- the recipe ----


def write_plan_recipe(path: Path, choice: PlanChoice) -> None:
    """Write ``--recipe-out``, whole or not at all: YAML that ``convert`` takes, with layers by name where names compile
    to the layout, else the modes of all."""
    recipe = Recipe.from_layout(choice.chosen.as_layout).to_dict()
    plain = {key: list(value) if isinstance(value, tuple) else value for key, value in recipe.items()}
    comments = [
        f"# {line}"
        for sentence in _about(choice)
        for line in textwrap.wrap("".join(c if c.isprintable() else "?" for c in sentence), 98)
    ]
    text = "\n".join([*comments, yaml.safe_dump(plain, sort_keys=False, allow_unicode=True, width=100)])
    with replacement(resolved(path, "--recipe-out ")) as file:
        file.write(text)


def _about(choice: PlanChoice) -> list[str]:
    chosen, target = choice.chosen, choice.target
    asked = (
        f"--max-ppl-increase {target.max_ppl_increase}"
        if target.max_ppl_increase is not None
        else f"--min-speedup {target.min_speedup:g}"
    )
    what = TIMED_PART[choice.phase].capitalize()
    sentences = [
        f"Chosen by `ladderize plan` for {asked}, by the costs of {choice.costs_file}.",
        f"{chosen.layout}. {what}: {chosen.speedup:.3f}x of the dense layout's speed, predicted.",
        f"Perplexity: {cost_words(chosen)} ({choice.statement}).",
    ]
    if choice.aligned is not None:
        sentences.append(
            f"Of that, {alignment_words(choice.aligned)}: align what is made of this, with `ladderize adapt --method"
            " align`."
        )
    return sentences


# ---- the picture ----


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
        ends = {f"y{end}": percent_of(nats + side * stderr) for end, side in ((1, -1), (2, 1)) if stderr}
        rows.append({"name": name, "x": speedup, "y": percent_of(nats), **ends, "size": size})

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
        bounds.append(level("y", percent_of(most), dashed=True))
        title.append(f"most allowed: {percent_of(most):.3g}%")
    if (least := choice.target.min_speedup) is not None:
        bounds.append(level("x", least, dashed=True))
        title.append(f"least asked for: {least:g}x")
    drawn = {name: look for name, look in table.items() if any(row["name"] == name for row in rows)}
    encoding, look = _axes(choice, checked), looks("name", drawn)
    coloured = {**encoding, "color": look["color"]}
    size: Spec = {"field": "size", "type": "quantitative", "scale": None, "legend": None}
    layers = [
        *bounds,
        {**lines(coloured), "transform": [{"filter": {"field": "name", "equal": front}}]},
        intervals("y", coloured),
        marks({**encoding, **look, "size": size}, 40),
    ]
    for layer in layers:
        layer["mark"]["clip"] = True
    spec = make_spec("What each speed-up costs in perplexity", 320, rows, layers)
    dashed = f"dashed: {', '.join(title)}" if title else ""
    return save_pictures(picture_spec([PlotPanel(spec, picture_title=dashed)], width=560), stem)


def _axes(choice: PlanChoice, checked: list[PlannedLayout]) -> Spec:
    """Show what lies about the target: the far end of a front is often a broken model, which would dwarf all else."""
    known = [one.nats for one in (choice.chosen, choice.beyond, *checked) if one is not None and one.nats is not None]
    measured = [percent_of(nats) for nats in known]
    shown = [*measured, *([percent_of(choice.target.max_nats)] if choice.target.max_nats else [])]
    heights = [percent_of(point.nats) for point in choice.front]
    top = min(max([*heights, *measured]), 2.5 * max([*shown, 1e-3]))
    low = min([0.0, *shown, *heights])
    inside = [point.speedup for point, height in zip(choice.front, heights, strict=True) if height <= 1.1 * top]
    right = max([*inside, choice.chosen.speedup, *(one.speedup for one in checked), choice.target.min_speedup or 1.0])
    across = {"domain": [1 - 0.03 * (right - 1), right + 0.05 * (right - 1)], "nice": False}
    up = {"domain": [low - 0.04 * (top - low), top + 0.08 * (top - low)], "nice": False}
    return {
        "x": quantitative("x", f"speed-up, {TIMED_PART[choice.phase]} (predicted)", scale=across),
        "y": quantitative("y", "increase of the perplexity (%)", scale=up),
    }
