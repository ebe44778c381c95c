"""Products of few and many rows on a CPU, by dtype and instruction set: what a machine without AVX512 should take.

    python benchmarks/products_cpu.py [--out benchmarks/results/products_cpu.json]

One thread. ``plain`` is F.linear by PyTorch's own loops, which is what bfloat16 gets where oneDNN does not multiply it;
``packed`` is oneDNN's product with a weight in its blocked layout, ``own`` the runtime's. Weights lie in huge pages, as
the runtime's do, and are rotated, so that no cache holds one. Limits keep all to what other processors have: ``bf16``
leaves out the tiles (AMX), ``avx512`` products of bfloat16, too. With ``avx2`` PyTorch refuses to pack bfloat16, and
nothing is measured in its place.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from ladderize.ranks.device import processor, set_up_heap
from ladderize.runtime.cpu_operations import CpuOperations
from ladderize.runtime.layers import Linear
from ladderize.runtime.native.library import kernels

LIMITS = {
    "none": {},
    "bf16": {"ONEDNN_MAX_CPU_ISA": "AVX512_CORE_BF16", "CXX": "g++ -mno-amx-bf16"},
    "avx512": {"ONEDNN_MAX_CPU_ISA": "AVX512_CORE", "CXX": "g++ -mno-amx-bf16 -mno-avx512bf16"},
    "avx2": {"ONEDNN_MAX_CPU_ISA": "AVX2", "ATEN_CPU_CAPABILITY": "avx2", "CXX": "g++ -mno-avx512f -mno-amx-bf16"},
}
SIZES = ((4096, 1024), (1024, 2048))  # out, in
WEIGHTS, ROUNDS = 16, 5


def plain(weight: Tensor) -> Callable[[Tensor], Tensor]:
    def multiply(x: Tensor) -> Tensor:
        with torch.backends.mkldnn.flags(enabled=False):
            return F.linear(x, weight)

    return multiply


def packed(weight: Tensor) -> Callable[[Tensor], Tensor]:
    reordered = torch.ops.mkldnn._reorder_linear_weight(weight, None)
    return lambda x: torch.ops.mkldnn._linear_pointwise.default(x, reordered, None, "none", [], "")


def own(weight: Tensor) -> Callable[[Tensor], Tensor]:
    linear, operations = Linear(weight, pack=True), CpuOperations(kernels())
    return lambda x: operations.product(linear, x)


def measure(limit: str) -> list[dict]:
    torch.set_num_threads(1)
    set_up_heap()
    makes = [(torch.bfloat16, own), (torch.bfloat16, plain), (torch.float32, packed), (torch.float32, own)]
    if limit != "avx2":
        makes.insert(0, (torch.bfloat16, packed))
    kinds = {f"{str(dtype).removeprefix('torch.')} {make.__name__}": (dtype, make) for dtype, make in makes}
    rows: list[dict] = []
    products: dict[tuple, list[Callable[[Tensor], Tensor]]] = {}
    for name, (dtype, make) in kinds.items():
        for size in SIZES:
            products[name, size] = [make(torch.randn(size).to(dtype)) for _ in range(WEIGHTS)]
    for size in SIZES:
        for tokens in (1, 8, 32, 128):
            samples: dict[str, list[float]] = {name: [] for name in kinds}
            for number in range(ROUNDS + 1):
                for name in kinds:
                    x = torch.randn(tokens, size[1]).to(kinds[name][0])
                    begin = time.perf_counter()
                    for multiply in products[name, size]:
                        multiply(x)
                    if number:  # the first is a warm-up
                        samples[name].append(1e3 * (time.perf_counter() - begin) / WEIGHTS)
            medians = {name: statistics.median(times) for name, times in samples.items()}
            rows.append({"limit": limit, "size": size, "rows": tokens, "median_ms": medians, "samples_ms": samples})
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path)
    parser.add_argument("--limit", choices=LIMITS, help="measure in this process, and print JSON")
    args = parser.parse_args()
    if args.limit:
        print(json.dumps(measure(args.limit)))
        return
    rows = []
    for limit, variables in LIMITS.items():
        command = [sys.executable, __file__, "--limit", limit]
        done = subprocess.run(command, env={**os.environ, **variables}, stdout=subprocess.PIPE, check=True)
        rows += json.loads(done.stdout)
    for row in rows:
        listed = ", ".join(f"{name} {median:.2f}" for name, median in row["median_ms"].items())
        print(f"{row['limit']}, {row['size']}, {row['rows']} rows: {listed} ms")
    if args.out:
        record = {"schema_version": 2, "processor": processor(), "torch": torch.__version__, "rows": rows}
        args.out.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
