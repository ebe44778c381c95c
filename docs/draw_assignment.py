"""Draw docs/assignment.png from benchmarks/results/assignment.json, and print its figures as a table.

python docs/draw_assignment.py        # needs matplotlib (pip install matplotlib)

benchmarks/recovery.py measures.
"""

import json
from collections import defaultdict
from collections.abc import Mapping
from pathlib import Path
from statistics import mean

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, NullFormatter

HERE = Path(__file__).resolve().parent
ROWS = HERE.parent / "benchmarks" / "results" / "assignment.json"
MODELS = {"demo": "the bundled model, 8 layers, 4 KV heads", "wide": "16 layers, 8 KV heads"}
LADDER = "ladder all"
COLOURS = {"": "#9a9a9a", "heads": "#e9a23b", "neurons": "#3b6ea5"}
ASSIGNED = {"": "as they lie", "heads": "heads assigned", "neurons": "heads and neurons assigned"}
STAGES = {  # recipe, tokens -> its name and marker
    ("none", 0): ("converted", "o"),
    ("align", 16_384): ("aligned", "s"),
    ("align+hidden", 60_000): ("60k tokens", "^"),
    ("align+hidden", 200_000): ("200k tokens", "D"),
}
Stage = tuple[str, int]
Figures = Mapping[str, Mapping[str, Mapping[Stage, list[float]]]]  # by model, layout and stage: the KL of each seed


def read() -> Figures:
    """Return the KLs; of the learning rates of a training those of the one that came out lowest with seed 0."""
    rows = json.loads(ROWS.read_text())["rows"]
    best: dict[tuple[str, str, Stage], tuple[float, float | None]] = {}
    for row in rows:
        key = (row["model"], row["layout"], (row["recipe"], row["tokens"]))
        if row["seed"] == 0:
            best[key] = min(best.get(key, (float("inf"), None)), (row["kl"], row["lr_factor"]))
    found: dict[str, dict[str, dict[Stage, list[float]]]] = defaultdict(lambda: defaultdict(lambda: defaultdict(list)))
    for row in rows:
        stage = (row["recipe"], row["tokens"])
        if row["lr_factor"] == best[row["model"], row["layout"], stage][1]:
            found[row["model"]][row["layout"]][stage].append(row["kl"])
    return found


def split(layout: str) -> tuple[str, str]:
    """Return the kind and ranks of a layout, and what is assigned."""
    *words, last = layout.split()
    return (" ".join(words), last) if last in COLOURS else (layout, "")


def title_of(kind: str) -> str:
    """Return "delayed 2" as "delayed, 2 ranks"."""
    name, ranks = kind.split()
    return name if ranks == "all" else f"{name}, {ranks} ranks"


def draw(figures: Figures) -> None:
    heights = [len({split(layout)[0] for layout in figures[model]}) for model in MODELS]
    figure = Figure(figsize=(9, 0.5 * sum(heights) + 2), layout="constrained")
    panels = figure.subplots(len(MODELS), 1, sharex=True, height_ratios=heights)
    for axes, (model, title) in zip(panels, MODELS.items(), strict=True):
        draw_model(axes, figures[model])
        axes.set_title(title, fontsize=9, loc="left")
    panels[-1].set_xlabel("KL to the dense model, nats per token", fontsize=8)
    entries = [
        *(panels[0].scatter([], [], color=colour, label=ASSIGNED[name]) for name, colour in COLOURS.items()),
        *(panels[0].scatter([], [], color="#444444", marker=mark, label=name) for name, mark in STAGES.values()),
    ]
    figure.legend(handles=entries, loc="outside lower center", ncols=4, frameon=False, fontsize=8)
    figure.savefig(HERE / "assignment.png", dpi=150)


def draw_model(axes: Axes, layouts: Mapping[str, Mapping[Stage, list[float]]]) -> None:
    kinds = list(dict.fromkeys(split(layout)[0] for layout in layouts))
    for layout, stages in layouts.items():
        kind, assigned = split(layout)
        colour = "#c8443a" if layout == LADDER else COLOURS[assigned]
        y = kinds.index(kind) + (0 if layout == LADDER else 0.25 * (list(COLOURS).index(assigned) - 1))
        values = [mean(stages[stage]) for stage in STAGES if stage in stages]
        axes.plot(values, [y] * len(values), color=colour, linewidth=1, alpha=0.5)
        for stage, (_, marker) in STAGES.items():
            if stage in stages:
                axes.scatter(mean(stages[stage]), y, color=colour, marker=marker, s=26, zorder=3)
    axes.set(xscale="log", yticks=range(len(kinds)), yticklabels=[*map(title_of, kinds)])
    axes.invert_yaxis()
    axes.xaxis.set_major_formatter(FuncFormatter(lambda kl, _: f"{kl:g}"))
    axes.xaxis.set_minor_formatter(NullFormatter())
    axes.tick_params(labelsize=8)
    axes.grid(axis="x", which="both", alpha=0.2)
    axes.spines[["top", "right"]].set_visible(False)


def shown(values: list[float]) -> str:
    """The mean, and all of the range where there are several."""
    if len(values) < 2:
        return "".join(f"{value:#.3g}" for value in values)
    return f"{mean(values):#.3g} ({min(values):#.3g} to {max(values):#.3g})"


def main() -> None:
    figures = read()
    draw(figures)
    heads = [name for name, _ in STAGES.values()]
    for model, layouts in figures.items():
        print(f"\n{MODELS[model]}\n\n| layout | assignment | {' | '.join(heads)} |\n" + "|---" * (len(heads) + 2) + "|")
        for layout, stages in layouts.items():
            kind, assigned = split(layout)
            cells = (shown(stages.get(stage, [])) for stage in STAGES)
            print(f"| {title_of(kind)} | {ASSIGNED[assigned] if layout != LADDER else ''} | {' | '.join(cells)} |")


if __name__ == "__main__":
    main()
