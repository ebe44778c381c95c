"""`ladderize adapt` on a GPU: does it compute what the CPU does, what does it take, and is the memory what was
announced?

    python benchmarks/gpu_adapt.py [--layers 4] [--steps 8] [--out FILE]
    python benchmarks/gpu_adapt.py --device cpu --shape tiny --seq-len 64

A random checkpoint with the 8B shape and few layers: full retraining and LoRA in bfloat16, with a dense teacher, with
and without gradient checkpointing; tokens per second, and peak memory beside the announced one. Before that, steps of a
small model in float32 on the GPU and on the CPU, and steps that go on from a saved state: correctness first. Rows are
made here, so that no ``datasets`` is needed.
"""

import argparse
import gc
import json
import statistics
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from gpu_spd import random_checkpoint

from ladderize.adapt.options import AdaptOptions
from ladderize.adapt.train.loop import Loop, TrainingFolder, micro_batches
from ladderize.adapt.train.run import make_model, open_accelerator, reset_accelerate
from ladderize.adapt.train.task import Launch, Task, estimate, open_task
from ladderize.console import SILENT
from ladderize.convert.pipeline import convert_checkpoint
from ladderize.convert.recipe import Recipe
from ladderize.ranks.group import Ranks
from ladderize.runtime.bench.document import environment
from ladderize.runtime.shards import read_shape

SMALL = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "num_hidden_layers": 3,
    "head_dim": 8,
    "vocab_size": 512,
}
RECIPES = {"ladder": Recipe(ladder="all"), "spd": Recipe(spd="all", sync_tp_size=8)}
Rows = list[dict[str, list[int]]]


def make_models(folder: Path, config: dict[str, Any], dtype: torch.dtype, device: torch.device) -> None:
    random_checkpoint(folder / "dense", config, dtype, device)
    for name, recipe in RECIPES.items():
        convert_checkpoint(str(folder / "dense"), folder / name, recipe, verify=False)


def packed_rows(count: int, tokens: int, vocab: int) -> Rows:
    """Return rows as packing makes them, of two examples each: random ids, of which all but the first are targets."""
    found = []
    for ids in np.random.default_rng(0).integers(3, vocab, (count, tokens)):
        targets = np.append(ids[1:], -100)
        targets[tokens // 3 - 1] = -100  # the last of the first example
        lengths = [tokens // 3, tokens - tokens // 3]
        found.append({"input_ids": ids.tolist(), "targets": targets.tolist(), "lengths": lengths})
    return found


def options_for(folder: Path, model: str, device: str, **more: Any) -> AdaptOptions:
    given = {"distill_weight": 0.5, "warmup_steps": 0, "max_steps": 1000} | more
    paths = {"model": str(folder / model), "out": str(folder / "out"), "distill_from": str(folder / "dense")}
    return AdaptOptions(data=("rows.npy",), device=device, **paths, **given)


@contextmanager
def open_loop(options: AdaptOptions, rows: Any, work: Path) -> Iterator[tuple[Task, Loop]]:
    """Yield the training of a model on rows, before its first step, as ``adapt`` makes it on one process."""
    device = torch.device(options.device, 0) if options.device == "cuda" else torch.device(options.device)
    task = open_task(options, Launch())
    reset_accelerate()
    accelerator = open_accelerator(options, "bf16" if task.compute == torch.bfloat16 else None)
    trained = make_model(task, accelerator, Ranks(0, 1, device), SILENT)
    folder = TrainingFolder(work, "adapt", {})  # not as a context, whose end removes it: a later one goes on
    try:
        yield task, Loop(trained, rows, list(rows[:2]), task.pace, folder, SILENT)
    finally:
        folder.unlock()
        reset_accelerate()


def losses(loop: Loop, count: int, first: int = 0) -> list[float]:
    batches = micro_batches(loop.rows, loop.pace, loop.model, first * loop.pace.batch_size)
    return [loop.step(batches, 0.0)["loss"] for _ in range(count)]


def agrees(folder: Path, device: str) -> dict[str, float]:
    """Return the largest relative differences of a loss in float32: to the CPU, and of steps that go on from a state,
    by method."""
    config = {**read_shape("8b"), **SMALL, "max_position_embeddings": 256}
    make_models(folder, config, torch.float32, torch.device("cpu"))
    rows, worst = packed_rows(64, 128, config["vocab_size"]), {}
    for method in ("full", "lora"):
        found = []
        for where in ("cpu", device):
            more = {"method": method, "batch_size": 8, "micro_batch_size": 4, "seq_len": 128, "dtype": "float32"}
            options, work = options_for(folder, "ladder", where, lr=1e-3, **more), folder / f"{method}-{len(found)}"
            with open_loop(options, rows, work) as (_, loop):
                first = losses(loop, 3)
                loop.folder.save(loop.progress, loop.model)
                found.append([*first, *losses(loop, 3, first=3)])
        with open_loop(options, rows, work) as (_, loop):
            loop.progress = loop.folder.load(3, loop.model)
            resumed = losses(loop, 3, first=3)
        worst[method] = max(abs(a / b - 1) for a, b in zip(*found, strict=True))
        worst[f"{method}, resumed"] = max(abs(a / b - 1) for a, b in zip(resumed, found[1][3:], strict=True))
    return worst


def measure(folder: Path, model: str, rows: Rows, device: str, steps: int, **more: Any) -> dict[str, Any]:
    """Return tokens per second (median of steps, two of warm-up not counted) and memory of one configuration."""
    seq_len = len(rows[0]["input_ids"])
    options = options_for(folder, model, device, seq_len=seq_len, batch_size=4, micro_batch_size=2, lr=1e-5, **more)
    gc.collect()  # the last model is part of cycles, and its memory would count as this one's
    if device == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    with tempfile.TemporaryDirectory() as work, open_loop(options, rows, Path(work)) as (task, loop):
        batches = micro_batches(rows, task.pace, loop.model, 0)
        samples = [loop.step(batches, 0.0)["tokens_per_s"] for _ in range(steps + 2)][2:]
        begin = time.perf_counter()
        loop.folder.save(loop.progress, loop.model)
        seconds = time.perf_counter() - begin
    return {
        "tokens_per_s": statistics.median(samples),
        "samples": samples,
        "save_seconds": seconds,
        "peak_memory_bytes": torch.cuda.max_memory_allocated() if device == "cuda" else None,
        "announced_memory_bytes": estimate(task)["memory_bytes"],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--seq-len", type=int, default=2048)
    parser.add_argument("--shape", default="8b", help="tiny: the one that is compared with the CPU's")
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    results: dict[str, Any] = {}
    record = {
        "schema_version": 1,
        "environment": environment(Ranks(0, 1, torch.device(args.device))).to_dict(),
        "options": {key: str(value) for key, value in vars(args).items()},
        "results": results,
    }
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        worst = agrees(folder / "small", args.device)
        print("largest relative difference of a loss:", ", ".join(f"{key} {value:.1e}" for key, value in worst.items()))
        record["relative_loss_differences"] = worst
        assert max(worst.values()) < 1e-2, "the GPU, or what goes on from a state, computes something else"
        shape = {**read_shape("8b"), **SMALL} if args.shape == "tiny" else read_shape(args.shape)
        config = {**shape, "num_hidden_layers": args.layers, "max_position_embeddings": args.seq_len}
        make_models(folder / "large", config, torch.bfloat16, torch.device(args.device))
        rows = packed_rows(32, args.seq_len, config["vocab_size"])
        for label, model, more in (
            ("ladder, full", "ladder", {}),
            ("ladder, full, checkpointing", "ladder", {"gradient_checkpointing": True}),
            ("ladder, lora", "ladder", {"method": "lora"}),
            ("spd, full", "spd", {}),
            ("spd, lora", "spd", {"method": "lora"}),
        ):
            results[label] = found = measure(folder / "large", model, rows, args.device, args.steps, **more)
            peak, announced = (found[f"{key}_memory_bytes"] for key in ("peak", "announced"))
            shown = f"{peak / 1e9:7.2f} GB" if peak else "      -"
            print(
                f"{label:30} {found['tokens_per_s']:10,.0f} tokens/s  peak {shown}, announced {announced / 1e9:.2f} GB",
                flush=True,
            )
            if args.out:  # after every measurement: whoever stops this script for time keeps what there is
                args.out.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
