"""Layouts in vLLM on one GPU, in CUDA graphs: one rank's part of a model at TP8, with delays in place of all-reduces.

    python benchmarks/gpu_vllm.py [--model 8b] [--ranks 8] [--link nccl_nvlink_h100] [--out FILE]

vLLM serves rank 0's part: its heads, KV heads and intermediate rows, at full hidden size, at tensor-parallel size 1.
LADDERIZE_VLLM_BACKEND=emulated puts a kernel that idles for as long as an all-reduce takes on the communication stream.
Rows: dense, which waits for every delay, in the plugin's class; ladder, spd and both. A trace has to show ladder's
delays under compute. Where there are several GPUs, the whole model is timed on them as well, with vLLM's own
all-reduces, beside vLLM's own class.

Without vLLM or a GPU it says so in one line.
"""

import argparse
import importlib.util
import json
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch

from ladderize.console import Console
from ladderize.runtime.bench.options import BenchOptions
from ladderize.runtime.shards import read_shape
from ladderize.vllm.bench import bench_vllm
from ladderize.vllm.environment import BACKEND_VARIABLE

LAYOUTS = "dense,ladder,spd,spd+ladder"


def rank_shape(name: str, ranks: int) -> dict[str, Any]:
    """One rank's part of a model, as the config of a smaller one with the same hidden size."""
    config = dict(read_shape(name))
    heads, kv_heads = config["num_attention_heads"], config.get("num_key_value_heads", config["num_attention_heads"])
    for key, value in (("attention heads", heads), ("intermediate rows", config["intermediate_size"])):
        if value % ranks:
            sys.exit(f"--ranks {ranks} does not divide the {value} {key} of {name}")
    return config | {
        "head_dim": config.get("head_dim") or config["hidden_size"] // heads,
        "num_attention_heads": heads // ranks,
        "num_key_value_heads": max(1, kv_heads // ranks),
        "intermediate_size": config["intermediate_size"] // ranks,
    }


def emulated(args: argparse.Namespace, folder: Path) -> dict[str, Any]:
    shape = folder / "config.json"
    shape.write_text(json.dumps(rank_shape(args.model, args.ranks)))
    os.environ[BACKEND_VARIABLE] = f"emulated:{args.ranks}:{args.link}"
    try:
        # a rank's own part is one virtual rank
        timed = options(args, random_weights=str(shape), sync_tp_size=1, profile=folder / "traces")
        document = bench_vllm(timed, console=Console())
    finally:
        del os.environ[BACKEND_VARIABLE]
    shares = {
        f"{row.model}, batch {row.batch_size}, {phase}": overlap.share
        for row in document.rows
        for phase, overlap in (row.overlap or {}).items()
    }
    hidden = [share for name, share in shares.items() if name.startswith("ladder,")]
    print("delays under compute in the traces: " + ", ".join(f"{name} {share:.0%}" for name, share in shares.items()))
    if not hidden or min(hidden) <= 0.01:
        sys.exit("NO OVERLAP of ladder's delays in the trace: its row is not valid")
    return {"under_compute": shares, "document": document.to_dict()}


def options(args: argparse.Namespace, **more: Any) -> BenchOptions:
    batches = tuple(int(size) for size in args.batch_size.split(","))
    given = {"batch_sizes": batches, "prompt_len": args.prompt_len, "output_len": 33, "repeat": args.repeat}
    return BenchOptions(engine="vllm", layout=LAYOUTS, num_layers=args.num_layers, **given, **more)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="8b")
    parser.add_argument("--ranks", type=int, default=8)
    parser.add_argument("--link", default="nccl_nvlink_h100")
    parser.add_argument("--num-layers", type=int)
    parser.add_argument("--batch-size", default="1,8,64")
    parser.add_argument("--prompt-len", type=int, default=128)
    parser.add_argument("--repeat", type=int, default=7)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    missing = [
        words
        for words, there in (
            ("vLLM is not installed", importlib.util.find_spec("vllm") is not None),
            ("there is no GPU", torch.cuda.is_available()),
        )
        if not there
    ]
    if missing:
        print(f"vLLM part skipped: {' and '.join(missing)}")
        return
    with tempfile.TemporaryDirectory() as name:
        record: dict[str, Any] = {"schema_version": 1, "emulated": emulated(args, Path(name))}
    gpus = torch.cuda.device_count()
    ranks = max((n for n in (2, 4, 8) if n <= gpus), default=0)
    if ranks:
        given = options(args, random_weights=args.model, tp_size=ranks, baselines=("plugin",))
        record["real"] = bench_vllm(given, console=Console()).to_dict()
    if args.out:
        args.out.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
