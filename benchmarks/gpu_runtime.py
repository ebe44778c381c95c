"""The runtime on one GPU: an 8B at TP1 against the memory's bandwidth, and one shard of a 70B at emulated TP8.

    python benchmarks/gpu_runtime.py whole|shard [--out FILE] [--model 8b --shard 70b]

The delay of the emulated all-reduces is set, for each batch size, so that dense against no-communication decodes as
published by the authors of Ladder Residual for TP8 with NVLink (ladder_70b_nvlink_phases.csv: 1024 + 512 tokens, fp16,
H100). What is then compared is the share of the exposed communication that each layout recovers, (dense - layout) /
(dense - no communication).
"""

import argparse
import dataclasses
import functools
import gc
import json
import statistics
import time
from pathlib import Path

import torch

from ladderize.console import Console
from ladderize.ranks.group import Ranks
from ladderize.runtime.bench.document import BenchDocument, environment
from ladderize.runtime.bench.inference import bench as timed
from ladderize.runtime.bench.options import BenchOptions
from ladderize.runtime.bench.rounds import synchronize
from ladderize.runtime.shards import Shape, read_shape, weight_bytes

# Seconds of 511 decode steps at tp_size 8: batch -> dense, ladder, no communication
# (github.com/mayank31398/ladder-residual-inference, branch pp, logs/final)
PUBLISHED = {1: (6.709, 5.019, 4.659), 4: (7.814, 5.913, 5.513), 16: (8.836, 7.381, 6.566)}


def bandwidth(device: torch.device) -> float:
    """Bytes per second of reading a tensor that fits no cache."""
    x = torch.empty(4 << (30 if device.type == "cuda" else 26), dtype=torch.uint8, device=device).view(torch.int64)
    samples = []
    for _ in range(7):
        synchronize(device)
        begin = time.perf_counter()
        for _ in range(5):
            x.sum()
        synchronize(device)
        samples.append(5 * x.nbytes / (time.perf_counter() - begin))
    return statistics.median(samples[2:])


def bench(options: BenchOptions) -> BenchDocument:
    document = timed(options, console=Console(quiet=True))
    gc.collect()
    torch.cuda.empty_cache()
    return document


def whole(args: argparse.Namespace) -> tuple[BenchDocument, str]:
    """Return the document of the whole model at TP1, and a line on it."""
    rate = bandwidth(torch.device(args.device))
    options = BenchOptions(
        random_weights=args.model,
        layout="dense,ladder,spd+ladder",
        sync_tp_size=8,
        dtype="bfloat16",
        device=args.device,
        prompt_len=args.prompt_len or 128,
        output_len=args.output_len,
        warmup=1,
        repeat=5,
    )
    document = bench(options)
    dense, ladder, both = document.rows
    shape = Shape.from_config(read_shape(args.model), tp_size=1, rank=0)
    limit = weight_bytes(shape, 2, packed=False) / rate * 1e3
    step = dense.ms["decode"]
    return document, (
        f"{args.model} bf16, TP1, batch 1: {step:.3f} ms per token,"
        f" {limit / step:.1%} of the bandwidth limit ({rate / 1e12:.2f} TB/s); ladder"
        f" {ladder.ms['decode'] / step:.4f}x of dense, spd 8 + ladder {both.ms['decode'] / step:.4f}x"
    )


def shard(args: argparse.Namespace, batch: int) -> tuple[BenchDocument, str]:
    """Return the document of one rank's part at emulated TP8, and a line on it."""
    dense_s, ladder_s, free_s = PUBLISHED[batch]
    guess = 0.025
    options = BenchOptions(
        random_weights=args.shard,
        layout="dense",
        dtype="bfloat16",
        device=args.device,
        emulate_tp=8,
        link=f"{guess * 1e3},1e6",
        batch_sizes=(batch,),
        prompt_len=args.prompt_len or 1024,
        output_len=args.output_len,
        warmup=1,
        repeat=2,
        replicate_vocab=True,
    )
    first = bench(options).rows[0].communication["decode"]
    wanted = first.no_communication_ms * (dense_s / free_s - 1)
    delay = max(0.0, guess + (wanted - first.exposed_ms) / first.all_reduces)
    link = f"{delay * 1e3:.3f},1e6"
    document = bench(dataclasses.replace(options, layout="dense,ladder,spd,spd+ladder", repeat=3, link=link))
    dense = document.rows[0]
    free = dense.communication["decode"].no_communication_ms
    step = dense.ms["decode"]
    shares = {row.model: (step - row.ms["decode"]) / (step - free) for row in document.rows[1:]}
    return document, (
        f"{args.shard} shard, emulated TP8, batch {batch}, {delay * 1e3:.1f} us: dense {step:.3f}"
        f" ms, without communication {free:.3f}; recovered: "
        + ", ".join(f"{name} {share:.2f}" for name, share in shares.items())
        + f" (ladder published: {(dense_s - ladder_s) / (dense_s - free_s):.2f})"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("part", choices=("whole", "shard"))
    parser.add_argument("--out", type=Path)
    parser.add_argument("--model", default="8b")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--shard", default="70b")
    parser.add_argument("--batch-sizes", default="1,4,16")
    parser.add_argument("--prompt-len", type=int, help="default: 128 of the whole model, 1024 of a shard")
    parser.add_argument("--output-len", type=int, default=65)
    args = parser.parse_args()
    record = {
        "schema_version": 1,
        "environment": environment(Ranks(0, 1, torch.device(args.device))).to_dict(),
        "published_decode_s": PUBLISHED,
        "summary": [],
    }
    measurements = {
        "whole": {"whole": whole},
        "shard": {
            f"shard_batch_{size}": functools.partial(shard, batch=int(size)) for size in args.batch_sizes.split(",")
        },
    }
    for name, measure in measurements[args.part].items():
        document, line = measure(args)
        print(line, flush=True)
        record[name] = document.to_dict()
        record["summary"].append(line)
        if args.out:  # after every measurement: whoever stops this script for time keeps what there is
            args.out.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
