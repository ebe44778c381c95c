"""How good the planner's choices are, where the true cost of every layout is known.

    python benchmarks/planner_choices.py

Reads benchmarks/results/planner_stories.json (all 3,888 layouts of stories260K), takes times of layers from the time
model for several links and workloads, and chooses the fastest layout within several budgets: by estimates alone (sums
over layers), and verified with at most N measurements, which the table of true costs answers. The best is the fastest
of all layouts of named layers. Prints, and writes to benchmarks/results/planner_choices.json, how often a choice is
over budget on the windows that costs were measured on and on held-out ones, and how much of what the best saves it
saves.
"""

import argparse
import json
import math
from pathlib import Path

import numpy as np
from planner_stories import every_layout, layer_nats

from ladderize.errors import UserError
from ladderize.layout import Layout
from ladderize.plan.choice import LayerTables, choose_layout, kind_seconds
from ladderize.plan.hardware import known_engines, read_device
from ladderize.plan.passes import Serving, pass_parts, predict_pass
from ladderize.plan.rows import LayoutCost
from ladderize.runtime.collectives.links import read_interconnect
from ladderize.runtime.shards import read_shape

FOLDER = Path(__file__).parent / "results"
LINKS = ("nvlink", "nccl_pcie", "50,1.2")  # the last: 10 Gbit/s Ethernet, about
BATCHES = (1, 16)
PHASES = ("end_to_end", "prefill", "decode")
BUDGETS = (0.05, 0.1, 0.2, 0.3, 0.5, 0.8, 1.2)  # nats: one change of this small model costs 0.05 to 0.25
LIMITS = (4, 8, 16)
RANKS = 4  # and virtual ranks


class KnownCosts:
    """The costs of all layouts, looked up."""

    def __init__(self, document: dict) -> None:
        layers = document["num_layers"]
        self.number = {layout: index for index, layout in enumerate(every_layout(layers, document["sync_tp_size"]))}
        self.nll = {held_out: np.array(document[name]) for held_out, name in ((False, "choose"), (True, "confirm"))}

    def increases(self, held_out: bool) -> np.ndarray:
        return self.nll[held_out] - self.nll[held_out][0]

    def cost(self, layout: Layout, held_out: bool) -> float:
        return float(self.increases(held_out)[self.number[layout]])

    def measure(self, layout: Layout, held_out: bool) -> LayoutCost:
        return LayoutCost(self.cost(layout, held_out), None, 0)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--truth", type=Path, default=FOLDER / "planner_stories.json")
    parser.add_argument("--out", type=Path, default=FOLDER / "planner_choices.json")
    args = parser.parse_args()
    document = json.loads(args.truth.read_text())
    truth, layers, rows = KnownCosts(document), document["num_layers"], []
    nats = layer_nats(truth.number, truth.increases(False), layers, document["sync_tp_size"])
    config, device = {**read_shape("8b"), "num_hidden_layers": layers}, read_device("h100-sxm")
    named = [layout for layout in truth.number if not any("overlapped" in layout.layer_name(i) for i in range(layers))]
    for link in LINKS:
        for batch in BATCHES:
            how = (device, known_engines()[device.speeds], (read_interconnect(link),), RANKS, batch, 1024, 512)
            parts = pass_parts(Serving(config, "bfloat16", False, *how), RANKS)
            for phase in PHASES:
                counts = {"prefill": 1, "decode": 511} if phase == "end_to_end" else {phase: 1}
                constant, seconds = kind_seconds(parts, counts, layers)
                tables = LayerTables(seconds, nats, constant, document["sync_tp_size"])
                times = {
                    one: sum(count * predict_pass(parts[name], one).total for name, count in counts.items())
                    for one in named
                }
                dense = times[Layout.dense(layers)]
                for budget in BUDGETS:
                    best = dense - min(times[one] for one in named if truth.cost(one, False) <= budget)
                    if best <= 1e-9 * dense:
                        continue
                    about = {"link": link, "batch": batch, "phase": phase, "budget_nats": budget}
                    for name, limit in (("sums", None), *((f"verified, {limit}", limit) for limit in LIMITS)):
                        rows.append({**about, "how": name, **_outcome(tables, budget, truth, limit, best, dense)})
    summary = {
        how: _summary([row for row in rows if row["how"] == how]) for how in dict.fromkeys(r["how"] for r in rows)
    }
    for how, values in summary.items():
        print(f"{how:30}", "  ".join(f"{key} {value:.4g}" for key, value in values.items()))
    args.out.write_text(
        json.dumps({"schema_version": 1, "truth": args.truth.name, "summary": summary}, indent=1) + "\n"
    )


def _outcome(
    tables: LayerTables, budget: float, truth: KnownCosts, limit: int | None, best: float, dense: float
) -> dict:
    try:
        choice = choose_layout(tables, budget, truth.measure if limit else None, limit or 0)
    except UserError:
        return {"found": False}
    layout = choice.chosen.as_layout
    return {
        "found": True,
        "over": truth.cost(layout, False) > budget,
        "over_held_out": truth.cost(layout, True) > budget,
        "saved": dense * (1 - 1 / choice.chosen.speedup) / best,
        "made": sum((one.measured is not None) + (one.held_out is not None) for one in choice.measured),
        "verified": choice.chosen.held_out is not None,
    }


def _summary(rows: list[dict]) -> dict:
    found = [row for row in rows if row["found"]]
    within = [row for row in found if not row["over"]]
    return {
        "cases": len(rows),
        "refused": len(rows) - len(found),
        "over_budget": sum(row["over"] for row in found),
        "over_budget_held_out": sum(row["over_held_out"] for row in found),
        "saved_of_best": float(np.mean([row["saved"] for row in within])) if within else math.nan,
        "found_best": sum(row["saved"] > 1 - 1e-6 for row in within),
        "verified": sum(row["verified"] for row in found),
        "measurements": float(np.mean([row["made"] for row in found])) if found else 0.0,
    }


if __name__ == "__main__":
    main()
