"""`ladderize adapt` on a GPU: does it compute what the CPU does, what does it take, and is the memory what was
announced?

    python benchmarks/gpu_adapt.py [--layers 4] [--steps 8] [--out FILE]

A random checkpoint with the 8B shape and few layers: full retraining and LoRA in bfloat16, with a dense teacher, with
and without gradient checkpointing; tokens per second, and peak memory beside the announced one. Before that, steps of a
small model in float32 on the GPU and on the CPU: correctness first.
"""

import argparse
import json
import statistics
import tempfile
import time
from pathlib import Path

import numpy as np
import torch
from gpu_spd import random_checkpoint
from ladderize.adapt.retrain.options import Budget, Objective, RetrainOptions
from ladderize.adapt.retrain.run import Trackers, adapt_checkpoint, make_trainer, open_data
from ladderize.adapt.retrain.state import TrainingFolder, read_metrics
from ladderize.adapt.retrain.task import open_task

from ladderize.adapt.data_specs import parse_specs
from ladderize.console import Console
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
}
RECIPES = {"ladder": Recipe(ladder="all"), "spd": Recipe(spd="all", sync_tp_size=8)}


def make(folder: Path, config: dict, dtype: torch.dtype, device: torch.device, rows: int, tokens: int) -> None:
    random_checkpoint(folder / "dense", config, dtype, device)
    for name, recipe in RECIPES.items():
        convert_checkpoint(str(folder / "dense"), folder / name, recipe, verify=False)
    np.save(folder / "ids.npy", np.random.default_rng(0).integers(3, config["vocab_size"], (rows, tokens)))


def options_for(folder: Path, device: str, **more) -> RetrainOptions:
    return RetrainOptions(
        data=parse_specs([str(folder / "ids.npy")]),
        distill_from=str(folder / "dense"),
        objective=Objective(0.5),
        device=device,
        heldout=2,
        warmup_steps=0,
        **more,
    )


def agrees_with_the_cpu(folder: Path, device: str) -> dict[str, float]:
    """The largest relative difference of a loss in float32 between the devices, by method."""
    config = {**read_shape("8b"), **SMALL, "head_dim": 8, "vocab_size": 512, "max_position_embeddings": 256}
    make(folder, config, torch.float32, torch.device("cpu"), 200, 128)
    worst = {}
    for method in ("full", "lora"):
        losses = []
        for number, where in enumerate(("cpu", device)):
            out = folder / f"{method}-{number}"
            options = options_for(
                folder,
                where,
                method=method,
                budget=Budget(steps=6),
                batch_size=8,
                seq_len=256,
                lr=1e-3,
                dtype="float32",
            )
            adapt_checkpoint(str(folder / "ladder"), str(out), options, console=Console(True), verify=False)
            losses.append(read_metrics(out / "metrics.jsonl", "loss"))
        worst[method] = max(abs(a / b - 1) for a, b in zip(*losses, strict=True))
    return worst


def measure(folder: Path, model: str, device: torch.device, steps: int, **more) -> dict:
    """Tokens per second (median of steps, two of warm-up not counted) and memory of steps of one configuration."""
    ranks = Ranks(0, 1, device)
    options = options_for(
        folder,
        device.type,
        budget=Budget(steps=1000),
        seq_len=2048,
        batch_size=4,
        micro_batch_size=2,
        lr=1e-5,
        train="converted",
        **more,
    )
    task = open_task(str(folder / model), options, ranks, None)
    if device.type == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    stream, heldout = open_data(task.checkpoint, options, task.training)
    with stream, tempfile.TemporaryDirectory() as work, TrainingFolder(Path(work), {}) as training:
        trainer = make_trainer(
            task, ranks, stream, heldout, training, Console(True), Trackers((), Path(work), {}, ranks)
        )
        samples = [trainer.step(0.0, lambda: False)["tokens_per_s"] for _ in range(steps + 2)][2:]
        begin = time.perf_counter()
        trainer.save(stream.place())
        seconds = time.perf_counter() - begin
    peak = torch.cuda.max_memory_allocated() if device.type == "cuda" else None
    return {
        "tokens_per_s": statistics.median(samples),
        "samples": samples,
        "save_seconds": seconds,
        "peak_memory_bytes": peak,
        "announced_memory_bytes": task.demand(1).total,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--shape", default="8b")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    device = torch.device(args.device, 0) if args.device == "cuda" else torch.device(args.device)
    results = {}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "small").mkdir()
        worst = agrees_with_the_cpu(folder / "small", args.device)
        print(
            "largest relative difference of a loss to the CPU:",
            ", ".join(f"{key} {value:.1e}" for key, value in worst.items()),
            flush=True,
        )
        assert max(worst.values()) < 1e-2, "the GPU computes something else"
        config = {**read_shape(args.shape), "num_hidden_layers": args.layers, "max_position_embeddings": 2048}
        (folder / "large").mkdir()
        make(folder / "large", config, torch.bfloat16, device, 400, 2048)
        for label, model, more in (
            ("ladder, full", "ladder", {}),
            ("ladder, full, checkpointing", "ladder", {"gradient_checkpointing": True}),
            ("ladder, lora", "ladder", {"method": "lora"}),
            ("spd, full", "spd", {}),
            ("spd, lora", "spd", {"method": "lora"}),
        ):
            results[label] = found = measure(folder / "large", model, device, args.steps, **more)
            peak = f"{found['peak_memory_bytes'] / 1e9:7.2f} GB" if found["peak_memory_bytes"] else "      -"
            announced = found["announced_memory_bytes"] / 1e9
            print(
                f"{label:30} {found['tokens_per_s']:10,.0f} tokens/s  peak {peak}, announced {announced:7.2f} GB",
                flush=True,
            )
    if args.out:
        record = {
            "schema_version": 1,
            "environment": environment(Ranks(0, 1, device)).to_dict(),
            "layers": args.layers,
            "shape": args.shape,
            "relative_loss_difference_to_cpu": worst,
            "results": results,
        }
        args.out.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
