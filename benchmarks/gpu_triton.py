"""The kernels in Triton that gpu_kernels.py times: a product for few rows, a link of a chain, and a fat delay.

The product is for weights [width, inner] that are read once: programs share the columns of a tile of outputs, and the
last of them adds what all have summed. Without Triton, or on a CPU without its interpreter, PyTorch stands for it.
"""

import math
import os
from collections.abc import Iterator
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

try:
    import triton
    import triton.language as tl
    from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait, globaltimer
except ImportError:
    triton = None

# outputs and columns of a tile, warps, and loads ahead
TILES = ((16, 512, 4, 3), (32, 256, 4, 4), (64, 128, 4, 5), (64, 256, 8, 4), (128, 128, 8, 4))
MOST_PROGRAMS = 2048  # more splits than these need only make more partial sums

if triton is not None:

    @triton.jit(do_not_specialize=["nanoseconds"])
    def fat_spin_kernel(nanoseconds):
        """Idle by the GPU's own clock. A trace knows it by its name for communication."""
        begin = globaltimer()
        now = begin
        while now - begin < nanoseconds:
            now = globaltimer()

    @triton.jit
    def add_one_kernel(x, out, width, PROGRAMMATIC: tl.constexpr, BLOCK: tl.constexpr):
        """Add 1. With a programmatic launch the next kernel starts at once, and waits for the end of this one."""
        column = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
        if PROGRAMMATIC:
            gdc_launch_dependents()
            gdc_wait()
        tl.store(out + column, tl.load(x + column, mask=column < width) + 1, mask=column < width)

    @triton.jit(do_not_specialize=["rows"])
    def split_product(
        x,
        weight,
        out,
        partials,
        arrivals,
        rows,
        width,
        inner,
        chunk,
        ROWS: tl.constexpr,
        OUTPUTS: tl.constexpr,
        COLUMNS: tl.constexpr,
        STAGES: tl.constexpr,
    ):
        """Multiply a tile of outputs over ``chunk`` columns; the last program of a tile adds the sums of all."""
        tile, split, splits = tl.program_id(0), tl.program_id(1), tl.num_programs(1)
        output, row = tile * OUTPUTS + tl.arange(0, OUTPUTS), tl.arange(0, ROWS)
        column = tl.arange(0, COLUMNS)
        weights = weight + output.to(tl.int64)[:, None] * inner + column[None]
        inputs = x + row[:, None] * inner + column[None]
        # a single row needs no tensor cores: what a thread has multiplied is summed at the end
        total = tl.zeros([OUTPUTS, COLUMNS if ROWS == 1 else ROWS], tl.float32)
        first = split * chunk
        for start in tl.range(first, tl.minimum(first + chunk, inner), COLUMNS, num_stages=STAGES):
            inside = (start + column < inner)[None]
            w = tl.load(weights + start, mask=(output < width)[:, None] & inside, other=0.0)
            values = tl.load(inputs + start, mask=(row < rows)[:, None] & inside, other=0.0)
            if ROWS == 1:
                total += w.to(tl.float32) * values.to(tl.float32)
            else:
                total = tl.dot(w, tl.trans(values), total)
        if ROWS == 1:
            total = tl.sum(total, 1)[:, None]
        position = row[None] * width + output[:, None]
        written = (output < width)[:, None] & (row < rows)[None]
        if splits == 1:
            tl.store(out + position, total.to(out.dtype.element_ty), mask=written)
        else:
            tl.store(partials + split * rows * width + position, total, mask=written)
            tl.debug_barrier()  # every thread has stored before the first says that this program has
            if tl.atomic_add(arrivals + tile, 1, sem="acq_rel") == splits - 1:
                added = tl.zeros([OUTPUTS, ROWS], tl.float32)
                for number in range(splits):  # always in this order: the same bits in every run
                    sums = partials + number * rows * width + position
                    added += tl.load(sums, mask=written, other=0.0, cache_modifier=".cg")
                tl.store(out + position, added.to(out.dtype.element_ty), mask=written)
                tl.store(arrivals + tile, 0)


def has_triton(device: torch.device) -> bool:
    return triton is not None and (device.type == "cuda" or os.environ.get("TRITON_INTERPRET") == "1")


def fat_idle(nanoseconds: int) -> None:
    """Keep 8 multiprocessors of the current stream busy, as an all-reduce does."""
    fat_spin_kernel[(8,)](nanoseconds, num_warps=32)


def chain_link(x: Tensor, out: Tensor, *, programmatic: bool) -> None:
    """Write x + 1, of a multiple of 1,024 numbers, into ``out``."""
    if not has_triton(x.device):
        torch.add(x, 1, out=out)
        return
    more = {"launch_pdl": True} if programmatic else {}  # an option that other backends than CUDA's do not know
    add_one_kernel[(x.numel() // 1024,)](x, out, x.numel(), programmatic, 1024, num_warps=4, **more)


class Tiling(NamedTuple):
    """The cut of a product: outputs and columns of a tile, programs that share the columns, warps, and loads ahead."""

    outputs: int
    columns: int
    warps: int
    stages: int
    splits: int
    rows: int  # 1, or 16 for tensor cores

    def __str__(self) -> str:
        form = "summed" if self.rows == 1 else "dot"
        return f"{self.outputs}x{self.columns}, {self.splits} splits, {self.warps} warps, {self.stages} stages, {form}"


def tilings(width: int, inner: int, rows: int) -> Iterator[Tiling]:
    """Yield the tilings to try for a weight [width, inner]."""
    for outputs, columns, *more in TILES:
        for splits in (1, 2, 4, 8, 16):
            programs = math.ceil(width / outputs) * splits
            if splits == 1 or (programs <= MOST_PROGRAMS and splits <= math.ceil(inner / columns)):
                for padded in (1, 16) if rows == 1 else (16,):
                    yield Tiling(outputs, columns, *more, splits, padded)


class SplitProduct:
    """Products of x with weights [width, inner] by one tiling, into the same memory; without Triton by PyTorch."""

    def __init__(self, x: Tensor, width: int, tiling: Tiling) -> None:
        (rows, self.inner), self.x, self.width, self.tiling = x.shape, x, width, tiling
        self.tiles = math.ceil(width / tiling.outputs)
        self.chunk = math.ceil(math.ceil(self.inner / tiling.columns) / tiling.splits) * tiling.columns
        self.out = x.new_empty(rows, width)
        self.partials = x.new_empty(tiling.splits if tiling.splits > 1 else 0, rows, width, dtype=torch.float32)
        self.arrivals = torch.zeros(self.tiles, dtype=torch.int32, device=x.device)

    def __call__(self, weight: Tensor) -> Tensor:
        x, tiling = self.x, self.tiling
        if not has_triton(x.device):
            chunks = zip(x.split(self.chunk, 1), weight.split(self.chunk, 1), strict=True)
            return self.out.copy_(sum(F.linear(values, columns).float() for values, columns in chunks))
        split_product[(self.tiles, tiling.splits)](
            *(x, weight, self.out, self.partials, self.arrivals, x.shape[0], self.width, self.inner, self.chunk),
            *(tiling.rows, tiling.outputs, tiling.columns, tiling.stages),
            num_warps=tiling.warps,
        )
        return self.out
