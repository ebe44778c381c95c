"""How good the planner's choices are, where the true cost of every layout is known.

    python benchmarks/planner_choices.py

Reads benchmarks/results/planner_stories.json (all 3,888 layouts of stories260K), takes times of layers from the time
model for several links and workloads, and chooses the fastest layout within several budgets: by estimates alone (sums
over layers, with and without pairs of neighbours), and verified with at most N measurements, which the table of true
costs answers. Prints, and writes to benchmarks/results/planner_choices.json, how often a choice is over budget on the
windows that costs were measured on and on held-out ones, and how much of what the best layout saves a choice saves.
"""

import argparse
import json
import math
from dataclasses import replace
from pathlib import Path

import numpy as np
from ladderize.convert.point_sensitivity import PointCost, PointSensitivity
from ladderize.plan.costs import estimate_costs
from ladderize.plan.layout_space import LayoutSpace, choose_point, chosen_options, option_seconds
from ladderize.plan.search import verified_choice
from planner_stories import every_layout

from ladderize.convert.sensitivity_file import CalibrationData
from ladderize.errors import UserError
from ladderize.layout import Layout
from ladderize.plan.document import LayoutNll
from ladderize.plan.hardware import known_engines, read_device
from ladderize.plan.options import ChoiceTarget
from ladderize.plan.passes import Workload, pass_parts, point_seconds
from ladderize.runtime.collectives.links import read_interconnect
from ladderize.runtime.shards import read_shape

FOLDER = Path(__file__).parent / "results"
LINKS = ("nvlink", "nccl_pcie", "50,1.2")  # the last: 10 Gbit/s Ethernet, about
BATCHES = (1, 16)
PHASES = ("end_to_end", "prefill", "decode")
BUDGETS = (0.05, 0.1, 0.2, 0.3, 0.5, 0.8, 1.2)  # nats: one change of this small model costs 0.05 to 0.25
LIMITS = (3, 4, 8, 12, 16, 20)
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

    def measure(self, layout: Layout, held_out: bool) -> LayoutNll:
        return LayoutNll(0.0, None, self.cost(layout, held_out), None, 0)


def sensitivity_of(document: dict) -> PointSensitivity:
    return PointSensitivity(
        model=document["model"],
        fingerprint=document["fingerprint"],
        layout="dense",
        parameters=0,
        data=CalibrationData(document["data"], document["data_sha256"], document["samples"], document["seq_len"], 0),
        mode="points",
        sync_tp_size=document["sync_tp_size"],
        dtype="float32",
        complete=True,
        num_layers=document["num_layers"],
        pairs=True,
        interval=0.95,
        dense_nll=document["dense_nll"],
        costs=[PointCost.from_dict(cost, "costs") for cost in document["costs"]],
        nll=[],
    )


def timed(link: str, batch: int, phase: str, layers: int) -> tuple[float, np.ndarray]:
    """Of an 8B Llama's layers on H100s: the constant, and the seconds of a layer's options."""
    config = {**read_shape("8b"), "num_hidden_layers": layers}
    device = read_device("h100-sxm")
    parts = pass_parts(
        config,
        device,
        known_engines()[device.engine],
        read_interconnect(link),
        RANKS,
        "bfloat16",
        Workload(batch, 1024, 512),
        RANKS,
    )
    return option_seconds({name: point_seconds(one) for name, one in parts.items()}, 511, phase)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--truth", type=Path, default=FOLDER / "planner_stories.json")
    parser.add_argument("--out", type=Path, default=FOLDER / "planner_choices.json")
    args = parser.parse_args()
    document = json.loads(args.truth.read_text())
    truth, sensitivity = KnownCosts(document), sensitivity_of(document)
    layers = document["num_layers"]
    with_pairs = estimate_costs(sensitivity, "s.json")
    without = replace(with_pairs, pairs=np.zeros_like(with_pairs.pairs))
    rows = []
    for link in LINKS:
        for batch in BATCHES:
            for phase in PHASES:
                constant, layer = timed(link, batch, phase, layers)
                every = np.array([layer[chosen_options(layout)].sum() for layout in truth.number])
                for budget in BUDGETS:
                    within = truth.increases(False) <= budget
                    dense = layers * layer[0]
                    best = dense - every[within].min()
                    if best <= 1e-9 * dense:
                        continue
                    about = {"link": link, "batch": batch, "phase": phase, "budget_nats": budget}
                    for how, costs, limit in (
                        ("sums", without, None),
                        ("sums and pairs", with_pairs, None),
                        *((f"verified, {limit}", with_pairs, limit) for limit in LIMITS),
                        *((f"verified without pairs, {limit}", without, limit) for limit in LIMITS),
                    ):
                        seconds = np.tile(layer, (layers, 1))
                        space = LayoutSpace(seconds, costs.nats, costs.pairs, constant, document["sync_tp_size"])
                        rows.append({**about, "how": how, **_outcome(space, budget, truth, limit, best)})
    summary = {
        how: _summary([row for row in rows if row["how"] == how]) for how in dict.fromkeys(r["how"] for r in rows)
    }
    for how, values in summary.items():
        print(f"{how:30}", "  ".join(f"{key} {value:.4g}" for key, value in values.items()))
    args.out.write_text(
        json.dumps({"schema_version": 1, "truth": args.truth.name, "summary": summary}, indent=1) + "\n"
    )


def _outcome(space: LayoutSpace, budget: float, truth: KnownCosts, limit: int | None, best: float) -> dict:
    front = space.front()
    target = ChoiceTarget(max_ppl_increase=f"{100 * math.expm1(budget):.2f}%", max_nats=budget)
    made, verified = 0, False
    try:
        chosen = space.described(front[choose_point(space.speedups(front), space.totals(front)[1], target)])
        if limit is not None:
            chosen, check = verified_choice(space, front, target, truth, limit)
            made, verified = check.made, check.verified
    except UserError:
        return {"found": False}
    layout = chosen.as_layout
    return {
        "found": True,
        "over": truth.cost(layout, False) > budget,
        "over_held_out": truth.cost(layout, True) > budget,
        "saved": float((space.totals(space.dense)[0] - chosen.ms / 1000) / best),
        "made": made,
        "verified": verified,
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
