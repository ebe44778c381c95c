"""What one GPU does inside a decode step of one rank's part of a model, kernel by kernel.

    python benchmarks/gpu_kernels.py rates|table|forks|gemv|pdl... [--out FILE] [--shard 70b] [--device cuda]

rates: bytes per second of reading and of copying, and the rate of one large product.
table: the kernels of one replay of the decode graph without communication: how often, how long, and the gap behind.
forks: what a step pays for forks and joins around its sums, and for a sum's kernel on the computing stream.
gemv: the products of a layer and of the head: F.linear against a split-K product in Triton.
pdl: a chain of small kernels with and without programmatic dependent launch.

Every measurement takes its samples in turns with those that it is compared with, after rounds that are not counted. On
a CPU it does the same without graphs, with PyTorch in place of Triton, unless TRITON_INTERPRET=1 is set.
"""

import argparse
import functools
import gc
import json
import math
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from gpu_triton import SplitProduct, chain_link, fat_idle, has_triton, tilings
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

from ladderize.layout import Layout
from ladderize.ranks.group import Ranks
from ladderize.runtime.bench.document import environment
from ladderize.runtime.collectives import emulated
from ladderize.runtime.collectives.base import Collectives, NoCommunication
from ladderize.runtime.collectives.emulated import Emulated, EmulatedOnGpu
from ladderize.runtime.collectives.links import Link
from ladderize.runtime.shards import Shape, read_shape
from ladderize.runtime.spec import WeightCache, open_generator, shape_spec

Run = Callable[[], object]
Samples = dict[str, list[float]]  # microseconds of each counted round, by name
LINKS = 100  # kernels of the chain of ``pdl``


def captured(run: Run, device: torch.device) -> Run:
    """Return the replay of a CUDA graph of ``run``; on a CPU ``run`` itself."""
    if device.type != "cuda":
        return run
    side = torch.cuda.Stream(device)  # for the warm-up, as capturing asks for
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        run()
    torch.cuda.current_stream().wait_stream(side)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    return graph.replay


def repeated(run: Run, times: int) -> Run:
    """Return a function that runs ``run`` so many times: what a sample costs besides is then little."""
    return lambda: [run() for _ in range(times)]


def interleaved(
    runs: Mapping[str, Run], device: torch.device, rounds: int, *, each: int = 1, warm_ups: int = 2
) -> Samples:
    """Return the microseconds of each run in every counted round, over ``each``, the times that it does its work. A run
    is over when the current stream is."""
    samples: Samples = {name: [] for name in runs}
    order, shuffle, on_gpu = [*runs], random.Random(0), device.type == "cuda"
    for number in range(warm_ups + rounds):
        shuffle.shuffle(order)
        for name in order:
            if on_gpu:
                torch.cuda.synchronize()
            begin = time.perf_counter()
            runs[name]()
            if on_gpu:
                torch.cuda.current_stream().synchronize()
            if number >= warm_ups:
                samples[name].append(1e6 * (time.perf_counter() - begin) / each)
    return samples


class Shard:
    """One rank's part of a model, with decode steps in any layout and over any collectives."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.args, self.device, self.config = args, args.device, read_shape(args.shard, "--shard")
        self.layers = self.config["num_hidden_layers"]
        self.weights = WeightCache(args.device, pack=True, replicate_vocab=True)
        self.caches: list[Any] = []

    def layout(self, name: str) -> Layout:
        return Layout.from_layers(self.layers, **({} if name == "dense" else {name: range(self.layers)}))

    def step(self, layout: str, collectives: Collectives, batch: int) -> Run:
        """Return the decode step behind the prompt, on a GPU the replay of its graph."""
        args, group = self.args, Ranks(0, 1, self.device)
        dtype = "bfloat16" if self.device.type == "cuda" else "float32"
        spec = shape_spec(self.config, self.layout(layout), name=layout, tp_size=args.ranks, dtype=dtype)
        columns = args.prompt_len + 256  # as many as a graph behind this prompt has in view
        generator = open_generator(spec, collectives, self.weights, group, batch, columns, caches=self.caches)
        if all(cache is not generator.cache for cache in self.caches):
            self.caches.append(generator.cache)
            for tensor in (generator.cache.keys, generator.cache.values):
                tensor.normal_()  # zeros would take less power
        tokens = torch.zeros(batch, dtype=torch.long, device=self.device)

        def step() -> None:
            generator.position = args.prompt_len
            generator.decode_one_token(tokens)

        step()
        return step


Outcome = tuple[dict[str, Any], list[str]]  # of a measurement: its record, and lines on it


def rates(args: argparse.Namespace) -> Outcome:
    """Measure memory and arithmetic, each at its largest."""
    on_gpu = args.device.type == "cuda"
    x = torch.ones(1 << (29 if on_gpu else 20), dtype=torch.int64, device=args.device)
    copy, size = torch.empty_like(x), 8192 if on_gpu else 128
    factors = torch.randn(2, size, size, device=args.device).to(torch.bfloat16)
    calls = {"read": x.sum, "copy": lambda: copy.copy_(x), "product": lambda: torch.mm(*factors)}
    runs = {name: repeated(captured(call, args.device), 5) for name, call in calls.items()}
    samples = interleaved(runs, args.device, args.rounds, each=5)
    work = {"read_gb_s": x.nbytes / 1e3, "copy_gb_s": 2 * x.nbytes / 1e3, "product_tflop_s": 2 * size**3 / 1e6}
    medians = map(statistics.median, samples.values())
    figures = {name: done / median for (name, done), median in zip(work.items(), medians, strict=True)}
    shown = ", ".join(f"{name} {figure:.1f}" for name, figure in figures.items())
    return {"samples_us": samples, **figures}, [f"rates: {shown} (a copy's bytes both ways; bfloat16 of {size})"]


def traced(step: Run, device: torch.device) -> list[dict[str, Any]]:
    """Return the kernels of a step in their order; on a CPU the operators that no other has called."""
    on_gpu = device.type == "cuda"
    with profile(activities=[ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if on_gpu else [])]) as profiler:
        step()
        if on_gpu:
            torch.cuda.synchronize()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        profiler.export_chrome_trace(str(path))
        events = json.loads(path.read_text(encoding="utf-8"))["traceEvents"]
    kinds, end, kernels = ("kernel", "gpu_memcpy", "gpu_memset") if on_gpu else ("cpu_op",), -1.0, []
    for event in sorted((event for event in events if event.get("cat") in kinds), key=lambda event: event["ts"]):
        if on_gpu or event["ts"] >= end:
            kernels.append(event)
            end = event["ts"] + event["dur"]
    return kernels


def kernel_rows(kernels: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return a row for each kernel, the longest first: with another grid it is another one, as of another product."""
    rows: dict[tuple[str, str], dict[str, Any]] = {}
    for kernel, following in zip(kernels, [*kernels[1:], None], strict=True):
        name, grid = kernel["name"], "x".join(map(str, kernel.get("args", {}).get("grid", ())))
        row = rows.setdefault((name, grid), {"name": name, "grid": grid, "samples_us": [], "gaps_us": []})
        row["samples_us"].append(kernel["dur"])
        if following is not None:
            row["gaps_us"].append(following["ts"] - kernel["ts"] - kernel["dur"])
    for row in rows.values():
        row |= {"count": len(row["samples_us"]), "us": sum(row["samples_us"]), "gap_us": sum(row["gaps_us"])}
    return sorted(rows.values(), key=lambda row: -row["us"])


def table(args: argparse.Namespace) -> Outcome:
    """Trace a replay of each decode graph, with the three small kernels in front that set its inputs."""
    if args.device.type == "cuda":
        traced(torch.cuda.synchronize, args.device)  # graphs that were captured before the first trace may stay hidden
    shard, record, lines = Shard(args), {}, []
    for batch in args.batch_sizes:
        steps = {name: shard.step(name, NoCommunication(args.ranks), batch) for name in ("dense", "ladder")}
        samples = interleaved(steps, args.device, args.rounds)
        for name, step in steps.items():
            traced(step, args.device)  # pays for what the profiler sets up
            rows = kernel_rows(traced(step, args.device))
            sums = {key: sum(row[key] for row in rows) for key in ("count", "us", "gap_us")}
            record[f"{name}_batch_{batch}"] = {"step_samples_us": samples[name], **sums, "kernels": rows}
            lines.append(
                f"table: {args.shard}, {name}, batch {batch}: a step of {statistics.median(samples[name]):.0f} us;"
                f" traced {sums['count']} kernels of {sums['us']:.0f} us and gaps of {sums['gap_us']:.0f} us"
            )
            print(f"{'us':>10} {'count':>6} {'us each':>9} {'gap each':>8}  {name}, batch {batch}")
            for row in rows:
                each = f"{row['us'] / row['count']:9.2f} {row['gap_us'] / row['count']:8.2f}"
                print(f"{row['us']:10.1f} {row['count']:6} {each}  {row['name'][:80]} {row['grid']}")
    return record, lines


class Forked(EmulatedOnGpu):
    """Emulated sums that all fork and join, also those that are waited for at once."""

    all_reduce_blocking = Collectives.all_reduce_blocking


def with_idle_stream(run: Run, device: torch.device, nanoseconds: int) -> Run:
    """Return ``run`` while one kernel idles for so long on another stream."""
    idle, stream = emulated.idle_on_gpu(), torch.cuda.Stream(device)

    def run_meanwhile() -> None:
        with torch.cuda.stream(stream):
            idle(nanoseconds)
        run()

    return run_meanwhile


def forks(args: argparse.Namespace) -> Outcome:
    """Compare a step whose sums are silent with steps whose sums are kernels, by where these run."""
    shard, device, batch = Shard(args), args.device, args.batch_sizes[0]
    on_gpu, runs = device.type == "cuda", {}
    for layout in ("dense", "ladder"):
        silent = repeated(shard.step(layout, NoCommunication(args.ranks), batch), args.steps)
        runs[f"{layout}, silent"] = silent
        longest = 1e3 * max(interleaved({"": silent}, device, 3)[""])
        if on_gpu:
            meanwhile = with_idle_stream(silent, device, round(min(2e9, 1.5 * longest)))  # 32 bits of nanoseconds
            runs[f"{layout}, a long kernel on another stream"] = meanwhile
        for delay in args.delays_us:
            link = Link(f"{delay:g} us", delay, None)
            senders = {"forks": Forked(args.ranks, link, device) if on_gpu else Emulated(args.ranks, link)}
            idles = {"thin": emulated.idle_on_gpu(), "fat": fat_idle} if on_gpu else {}
            for name, idle in idles.items():
                senders[f"blocking in place, {name}"] = in_place = EmulatedOnGpu(args.ranks, link, device)
                in_place.idle = idle
            for name, sender in senders.items():
                runs[f"{layout}, {name}, {delay:g} us"] = repeated(shard.step(layout, sender, batch), args.steps)
    samples = interleaved(runs, device, args.rounds, each=args.steps)
    rows, lines = {}, []
    for name, times in samples.items():
        pairs = zip(times, samples[name.partition(",")[0] + ", silent"], strict=True)
        more = statistics.median(time - silent for time, silent in pairs) / shard.layers
        median = statistics.median(times)
        rows[name] = {"step_samples_us": times, "step_us": median, "us_per_layer_over_silent": more}
        lines.append(f"forks: {args.shard}, batch {batch}, {name}: {median:.0f} us, {more:+.3f} us a layer over silent")
    return {"batch": batch, "layers": shard.layers, "rows": rows}, lines


def shard_products(args: argparse.Namespace) -> dict[str, tuple[int, int]]:
    """Return the sizes [width, inner] of the weights of a layer and of the head."""
    shape = Shape.from_config(read_shape(args.shard), tp_size=args.ranks, rank=0, replicate_vocab=True)
    heads = shape.own_heads * shape.head_dim
    return {
        "qkv": (heads + 2 * shape.own_kv_heads * shape.head_dim, shape.hidden),
        "o": (shape.hidden, heads),
        "gate_up": (2 * shape.own_inner, shape.hidden),
        "down": (shape.hidden, shape.own_inner),
        "head": (shape.own_vocab, shape.hidden),
    }


def gemv(args: argparse.Namespace) -> Outcome:
    """Time the five products over copies of their weights that no cache holds; the best tiling against F.linear."""
    record, lines = {"wrong": []}, []
    for name, size in shard_products(args).items():
        for rows, figures in rotated_products(size, args):
            wrong = [f"{name}, {rows} rows, {tiling}" for tiling in figures["wrong"]]
            record["wrong"] += wrong
            record[f"{name}_rows_{rows}"] = figures
            times = (
                f"{side} {figures[side]['us']:.2f} us {figures[side]['gb_s']:.0f} GB/s" for side in figures["timed"]
            )
            tally = f"{len(figures['tried_us'])} tilings ran, {len(figures['failures'])} did not, {len(wrong)} WRONG"
            lines.append(f"gemv: {name} {[*size]}, {rows} rows: {', '.join(times)} ({figures['best']}; {tally})")
    return record, lines


def rotated_products(size: tuple[int, int], args: argparse.Namespace) -> Iterator[tuple[int, dict[str, Any]]]:
    """Yield numbers of rows, each with the figures of its products with a weight of this size."""
    device, on_gpu = args.device, args.device.type == "cuda"
    dtype, close = (torch.bfloat16, 0.03) if on_gpu else (torch.float32, 1e-4)
    weight_bytes = math.prod(size) * dtype.itemsize
    count = launches = 1
    if on_gpu:
        count = math.ceil(4 * torch.cuda.get_device_properties(device).L2_cache_size / weight_bytes)
        launches = count * math.ceil(max(8, 4e9 / weight_bytes) / count)  # a millisecond of them
    weights = [torch.randn(*size, device=device, dtype=dtype).mul_(size[1] ** -0.5) for _ in range(count)]

    def rotated(multiply: Callable[[Tensor], Tensor]) -> Run:
        return captured(lambda: [multiply(weights[number % count]) for number in range(launches)], device)

    for rows in args.rows:
        x = torch.randn(rows, size[1], device=device, dtype=dtype)
        linear, tried, wrong, failures = functools.partial(F.linear, x), {}, [], {}
        for tiling in tilings(*size, rows):
            try:
                product = SplitProduct(x, size[0], tiling)
                for _ in range(2):  # the second finds what the first has left behind
                    torch.testing.assert_close(product(weights[0]), linear(weights[0]), rtol=close, atol=close)
                samples = interleaved({"": rotated(product)}, device, 3, each=launches, warm_ups=1)[""]
                tried[tiling] = statistics.median(samples)
            except AssertionError:
                wrong.append(str(tiling))
            except Exception as error:  # a tile may be too large for this GPU; the others are tried
                failures[str(tiling)] = f"{type(error).__name__}: {error}"[:300]
        runs, best = {"linear": rotated(linear)}, min(tried, key=tried.__getitem__, default=None)
        if best is not None:
            runs["split"] = rotated(SplitProduct(x, size[0], best))
        figures: dict[str, Any] = {"timed": [*runs], "best": str(best), "launches": launches, "copies": count}
        for side, samples in interleaved(runs, device, args.rounds, each=launches).items():
            median = statistics.median(samples)
            figures[side] = {"samples_us": samples, "us": median, "gb_s": weight_bytes / median / 1e3}
        figures["tried_us"] = {str(tiling): median for tiling, median in tried.items()}
        yield rows, figures | {"wrong": wrong, "failures": failures}


def pdl(args: argparse.Namespace) -> Outcome:
    """Time a chain of kernels that each read what the one before has written."""
    device, record, lines = args.device, {"kernels": LINKS, "wrong": []}, []
    has_pdl = device.type == "cuda" and has_triton(device) and torch.cuda.get_device_capability(device) >= (9, 0)
    for programs in (1, 64):
        runs = {}
        for name in ("plain", "programmatic") if has_pdl else ("plain",):
            x, other = torch.zeros(2, programs * 1024, device=device).unbind(0)
            link = functools.partial(chain_link, programmatic=name == "programmatic")
            replay = captured(functools.partial(chain, link, x, other), device)
            x.zero_()
            replay()
            if not (x == LINKS).all():
                record["wrong"].append(f"{name}, {programs} programs")
            runs[name] = repeated(replay, 10)
        samples = interleaved(runs, device, args.rounds, each=10 * LINKS)
        medians = {name: statistics.median(times) for name, times in samples.items()}
        record[f"programs_{programs}"] = {"samples_us": samples, "us": medians}
        listed = ", ".join(f"{name} {median:.3f} us" for name, median in medians.items())
        lines.append(f"pdl: each kernel, of {programs} programs, in a chain of {LINKS}: {listed}")
    return record, [*lines, *(f"pdl: WRONG: {name}" for name in record["wrong"])]


def chain(link: Callable[[Tensor, Tensor], object], x: Tensor, other: Tensor) -> None:
    """Write x + LINKS into x, by as many kernels."""
    for _ in range(LINKS // 2):
        link(x, other)
        link(other, x)


MEASUREMENTS = {"rates": rates, "table": table, "forks": forks, "gemv": gemv, "pdl": pdl}


def counts(text: str) -> tuple[int, ...]:
    return tuple(map(int, text.split(",")))


@torch.inference_mode()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("measurements", nargs="+", choices=MEASUREMENTS)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--device", default="cuda", type=torch.device)
    parser.add_argument("--shard", default="70b", help="a bundled size or a config.json")
    parser.add_argument("--ranks", type=int, default=8)
    parser.add_argument("--batch-sizes", default=(1, 16), type=counts, help="of table; forks takes the first")
    parser.add_argument("--rows", default=(1, 4, 16), type=counts, help="of gemv, 16 at most")
    parser.add_argument("--delays-us", default=(0, 20), type=counts, help="of forks: what a sum takes")
    parser.add_argument("--prompt-len", type=int, default=1024)
    parser.add_argument("--steps", type=int, default=10, help="of a sample of forks")
    parser.add_argument("--rounds", type=int, default=9, help="that are counted")
    args = parser.parse_args()
    on_gpu = args.device.type == "cuda"
    if on_gpu:
        gc.freeze()  # a capture collects garbage first, among all objects of PyTorch otherwise
    note = "" if on_gpu else " (no graph)"
    note += "" if has_triton(args.device) else " (PyTorch for Triton)"
    described = environment(Ranks(0, 1, args.device)).to_dict()
    record: dict[str, Any] = {
        "schema_version": 1,
        "environment": described,
        "graph": on_gpu,
        "summary": [],
    }
    for name in args.measurements:
        record[name], lines = MEASUREMENTS[name](args)
        record["summary"] += [line + note for line in lines]
        print(*record["summary"][-len(lines) :], sep="\n", flush=True)
        if args.out:  # after every measurement: whoever stops this script for time keeps what there is
            args.out.write_text(json.dumps(record, indent=1) + "\n")
    sys.exit(int(any(record[name].get("wrong") for name in args.measurements)))


if __name__ == "__main__":
    main()
