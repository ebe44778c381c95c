"""The true cost of every layout of a small model, which the planner's choices are judged by.

    fixtures=../shared/fixtures
    python benchmarks/planner_stories.py $fixtures/stories260K --data $fixtures/stories260K-samples.npz:train

Scores all 3^L 2^(L-1) layouts (3,888 of 5 layers) on the windows that ``ladderize sensitivity --samples 64`` draws, and
on as many others that ``ladderize plan --verify`` confirms on. Writes benchmarks/results/planner_stories.json:
``choose`` and ``confirm`` hold the nats per token of each layout, in the order of ``every_layout``.
"""

import argparse
import itertools
import json
import time
from pathlib import Path

import numpy as np
import torch

from ladderize.adapt.layers.sensitivity import LayoutScores, first_changed
from ladderize.blocks import Blocks, read_windows
from ladderize.checkpoint.opening import open_checkpoint
from ladderize.checkpoint.tensors import fingerprint
from ladderize.data.files import file_sha256
from ladderize.layout import BLOCKING, DROPPED, OVERLAPPED, Layout
from ladderize.plan.choice import KINDS
from ladderize.ranks.group import Ranks
from ladderize.runtime.bench.document import environment

RESULTS = Path(__file__).parent / "results" / "planner_stories.json"


def every_layout(layers: int, sync_tp_size: int) -> list[Layout]:
    """All of these modes, the dense one first."""
    return [
        Layout(attention, (*mlp, BLOCKING), sync_tp_size if DROPPED in attention else None)
        for attention in itertools.product((BLOCKING, OVERLAPPED, DROPPED), repeat=layers)
        for mlp in itertools.product((BLOCKING, OVERLAPPED), repeat=layers - 1)
    ]


def scored(blocks: Blocks, layouts: list[Layout], windows: np.ndarray) -> np.ndarray:
    """Nats of each window under each layout: [windows, layouts]."""
    score = LayoutScores(blocks, windows, Ranks(0, 1, blocks.device))
    rows = {layout: score(layout) for layout in sorted(layouts, key=first_changed)}
    return np.array([rows[layout] for layout in layouts]).T


def layer_nats(number: dict[Layout, int], increases: np.ndarray, layers: int, sync_tp_size: int) -> np.ndarray:
    """Return what each layer costs alone as each kind, [L, kinds]; inf for the first as spd+ladder, which is spd, and
    for delayed, which ``every_layout`` leaves out."""
    nats = np.full((layers, len(KINDS)), np.inf)
    nats[:, 0] = 0.0
    for layer, row in enumerate(nats):
        for name in ("ladder", "spd", "spd+ladder"):
            named = {kind: [layer] for kind in name.split("+")}
            layout = Layout.from_layers(layers, **named, sync_tp_size=sync_tp_size if "spd" in named else None)
            row[KINDS.index(name)] = max(0.0, increases[number[layout]])
    nats[0, -1] = np.inf
    return nats


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model")
    parser.add_argument("--data", required=True)
    parser.add_argument("--sync-tp-size", type=int, default=4)
    parser.add_argument("--windows", type=int, default=64, help="to choose on, and as many to confirm on")
    parser.add_argument("--out", type=Path, default=RESULTS)
    args = parser.parse_args()
    checkpoint = open_checkpoint(args.model)
    blocks = Blocks(checkpoint, torch.float32, torch.device("cpu"))
    windows = read_windows(checkpoint, args.data, seq_len=None, seed=0)[: 2 * args.windows]
    tokens = windows.shape[1] - 1
    layouts = every_layout(blocks.num_layers, args.sync_tp_size)
    print(f"{len(layouts):,} layouts", flush=True)
    begin = time.perf_counter()
    table = scored(blocks, layouts, windows)
    seconds = time.perf_counter() - begin
    means = {"choose": table[: args.windows].mean(0) / tokens, "confirm": table[args.windows :].mean(0) / tokens}

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
        "environment": environment(Ranks(0, 1, torch.device("cpu"))).to_dict(),
        "dense_nll": float(means["choose"][0]),
        **{name: [round(value, 6) for value in values.tolist()] for name, values in means.items()},
    }
    lines = json.dumps({key: value for key, value in document.items() if key not in means}, indent=1)[:-2]
    lists = ",\n".join(f' "{name}": {json.dumps(document[name])}' for name in means)
    args.out.write_text(f"{lines},\n{lists}\n}}\n")
    print(f"wrote {args.out}")


if __name__ == "__main__":
    main()
