"""Draw docs/recovery.png and .svg from benchmarks/results/recovery.json, and print its figures as tables.

python docs/draw_recovery.py        # needs matplotlib (pip install matplotlib)
"""

import json
import math
from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from statistics import mean

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

HERE = Path(__file__).resolve().parent
ROWS = HERE.parent / "benchmarks" / "results" / "recovery.json"
MODELS = {"demo": "bundled", "stories": "stories260K", "prose": "16 layers"}
LAYOUTS = {
    "ladder upper": "ladder, upper half",
    "ladder all": "ladder, all",
    "spd all": "spd, all",
    "both": "both, all",
}
BUDGETS = (16_000, 60_000, 200_000, 600_000)
PLAIN, BEST = "kl", "align+kl"
RECIPES = {
    "ce": "cross-entropy",
    PLAIN: "KL",
    "blocks": "blocks",
    "align+blocks": "aligned, blocks",
    BEST: "aligned, KL",
}
LINES = {"ce": "#9a9a9a", PLAIN: "#3b6ea5", "blocks": "#7d6aa8", BEST: "#c8443a"}


@dataclass(frozen=True)
class Place:
    """A panel: one model in one layout."""

    model: str
    layout: str


Curves = Mapping[tuple[Place, str], Mapping[int, list[float]]]  # by recipe: tokens -> KL of each seed


def read() -> Curves:
    curves: dict[tuple[Place, str], dict[int, list[float]]] = defaultdict(lambda: defaultdict(list))
    for row in json.loads(ROWS.read_text())["rows"]:
        curves[Place(row["model"], row["layout"]), row["recipe"]][row["tokens"]].append(row["kl"])
    return curves


def means(curves: Curves, place: Place, recipe: str) -> dict[int, float]:
    return {tokens: mean(values) for tokens, values in sorted(curves.get((place, recipe), {}).items())}


def tokens_to_reach(curve: Mapping[int, float], aim: float) -> float | None:
    """Where a curve first comes down to ``aim``, between its points on logarithmic axes; None: nowhere. At its first
    point or before it, that point."""
    points = sorted(curve.items())
    if points[0][1] <= aim:
        return points[0][0]
    for (before, high), (after, low) in pairwise(points):
        if low <= aim:
            share = math.log(high / aim) / math.log(high / low)
            return math.exp(math.log(before) + share * math.log(after / before))
    return None


def draw(curves: Curves) -> None:
    figure = Figure(figsize=(11, 2.5 * len(MODELS) + 0.6), layout="constrained")
    panels = figure.subplots(len(MODELS), len(LAYOUTS), sharex=True)
    for row, model in zip(panels, MODELS, strict=True):
        for axes, layout in zip(row, LAYOUTS, strict=True):
            draw_panel(axes, curves, Place(model, layout))
            axes.set_title(f"{MODELS[model]}: {LAYOUTS[layout]}", fontsize=9)
        row[0].set_ylabel("KL to dense, nats per token", fontsize=8)
    for axes in panels[-1]:
        axes.set_xlabel("tokens of training", fontsize=8)
    handles, labels = panels[0][0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=len(labels), frameon=False, fontsize=8.5)
    for suffix in (".png", ".svg"):
        figure.savefig((HERE / "recovery").with_suffix(suffix), dpi=150)


def draw_panel(axes: Axes, curves: Curves, place: Place) -> None:
    for recipe, style, label in (("none", "--", "as converted"), ("align", ":", "aligned on 16k tokens")):
        level = next(iter(means(curves, place, recipe).values()))
        axes.axhline(level, color="#444444", linestyle=style, linewidth=1, label=label)
    for recipe, colour in LINES.items():
        curve = means(curves, place, recipe)
        axes.plot(list(curve), list(curve.values()), color=colour, marker="o", markersize=3, label=RECIPES[recipe])
    axes.set(xscale="log", yscale="log", xticks=[16_000, 60_000, 200_000, 600_000])
    axes.yaxis.set_major_locator(LogLocator(subs=(1, 1.5, 2, 3, 5, 7)))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda tokens, _: f"{tokens / 1000:.0f}k"))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda kl, _: f"{kl:.3g}"))
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_minor_formatter(NullFormatter())
    axes.tick_params(labelsize=8)
    axes.grid(which="both", alpha=0.15)
    axes.spines[["top", "right"]].set_visible(False)


def print_table(title: str, heads: list[str], cells: Callable[[Place], list[str]]) -> None:
    print(f"\n{title}\n\n| model, layout | " + " | ".join(heads) + " |")
    print("|---" * (len(heads) + 1) + "|")
    for place in (Place(model, layout) for model in MODELS for layout in LAYOUTS):
        print(f"| {MODELS[place.model]}, {LAYOUTS[place.layout]} | " + " | ".join(cells(place)) + " |")


def print_tasks() -> None:
    """What the demo's tasks score, of seed 0."""
    steps = [("none", 0), ("align", 16_384), *((recipe, n) for n in BUDGETS[1:] for recipe in (PLAIN, BEST))]
    scores = {
        (row["layout"], row["recipe"], row["tokens"], task): row[task]
        for row in json.loads(ROWS.read_text())["rows"]
        for task in row
        if task.startswith("demo_") and row["seed"] == 0
    }
    heads = ["converted", "aligned", *(f"{RECIPES[recipe]}, {n // 1000}k" for recipe, n in steps[2:])]
    print("\n| layout | task | " + " | ".join(heads) + " |\n" + "|---" * (len(steps) + 2) + "|")
    for layout in LAYOUTS:
        for task in dict.fromkeys(key[-1] for key in scores):
            found = (scores.get((layout, *step, task)) for step in steps)
            cells = ("" if score is None else f"{score:.3f}" for score in found)
            print(f"| {LAYOUTS[layout]} | {task.removeprefix('demo_')} | " + " | ".join(cells) + " |")


def spread(values: list[float]) -> str:
    """The mean, and all of the range where there are several."""
    if len(values) < 2:
        return "".join(f"{value:.3f}" for value in values)
    return f"{mean(values):.3f} ({min(values):.3f} to {max(values):.3f})"


def print_budget(curves: Curves, budget: int) -> None:
    """KL after so many tokens, of the recipes that were run with them; the lowest of a row in bold."""
    places = [Place(model, layout) for model in MODELS for layout in LAYOUTS]
    recipes = [recipe for recipe in RECIPES if any(budget in curves.get((place, recipe), {}) for place in places)]

    def cells(place: Place) -> list[str]:
        found = [curves.get((place, recipe), {}).get(budget, []) for recipe in recipes]
        least = min((mean(values) for values in found if values), default=None)
        return [f"**{spread(values)}**" if values and mean(values) == least else spread(values) for values in found]

    print_table(f"after {budget // 1000}k tokens", [RECIPES[recipe] for recipe in recipes], cells)


def main() -> None:
    curves = read()
    draw(curves)
    for budget in BUDGETS:
        print_budget(curves, budget)
    alone = {"converted": ("none", 0), "aligned, 16k": ("align", 16_384), "aligned, 131k": ("align", 131_072)}
    print_table(
        "alone",
        list(alone),
        lambda place: [spread(curves[place, recipe].get(tokens, [])) for recipe, tokens in alone.values()],
    )

    def ratios(place: Place) -> list[str]:
        plain, best = means(curves, place, PLAIN), means(curves, place, BEST)
        cells = []
        for budget in BUDGETS[1:]:
            found = tokens_to_reach(best, plain[budget]) if budget in plain else None
            bound = "at least " if found == min(best, default=None) else ""
            cells.append(f"{bound}{budget / found:.1f}" if found else "")
        return cells

    title = f"times as many tokens that {RECIPES[PLAIN]} training takes as {RECIPES[BEST]}, to the same KL"
    print_table(title, [f"{budget // 1000}k" for budget in BUDGETS[1:]], ratios)
    print_tasks()


if __name__ == "__main__":
    main()
