"""The true cost of every layout of a small model, which the planner's choices are judged by, and how far costs of
single sync points add up.

    fixtures=../shared/fixtures
    python benchmarks/planner_stories.py $fixtures/stories260K --data $fixtures/stories260K-samples.npz:train

Scores all 3^L 2^(L-1) layouts (3,888 of 5 layers) on the windows that ``ladderize sensitivity --samples 64`` draws, and
on as many others that ``ladderize plan --verify`` confirms on. Writes benchmarks/results/planner_stories.json:
``choose`` and ``confirm`` hold the nats per token of each layout, in the order of ``every_layout``; ``costs`` what the
changes of single sync points, and of neighbours, cost on the first windows; ``additive`` how far sums of these are off.
"""

import argparse
import itertools
import json
import time
from pathlib import Path

import numpy as np
import torch
from ladderize.convert.point_sensitivity import PointCost, point_changes, point_costs

from ladderize.adapt.layers.layout_scores import Suffixes
from ladderize.blocks import Blocks, open_checkpoint, read_windows
from ladderize.checkpoint.tensors import fingerprint
from ladderize.data import file_sha256
from ladderize.layout import ATTENTION_MODES, BLOCKING, DROPPED, MLP_MODES, Layout
from ladderize.ranks.group import Ranks
from ladderize.runtime.bench.document import environment

RESULTS = Path(__file__).parent / "results" / "planner_stories.json"


def every_layout(layers: int, sync_tp_size: int) -> list[Layout]:
    """All of them, the dense one first."""
    return [
        Layout(attention, (*mlp, BLOCKING), sync_tp_size if DROPPED in attention else None)
        for attention in itertools.product(ATTENTION_MODES, repeat=layers)
        for mlp in itertools.product(MLP_MODES, repeat=layers - 1)
    ]


def scored(suffixes: Suffixes, windows: np.ndarray, batch: int) -> np.ndarray:
    """Nats of each window under each layout: [windows, layouts]."""
    parts = []
    for start in range(0, len(windows), batch):
        begin = time.perf_counter()
        parts.append(suffixes(torch.from_numpy(windows[start : start + batch])))
        print(f"{start + len(parts[-1])} windows, the last {time.perf_counter() - begin:.0f} s", flush=True)
    return np.concatenate(parts)


def added_up(layout: Layout, costs: list[PointCost], how: str) -> float:
    """The cost of a layout as a sum. how: ``points`` sums single sync points; ``layers`` sums layers, whose two modes
    were measured together; ``alike`` adds what two neighbours that are changed alike cost more than apart; ``pairs`` of
    all neighbours."""
    table = {(cost.layers, *cost.steps): cost.nats for cost in costs}
    steps = [(layout.entering(i), layout.attention_sync[i]) for i in range(layout.num_layers)]

    def alone(layer: int, entering: str, attention: str) -> float:
        return table.get(((layer,), (entering, attention)), 0.0)

    if how == "points":
        return sum(alone(i, step[0], BLOCKING) + alone(i, BLOCKING, step[1]) for i, step in enumerate(steps))
    total = sum(alone(i, *step) for i, step in enumerate(steps))
    unlike = {(cost.layers, *cost.steps) for cost in costs if cost.before} if how == "alike" else set()
    for layer, (first, second) in enumerate(itertools.pairwise(steps) if how != "layers" else ()):
        known = ((layer, layer + 1), first, second)
        if known in table and known not in unlike:
            total += table[known] - alone(layer, *first) - alone(layer + 1, *second)
    return total


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model")
    parser.add_argument("--data", required=True)
    parser.add_argument("--sync-tp-size", type=int, default=4)
    parser.add_argument("--windows", type=int, default=64, help="to choose on, and as many to confirm on")
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--out", type=Path, default=RESULTS)
    args = parser.parse_args()
    checkpoint = open_checkpoint(args.model)
    blocks = Blocks(checkpoint, torch.float32, torch.device("cpu"))
    windows = read_windows(checkpoint, args.data, seq_len=None, samples=2 * args.windows, seed=0)
    tokens = windows.shape[1] - 1
    layouts = every_layout(blocks.num_layers, args.sync_tp_size)
    suffixes = Suffixes(blocks, layouts)
    print(f"{len(layouts):,} layouts, {suffixes.tree.layer_runs:,} layers for each batch", flush=True)
    begin = time.perf_counter()
    table = scored(suffixes, windows, args.batch)
    seconds = time.perf_counter() - begin
    means = {"choose": table[: args.windows].mean(0) / tokens, "confirm": table[args.windows :].mean(0) / tokens}

    number = {layout: index for index, layout in enumerate(layouts)}
    changes = point_changes(blocks.num_layers, dropped=True, pairs=True)
    columns = [number[change.layout(blocks.num_layers, args.sync_tp_size)] for change in changes]
    dense, costs = point_costs(changes, table[: args.windows][:, [*columns, 0]], tokens)
    increases = means["choose"] - dense
    additive = {}
    for how in ("points", "layers", "alike", "pairs"):
        sums = np.array([added_up(layout, costs, how) for layout in layouts])
        additive[how] = {
            "mean_error_nats": float(np.abs(sums - increases).mean()),
            "worst_error_nats": float(np.abs(sums - increases).max()),
            "too_low": float((sums < increases - 1e-9).mean()),
            "median_ratio": float(np.median(increases[1:] / sums[1:])),
        }
        for name, layers in (("spd", {"spd": range(5)}), ("ladder", {"ladder": range(5)})):
            ranks = args.sync_tp_size if name == "spd" else None
            index = number[Layout.from_layers(blocks.num_layers, **layers, sync_tp_size=ranks)]
            additive[how][name] = {"sum": float(sums[index]), "true": float(increases[index])}
    document = {
        "schema_version": 1,
        "model": Path(args.model).name,
        "fingerprint": fingerprint(checkpoint),
        "data": Path(args.data).name,
        "data_sha256": file_sha256(args.data),
        "seed": 0,
        "samples": args.windows,
        "seq_len": windows.shape[1],
        "sync_tp_size": args.sync_tp_size,
        "num_layers": blocks.num_layers,
        "order": "product of attention in (blocking, overlapped, dropped)^L, and mlp in (blocking, overlapped)^(L-1)",
        "seconds": seconds,
        "layer_runs": suffixes.tree.layer_runs,
        "environment": environment(Ranks(0, 1, torch.device("cpu"))).to_dict(),
        "dense_nll": dense,
        "additive": additive,
        "costs": [cost.to_dict() for cost in costs],
        **{name: [round(value, 6) for value in values.tolist()] for name, values in means.items()},
    }
    lines = json.dumps({key: value for key, value in document.items() if key not in means}, indent=1)[:-2]
    lists = ",\n".join(f' "{name}": {json.dumps(document[name])}' for name in means)
    args.out.write_text(f"{lines},\n{lists}\n}}\n")
    print(json.dumps(additive, indent=1), f"\nwrote {args.out}")


if __name__ == "__main__":
    main()
