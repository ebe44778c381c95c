"""What alignment changes in a sensitivity, what it takes, and whether layouts that are chosen by it are better.

    stories=../shared/fixtures/stories260K
    python benchmarks/aligned_sensitivity.py stories $stories --data $stories-samples.npz:train
    python benchmarks/aligned_sensitivity.py demo ladderize/demo/model --data train.jsonl --seq-len 128

Of the sweeps over spd and ladder blocks, on the first 64 windows that are drawn: the perplexity of every column as it
is, as aligned (on each of --tokens), and by a shortcut: the layers of the model whose blocks are all changed, aligned
once and used in every column. Then, for each number of blocks, those with the least sensitivity by the one and by the
other table are aligned and scored on 64 further windows. Seconds are those of one core. Adds to
benchmarks/results/aligned_sensitivity.json under the given name.
"""

import argparse
import json
import math
import time
from pathlib import Path

import numpy as np
import torch

from ladderize.adapt.layers.align import LayerAlignment
from ladderize.adapt.layers.sensitivity import LayerwiseScores, LayoutScores, open_streams
from ladderize.adapt.layers.windows import Windows
from ladderize.blocks import Blocks, read_windows, window_nlls
from ladderize.checkpoint.config import stored_dtype
from ladderize.checkpoint.opening import open_checkpoint
from ladderize.layout import Layout
from ladderize.ranks.group import Ranks
from ladderize.runtime.bench.document import environment

RESULTS = Path(__file__).parent / "results" / "aligned_sensitivity.json"
SCORED = 64
BATCH = 16


def perplexity(nll: np.ndarray, tokens: int) -> float:
    return round(math.exp(nll.mean() / (tokens - 1)), 4)


def by_shortcut(aligned: LayerwiseScores, layouts: list[Layout], scored: torch.Tensor) -> list[float]:
    """Of every column, with the layers of the first one's alignment."""
    blocks, weights = aligned.blocks, []
    streams = open_streams(blocks, aligned.windows, 1)
    for index in range(blocks.num_layers):
        stored = blocks.weights(index, as_stored=True)
        weights.append(LayerAlignment(streams, index, layouts[0], stored, stored).run(solve=True)[0])
    found = []
    for first, layout in enumerate(layouts):
        nll = window_nlls(
            blocks,
            lambda i, layout=layout, first=first: blocks.layer(i, layout, weights[i] if i >= first else None),
            scored,
            batch_size=BATCH,
        )
        found.append(perplexity(nll.numpy(), scored.shape[1]))
    return found


def least(perplexities: list[float], mode: str, count: int) -> list[int]:
    order = np.argsort(-np.diff(np.array(perplexities)), kind="stable")
    return sorted(order[:count].tolist())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("name")
    parser.add_argument("model")
    parser.add_argument("--data", required=True)
    parser.add_argument("--seq-len", type=int)
    parser.add_argument("--sync-tp-size", type=int, default=4)
    parser.add_argument("--tokens", type=int, nargs="+", default=[4096, 16384, 131072])
    args = parser.parse_args()
    torch.set_num_threads(1)
    checkpoint = open_checkpoint(args.model)
    blocks = Blocks(checkpoint, getattr(torch, stored_dtype(checkpoint)), torch.device("cpu"))
    layers = blocks.num_layers
    drawn = torch.from_numpy(read_windows(checkpoint, args.data, seq_len=args.seq_len, seed=0))
    scored, confirm, rest = drawn[:SCORED], drawn[SCORED : 2 * SCORED], drawn[2 * SCORED :]
    tokens = drawn.shape[1]
    modes = {}
    for mode, ranks in (("spd", args.sync_tp_size), ("ladder", None)):
        layouts = [
            Layout.from_layers(layers, **{mode: range(first, layers)}, sync_tp_size=ranks) for first in range(layers)
        ]
        layouts.append(Layout.dense(layers))
        begin = time.process_time()
        score = LayoutScores(blocks, scored.numpy(), Ranks(0, 1, torch.device("cpu")))
        table = np.array([score(layout) for layout in layouts]).T
        plain = {
            "perplexity": [perplexity(column, tokens) for column in table.T],
            "seconds": round(time.process_time() - begin, 1),
        }
        found = {"as it is": plain, "aligned": {}, "shortcut": {}, "chosen": []}
        for asked in args.tokens:
            count = asked // tokens
            own = Windows(rest[:count], rest[count : count + max(8, count // 8)])
            aligned = LayerwiseScores(blocks, own)
            begin = time.process_time()
            columns = [perplexity(aligned(layout, scored), tokens) for layout in layouts]
            seconds = round(time.process_time() - begin, 1)
            found["aligned"][str(asked)] = {"perplexity": columns, "seconds": seconds}
            found["shortcut"][str(asked)] = by_shortcut(aligned, layouts, scored)
            print(mode, asked, columns, found["shortcut"][str(asked)], f"{seconds} s", flush=True)
        for count in range(1, layers):
            chosen = [least(one, mode, count) for one in (plain["perplexity"], columns)]
            if chosen[0] != chosen[1]:
                made = [Layout.from_layers(layers, **{mode: blocks_of}, sync_tp_size=ranks) for blocks_of in chosen]
                after = [perplexity(aligned(layout, confirm), tokens) for layout in made]
                found["chosen"].append(
                    {"by sensitivity as it is": chosen[0], "aligned": chosen[1], "perplexity": after}
                )
                print(mode, found["chosen"][-1], flush=True)
        modes[mode] = found
    known = json.loads(RESULTS.read_text()) if RESULTS.is_file() else {}
    known["environment"] = environment(Ranks(0, 1, torch.device("cpu"))).to_dict()
    known[args.name] = {"model": args.model, "sync_tp_size": args.sync_tp_size, "seq_len": tokens, "modes": modes}
    RESULTS.write_text(json.dumps(known, indent=1) + "\n")


if __name__ == "__main__":
    main()
