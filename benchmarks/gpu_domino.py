"""Domino on one GPU: are the gradients those of a CPU, and how much of the communication does it hide?

    python benchmarks/gpu_domino.py [--out FILE] [--layers N]
    python benchmarks/gpu_domino.py --device cpu --shapes config.json --tokens 64

One rank of an emulated TP8 of Llama 7B and 13B with a few layers, in bfloat16, sequences of 512 and 1024 tokens. The
paper (arXiv 2409.15241) reports for 8 GPUs of one node: 0.76 to 0.77 of the throughput without communication with
Megatron-LM, and 0.95 to 0.96 with Domino. So the link is set, for each shape, such that the sequential schedule reaches
the middle of what the paper has for Megatron-LM; what domino then reaches stands beside the paper's.
"""

import argparse
import gc
import json
import tempfile
from pathlib import Path
from typing import Any

import torch
from domino import BOTH, fitting_beta, show_rows, waited_share
from torch import Tensor

from ladderize.checkpoint.config import expected_tensors
from ladderize.console import Console
from ladderize.errors import UserError
from ladderize.layout import Layout
from ladderize.ranks.group import Ranks
from ladderize.runtime.bench.document import BenchDocument, environment
from ladderize.runtime.bench.inference import bench
from ladderize.runtime.bench.options import BenchOptions
from ladderize.runtime.bench.training import ModelStep, Outcome, outcome_of
from ladderize.runtime.collectives.emulated import emulate
from ladderize.runtime.collectives.links import Link
from ladderize.runtime.loader import RandomSource
from ladderize.runtime.schedule import SEQUENTIAL, Schedule
from ladderize.runtime.shards import Shape, Slice
from ladderize.runtime.spec import shape_spec
from ladderize.runtime.training.batch import Batch
from ladderize.runtime.training.weights import build_weights

SHAPES = Path(__file__).parent / "shapes"
ROWS = 16  # of a step with sequences of 1024 tokens: enough that the GPU, and not the host, is what takes the time
MEGATRON, DOMINO = (0.76, 0.77), (0.95, 0.96)  # of no communication, arXiv 2409.15241
SMALL = {
    "model_type": "llama",
    "vocab_size": 512,
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 3,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "max_position_embeddings": 128,
}


class OnDevice:
    """The numbers of a CPU's random source, on another device: each device's generator draws its own."""

    def __init__(self, source: RandomSource, device: torch.device) -> None:
        self.source, self.device = source, device

    def read(self, part: Slice) -> Tensor:
        return self.source.read(part).to(self.device)


def outcome(device: torch.device, layout: Layout, schedule: Schedule, dtype: str) -> Outcome:
    """Of a step of a small model on one rank of an emulated TP2."""
    spec = shape_spec(SMALL, layout, name="small", tp_size=2, dtype=dtype)
    shape = Shape.from_config(SMALL, tp_size=2, rank=0)
    tensors = expected_tensors(SMALL)
    weights = build_weights(
        lambda kind: OnDevice(RandomSource(tensors, kind, torch.device("cpu")), device).read,
        SMALL,
        shape,
        layout,
        trained=frozenset(tensors),
        compute=spec.torch_dtype,
    )
    batch = Batch.random(SMALL["vocab_size"], 5, 96, 0, device)  # type: ignore[call-overload]
    group = Ranks(0, 1, device)
    collectives = emulate(2, Link("test", 200, 1.0), device)
    return outcome_of(ModelStep(spec, weights, schedule, collectives, batch, group))


def compare_with_cpu(device: torch.device) -> dict[str, float]:
    """The largest relative difference of a tensor's gradient, by layout and schedule; raises where it is too large."""
    layers = range(SMALL["num_hidden_layers"])  # type: ignore[call-overload]
    layouts = {
        "dense": Layout.dense(3),
        "spd+ladder": Layout.from_layers(3, ladder=layers, spd=layers, sync_tp_size=4),
    }
    found = {}
    for name, layout in layouts.items():
        expected = outcome(torch.device("cpu"), layout, SEQUENTIAL, "float32")
        for schedule in (SEQUENTIAL, Schedule("domino", 2), Schedule("domino", 3)):
            own = outcome(device, layout, schedule, "float32")
            worst = max(
                float((own.gradients[key].cpu() - value).norm() / value.norm().clamp_min(1e-3 * expected.norm))
                for key, value in expected.gradients.items()
            )
            found[f"{name}, {schedule.name} {schedule.chunks}"] = worst
            if not worst < 1e-3 or not abs(own.loss - expected.loss) < 1e-4 * abs(expected.loss):
                raise SystemExit(f"{name}, {schedule}: gradients of the GPU are {worst:.3g} off, loss {own.loss:.6g}")
    return found


def emulated(args: argparse.Namespace, shape: str, seq_len: int, beta: float, **more: Any) -> BenchDocument:
    options = BenchOptions(
        random_weights=shape,
        num_layers=args.layers,
        layout="dense",
        dtype="bfloat16",
        train=True,
        emulate_tp=args.ranks,
        link=f"20,{beta:.4f}",
        batch_sizes=(ROWS * args.tokens // seq_len,),
        prompt_len=seq_len,
        device=args.device,
        **{"schedules": BOTH, **more},
    )
    document = bench(options, console=Console(quiet=True))
    gc.collect()
    torch.cuda.empty_cache()
    return document


def measure(args: argparse.Namespace, shape: str, seq_len: int) -> tuple[BenchDocument, list[tuple[float, float]]]:
    wanted = 1 - sum(MEGATRON) / 2

    def waited(beta: float) -> float:
        options: dict[str, Any] = {"schedules": ("sequential",), "repeat": 3, "check": False}
        return waited_share(emulated(args, shape, seq_len, beta, **options).rows[0])

    beta, tried = fitting_beta(waited, wanted)
    return emulated(args, shape, seq_len, beta, repeat=7), tried


def trace(args: argparse.Namespace, shape: str) -> dict[str, Any]:
    """What a trace shows of both passes; an error is kept as its sentence."""
    with tempfile.TemporaryDirectory() as folder:
        try:
            document = emulated(
                args, shape, args.tokens // 2, 100.0, repeat=1, warmup=1, check=False, profile=Path(folder)
            )
        except UserError as error:
            return {"error": str(error)}
    return {
        row.schedule: {name: overlap.to_dict() for name, overlap in (row.overlap or {}).items()}
        for row in document.rows
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--shapes", default=",".join(str(SHAPES / f"llama-{size}.json") for size in ("7b", "13b")))
    parser.add_argument("--tokens", type=int, default=1024, help="of the longer sequences")
    parser.add_argument("--ranks", type=int, default=8)
    args = parser.parse_args()
    record: dict[str, Any] = {
        "schema_version": 1,
        "environment": environment(Ranks(0, 1, torch.device(args.device))).to_dict(),
        "torch": torch.__version__,
        "published": {"sequential": MEGATRON, "domino": DOMINO, "source": "arXiv 2409.15241"},
    }

    def save() -> None:
        """After every measurement: whoever stops this script for time keeps what there is."""
        if args.out:
            args.out.write_text(json.dumps(record, indent=1) + "\n")

    record["gradients_off_cpu"] = compare_with_cpu(torch.device(args.device))
    print(f"gradients of the GPU are within {max(record['gradients_off_cpu'].values()):.2g} of the CPU's")
    save()
    shapes = args.shapes.split(",")
    record["trace"] = trace(args, shapes[0])
    for schedule, passes in record["trace"].items():
        print(f"trace, {schedule}: {json.dumps(passes)}")
    save()
    for shape in shapes:
        for seq_len in (args.tokens // 2, args.tokens):
            document, tried = measure(args, shape, seq_len)
            record[f"{Path(shape).stem}, {seq_len}"] = {"tried": tried, "document": document.to_dict()}
            save()
            link = document.link.name if document.link is not None else ""
            print(
                f"\n{Path(shape).stem}, {args.layers} layers, sequences of {seq_len}, {ROWS * args.tokens} tokens,"
                f" emulated TP{args.ranks}, {link}"
            )
            show_rows(document.rows)
            plain, domino = document.rows
            print(
                f"  of no communication: sequential {plain.bound_share:.2f} (paper, Megatron-LM:"
                f" {MEGATRON[0]}-{MEGATRON[1]}), domino {domino.bound_share:.2f} (paper: {DOMINO[0]}-{DOMINO[1]})"
            )


if __name__ == "__main__":
    main()
