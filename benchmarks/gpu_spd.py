"""Sync-Point Drop on a GPU: does an 8B model's recipe fit 24 GB, what does it take, and does the GPU compute what the
CPU does?

    python benchmarks/gpu_spd.py [--layers 4] [--windows 24] [--out FILE]

A random checkpoint with the 8B shape and few layers (all that is done scales with them): sensitivity, grouping,
alignment and distillation of every block in bfloat16, each with its peak memory and time, and what 32 layers take.
"""

import argparse
import json
import tempfile
import time
from pathlib import Path
from unittest import mock

import numpy as np
import torch

from ladderize.adapt.layers.align import align
from ladderize.adapt.layers.assign import assign_layers
from ladderize.adapt.layers.distill import BlockReport, distill
from ladderize.adapt.layers.layer_files import LayerFiles, LayerJob
from ladderize.adapt.layers.options import AlignOptions, BlockwiseOptions
from ladderize.adapt.layers.sensitivity import LayoutScores
from ladderize.adapt.layers.windows import Windows
from ladderize.blocks import Blocks
from ladderize.checkpoint.opening import open_checkpoint
from ladderize.console import Console
from ladderize.convert.sensitivity_file import layer_changes
from ladderize.layout import Layout
from ladderize.memory import peak_bytes
from ladderize.ranks.group import Ranks
from ladderize.runtime.bench.document import environment
from ladderize.runtime.bench.rounds import synchronize
from ladderize.runtime.shards import known_shapes, read_shape

RANKS = 8
CPU = torch.device("cpu")


def random_checkpoint(folder: Path, config: dict, dtype: torch.dtype, device: torch.device) -> str:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    with device:
        model = LlamaForCausalLM._from_config(LlamaConfig(**config), dtype=dtype)
    model.save_pretrained(folder)
    return str(folder)


def measured(name: str, call, results: dict, device: torch.device):
    """Time, and the peak of the device's memory (of a CPU: the process's own so far)."""
    if device.type == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    begin = time.perf_counter()
    value = call()
    synchronize(device)
    peak = peak_bytes(device) or 0
    results[name] = {"seconds": time.perf_counter() - begin, "peak_memory_bytes": peak}
    print(f"{name:40} {results[name]['seconds']:8.1f} s  {peak / 1e9:6.2f} GB", flush=True)
    return value


def agrees_with_the_cpu(folder: Path, device: torch.device) -> tuple[float, float]:
    """The largest relative differences between the two devices, in float32: of a sensitivity table, and of the weights
    of aligned layers."""
    config = {
        **known_shapes()["1b"],
        "num_hidden_layers": 3,
        "hidden_size": 256,
        "intermediate_size": 512,
        "vocab_size": 1024,
    }
    config |= {"num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 16}
    checkpoint = open_checkpoint(random_checkpoint(folder, config, torch.float32, device))
    ids = torch.randint(0, 1024, (20, 64), generator=torch.Generator().manual_seed(1))
    layouts = [change.layout for change in layer_changes("sweep", 3, RANKS)]
    cpu, gpu = (table_of(Blocks(checkpoint, torch.float32, where), layouts, ids) for where in (CPU, device))
    places = (("reference", CPU), ("device", device))
    solved = [aligned(Blocks(checkpoint, torch.float32, where), ids, folder / name) for name, where in places]
    differences = [float((one - other).abs().max() / one.abs().max()) for one, other in zip(*solved, strict=True)]
    return float(np.abs(cpu - gpu).max() / np.abs(cpu).max()), max(differences)


def aligned(blocks: Blocks, ids: torch.Tensor, folder: Path) -> list[torch.Tensor]:
    """The weights of every layer, aligned for the layout that is ladder and spd."""
    layers = range(blocks.num_layers)
    layout = Layout.from_layers(blocks.num_layers, ladder=layers, spd=layers, sync_tp_size=RANKS)
    job = job_of(blocks, layout, Windows(ids[:16], ids[16:]), folder)
    align(job, AlignOptions("a.npy"))
    return [tensor for layer in layers for tensor in job.files.weights(layer).values()]


def table_of(blocks: Blocks, layouts: list[Layout], ids: torch.Tensor) -> np.ndarray:
    """Nats of each window under each layout: [layouts, windows]."""
    score = LayoutScores(blocks, ids.numpy(), Ranks(0, 1, blocks.device))
    return np.array([score(layout) for layout in layouts])


def job_of(blocks: Blocks, layout: Layout, windows: Windows, folder: Path) -> LayerJob:
    """To rewrite every layer."""
    folder.mkdir(parents=True)
    layers, weights = tuple(range(layout.num_layers)), blocks.weights
    ranks, files = Ranks(0, 1, blocks.device), LayerFiles(folder)
    return LayerJob(blocks, blocks, layout, layers, weights, weights, windows, ranks, files, Console())


@mock.patch("ladderize.adapt.layers.align.RIDGES", (1e-2,))  # rounding decides how many others are tried
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--windows", type=int, default=24)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--shape", default="8b", help="a bundled size or a config.json")
    parser.add_argument("--tokens", type=int, default=2048)
    parser.add_argument("--device", default="cuda")
    args = parser.parse_args()
    device, results = torch.device(args.device), {}
    surroundings = environment(Ranks(0, 1, device)).to_dict()
    said = {key: str(value) for key, value in vars(args).items()}

    def save() -> None:
        """After every measurement: whoever stops this script for time keeps what there is."""
        if args.out:
            record = {"schema_version": 1, "environment": surroundings, "arguments": said, **results}
            args.out.write_text(json.dumps(record, indent=1) + "\n")

    config = {**read_shape(args.shape), "num_hidden_layers": args.layers}
    layers = range(args.layers)
    with tempfile.TemporaryDirectory() as folder:
        table, weights = agrees_with_the_cpu(Path(folder) / "small", device)
        print(f"sensitivity table in float32, {device} against the CPU: {table:.1e} (must be below 1e-4)", flush=True)
        print(f"aligned weights in float32, {device} against the CPU: {weights:.1e} (must be below 1e-3)", flush=True)
        assert table < 1e-4
        assert weights < 1e-3
        checkpoint = open_checkpoint(random_checkpoint(Path(folder) / "large", config, torch.bfloat16, device))
        blocks = Blocks(checkpoint, torch.bfloat16, device)
        ids = torch.randint(
            0, config["vocab_size"], (args.windows + 4, args.tokens), generator=torch.Generator().manual_seed(0)
        )
        windows = Windows(ids[: args.windows], ids[args.windows :])
        results["float32"] = {"sensitivity": table, "aligned_weights": weights}
        sweep(blocks, ids[:2], results)
        save()
        every, both = Layout.from_layers(args.layers, spd=layers, sync_tp_size=RANKS), ("heads", "neurons")
        measured("assignment", lambda: assign_layers(blocks, every, both, windows), results, device)
        save()
        alignment, distillation = (job_of(blocks, every, windows, Path(folder) / name) for name in ("align", "work"))
        options = AlignOptions("a.npy")
        measured("alignment", lambda: align(alignment, options), results, device)
        save()
        settings = BlockwiseOptions("a.npy", epochs=1)
        measured("distillation, 1 epoch", lambda: distill(distillation, settings), results, device)
        results["losses"] = [
            [report.loss_before, report.loss_after]
            for report in (distillation.files.report(BlockReport, i) for i in layers)
        ]
        assert all(after <= before < float("inf") for before, after in results["losses"])
    runs = args.layers + args.layers * (args.layers + 1) // 2
    per_layer = results["sensitivity, 2 windows"]["seconds"] / runs
    more_layers = (32 - args.layers) * 436e6  # weights
    results["projected to 32 layers of the 8b shape, 128 windows"] = {
        "sensitivity_seconds": per_layer * (32 + 32 * 33 // 2) * 128 / 2,
        "sensitivity_peak_memory_bytes": results["sensitivity, 2 windows"]["peak_memory_bytes"] + more_layers,
        "alignment_seconds": results["alignment"]["seconds"] * 32 / args.layers * (1 << 17) / windows.train.numel(),
        "distillation_10_epochs_seconds": (
            results["distillation, 1 epoch"]["seconds"] * 32 / args.layers * 10 * 128 / args.windows
        ),
    }
    print(json.dumps(results["projected to 32 layers of the 8b shape, 128 windows"], indent=1))
    save()


def sweep(blocks: Blocks, ids: torch.Tensor, results: dict) -> None:
    layouts = [change.layout for change in layer_changes("sweep", blocks.num_layers, RANKS)]
    table_of(blocks, layouts, ids)
    measured("sensitivity, 2 windows", lambda: table_of(blocks, layouts, ids), results, blocks.device)


if __name__ == "__main__":
    main()
