"""Tensor-parallel training and prefill by schedule on this CPU. Run it on an idle machine.

    python benchmarks/domino.py [--only ddp,bound,prefill] [--out FILE] [--repeat N] [--quick]

ddp      sequential TP2 over shared memory beside DDP on two processes: the same model, the same tokens per step, in one
         run. DDP of the Hugging Face model, as ``adapt`` trains today, and of the runtime's model, so that what the
         model takes and what sharing it takes are told apart.
bound    one rank of an emulated TP8, with a link that is so slow that the sequential schedule waits for 30 % of its
         step: which share of the no-communication bound domino reaches.
prefill  prompts of several lengths and batches by domino and by the sequential schedule, over shared memory and over
         an emulated link.

Every ratio is of figures from one run, whose rounds are interleaved. JSON with raw samples goes to
benchmarks/results/domino.json, after each part.
"""

import argparse
import json
import random
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import torch

from ladderize.console import Console
from ladderize.files.documents import read_json
from ladderize.layout import Layout
from ladderize.ranks.group import Ranks
from ladderize.runtime.bench.document import BenchDocument, BenchRow
from ladderize.runtime.bench.inference import bench
from ladderize.runtime.bench.options import BenchOptions
from ladderize.runtime.bench.rounds import timed_figures
from ladderize.runtime.bench.training import step_opener
from ladderize.runtime.collectives.base import Collectives
from ladderize.runtime.collectives.choose import choose
from ladderize.runtime.launch import run
from ladderize.runtime.schedule import SEQUENTIAL
from ladderize.runtime.spec import shape_spec
from ladderize.runtime.training.batch import Batch

SHAPE = Path(__file__).parent / "shapes" / "200m.json"
# as many KV heads as heads, as the paper's models: ranks that hold the same KV heads would sum their weights' gradients
EIGHT = Path(__file__).parent / "shapes" / "slow_link.json"
RESULTS = Path(__file__).parent / "results" / "domino.json"
BOTH = ("sequential", "domino")
RANKS, SHARE, TARGET, SLOWER = 8, 0.30, 0.92, 1.15
QUIET = Console(quiet=True)


# ---- sequential TP2 beside DDP ----


def measure_ddp(group: Ranks, layers: int, rows: int, tokens: int, dtype: str, rounds: int) -> dict[str, Any]:
    """Seconds of a step over ``rows`` x ``tokens`` in each round, by way; every rank calls it."""
    config = {**read_json(SHAPE), "num_hidden_layers": layers}
    spec = shape_spec(config, Layout.dense(layers), name="dense", tp_size=group.size, dtype=dtype)
    batch = Batch.random(config["vocab_size"], rows, tokens, 0, group.device)
    longest = 4 * rows * tokens * int(config["hidden_size"])
    collectives, backend = choose("auto", group, max_bytes=longest, in_flight=SEQUENTIAL.in_flight)
    shared = step_opener(group, group.size)(spec, SEQUENTIAL, collectives, batch)

    def tensor_parallel() -> None:
        shared.backward(shared.forward())
        shared.weights.zero_grad(set_to_none=True)

    half = Batch.random(config["vocab_size"], rows // group.size, tokens, group.rank, group.device)
    ways = {
        f"TP{group.size}, {backend}": tensor_parallel,
        "DDP, Hugging Face's model": hf_step(config, dtype, half),
        "DDP, the runtime's model": runtime_step(group, spec, half),
    }
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    shuffle, order = random.Random(0), list(ways)
    for round_ in range(rounds + 2):
        shuffle.shuffle(order)
        for name in order:
            group.barrier()
            begin = time.perf_counter()
            ways[name]()
            took = max(group.gather(time.perf_counter() - begin))
            if round_ >= 2:
                seconds[name].append(took)
    collectives.settle()
    return {"rows": rows, "tokens": tokens, "layers": layers, "dtype": dtype, "rounds": rounds, "seconds": seconds}


def hf_step(config: dict[str, Any], dtype: str, batch: Batch) -> Callable[[], None]:
    """Forward and backward of the Hugging Face model under DDP: fp32 weights, autocast to ``dtype``."""
    from torch.nn.functional import cross_entropy
    from torch.nn.parallel import DistributedDataParallel
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    model = DistributedDataParallel(LlamaForCausalLM(LlamaConfig(**config)))

    def step() -> None:
        with torch.autocast("cpu", torch.bfloat16, enabled=dtype == "bfloat16"):
            logits = model(input_ids=batch.input_ids, use_cache=False).logits
        cross_entropy(logits.float().flatten(0, 1), batch.targets.flatten()).backward()
        model.zero_grad(set_to_none=True)

    return step


def runtime_step(group: Ranks, spec: Any, batch: Batch) -> Callable[[], None]:
    """The same of the runtime's model, unshared."""
    from torch.nn.parallel import DistributedDataParallel

    alone = Ranks(0, 1, group.device)
    opened = step_opener(alone, 1)(spec, SEQUENTIAL, Collectives(), batch)
    model = DistributedDataParallel(opened.model)

    def step() -> None:
        sums = model(batch)
        (sums[0] / batch.targets.numel()).backward()
        model.zero_grad(set_to_none=True)

    return step


def ddp(rounds: int, quick: bool) -> dict[str, Any]:
    layers, rows, tokens = (2, 2, 64) if quick else (8, 4, 256)
    found = {}
    for dtype in ("bfloat16", "float32"):
        part = run(measure_ddp, layers, rows, tokens, dtype, rounds, tp_size=2, device="cpu", threads=1)
        tensor, *others = part["seconds"].items()
        print(f"\n{dtype}, {layers} layers of hidden 1024, {rows} x {tokens} tokens, forward and backward")
        for name, seconds in (tensor, *others):
            figures = timed_figures({"step": seconds}, {"step": tensor[1]}, {"step": 1}, "step")
            ratio, (low, high) = figures["speedup"]["step"], figures["speedup_interval"]["step"]
            note = "" if name == tensor[0] else f"   TP2 takes {ratio:.2f}x ({low:.2f}-{high:.2f}; target {SLOWER})"
            print(f"  {name:36} {1e6 * median(seconds) / rows / tokens:8.1f} us/token{note}")
        part["tp_over"] = {name: median(tensor[1]) / median(seconds) for name, seconds in others}
        found[dtype] = part
    return found


# ---- an emulated TP8 ----


def emulated(options: dict[str, Any], beta: float, layout: str = "dense") -> BenchDocument:
    settings = BenchOptions(
        random_weights=str(EIGHT),
        num_layers=options.pop("layers"),
        layout=layout,
        dtype="bfloat16",
        train=True,
        emulate_tp=RANKS,
        link=f"5,{beta:.6f}",
        threads=1,
        **{"schedules": BOTH, **options},
    )
    return bench(settings, console=QUIET)


def waited_share(row: BenchRow) -> float:
    """What a variant waits for, of its step."""
    return 1 - sum(median(part) for part in (row.no_communication_samples_ms or {}).values()) / row.ms["step"]


def fitting_beta(waited: Callable[[float], float], wanted: float) -> tuple[float, list[tuple[float, float]]]:
    """GB/s of a link over which a step waits for the share ``wanted`` of its time, and what was tried. waited: measures
    that share over a link."""
    tried: list[tuple[float, float]] = []
    beta = 1.0
    for _ in range(6):
        share = waited(beta)
        tried.append((beta, share))
        if abs(share - wanted) < 0.01:
            break
        # the time waited is about in proportion to 1 / beta, and share / (1 - share) to the time waited
        beta *= (share / (1 - share)) / (wanted / (1 - wanted)) if share > 0.02 else 0.2
    return min(tried, key=lambda one: abs(one[1] - wanted))[0], tried


def sequential_beta(size: dict[str, Any], repeat: int) -> tuple[float, list[tuple[float, float]]]:
    """The same of the sequential schedule and ``SHARE``."""
    options = {**size, "schedules": ("sequential",), "repeat": repeat, "check": False}
    return fitting_beta(lambda beta: waited_share(emulated(dict(options), beta).rows[0]), SHARE)


def bound(rounds: int, quick: bool) -> dict[str, Any]:
    size = {"layers": 2 if quick else 4, "batch_sizes": (4,), "prompt_len": 64 if quick else 256}
    beta, tried = sequential_beta(size, max(3, rounds // 3))
    document = emulated({**size, "repeat": rounds}, beta, "dense,ladder,spd,spd+ladder")
    print(f"\nemulated TP{RANKS}, bfloat16, 4 x {size['prompt_len']} tokens, 5 us + bytes / {beta:.3f} GB/s")
    show_rows(document.rows)
    return {"beta_gb_s": beta, "tried": tried, "target": TARGET, "document": document.to_dict()}


def show_rows(rows: list[BenchRow]) -> None:
    print(f"  {'':24} {'step ms':>9} {'waited':>7} {'of no-comm':>11} {'speed-up':>9} {'forward':>8}")
    for row in rows:
        print(
            f"  {row.model + ', ' + row.schedule:24} {row.ms['step']:9.1f} {waited_share(row):7.1%}"
            f" {row.bound_share:11.3f} {row.speedup['step']:8.2f}x {row.speedup['forward']:7.2f}x"
        )


# ---- prefill ----


def prefill(rounds: int, quick: bool) -> dict[str, Any]:
    sizes: dict[int, tuple[int, ...]] = {128: (1, 4, 16), 512: (1, 4), 2000: (1,)}
    if quick:
        sizes = {64: (1, 2)}
    ways: dict[str, dict[str, Any]] = {
        "TP2 over shared memory": {"tp_size": 2, "backend": "shm"},
        f"emulated TP{RANKS}, 20 us + bytes / 0.3 GB/s": {"emulate_tp": RANKS, "link": "20,0.3"},
    }
    found = {}
    for name, ranks in ways.items():
        print(f"\nprefill, {name}: sequential over domino")
        for length, batches in sizes.items():
            options = BenchOptions(
                random_weights=str(SHAPE),
                num_layers=2 if quick else 4,
                layout="dense",
                dtype="bfloat16",
                **ranks,
                prompt_len=length,
                output_len=2,
                batch_sizes=batches,
                schedules=BOTH,
                repeat=rounds,
                threads=1,
            )
            document = bench(options, console=QUIET)
            found[f"{name}, {length} tokens"] = document.to_dict()
            for plain, domino in zip(document.rows[::2], document.rows[1::2], strict=True):
                low, high = domino.speedup_interval["prefill"]
                took = f"{plain.ms['prefill']:8.1f} ms / {domino.ms['prefill']:8.1f} ms"
                ratio = f"{domino.speedup['prefill']:.2f}x ({low:.2f}-{high:.2f})"
                print(f"  {domino.batch_size:3} x {length:5} tokens: {took} = {ratio}")
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="ddp,bound,prefill")
    parser.add_argument("--out", type=Path, default=RESULTS)
    parser.add_argument("--repeat", type=int, default=11)
    parser.add_argument("--quick", action="store_true", help="tiny sizes: does the script run?")
    args = parser.parse_args()
    record: dict[str, Any] = {"schema_version": 1, "torch": torch.__version__, "shape": SHAPE.name}
    if args.out.is_file():  # parts that were measured before stay
        record = {**json.loads(args.out.read_text()), **record}
    parts = {"ddp": ddp, "bound": bound, "prefill": prefill}
    for part in args.only.split(","):
        record[part] = parts[part](args.repeat, args.quick)
        args.out.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
