"""The times that a device's and a link's figures are fitted to: products, messages between products, and both at once.

Weights alternate among more than any cache holds. A message is timed behind a product, since in a pass ranks also wait
for each other: over gloo it takes twice as long there as alone.
"""

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch

from ladderize.console import Console
from ladderize.files.records import Record
from ladderize.memory import check_room
from ladderize.ranks.group import Ranks
from ladderize.runtime.bench.document import Environment, environment
from ladderize.runtime.collectives.base import Collectives
from ladderize.runtime.collectives.choose import choose
from ladderize.runtime.graphs import capture
from ladderize.runtime.layers import Linear


@dataclass(frozen=True)
class TimedSizes:
    """The products and messages that are timed.

    widths: of square weights.
    rows: of a decode step of one text, of some texts, of 64, and of a prompt.
    pool_bytes: of all weights of one width.
    message_bytes: the sizes of all messages that are timed.
    overlapped_bytes: the sizes of those that products run beside.
    """

    widths: tuple[int, ...]
    rows: tuple[int, ...]
    pool_bytes: int
    message_bytes: tuple[int, ...] = (8 << 10, 64 << 10, 512 << 10, 4 << 20)
    overlapped_bytes: tuple[int, ...] = (512 << 10, 4 << 20)


SIZES = {
    "cpu": TimedSizes((1024, 2048, 4096), (1, 8, 64, 256), 256 << 20),
    "cuda": TimedSizes((2048, 4096, 8192, 16384), (1, 16, 64, 8192), 2 << 30),
}
IN_A_ROW = 12  # products or messages of one sample: after a barrier ranks do not start at once
LEAST_SECONDS = 1e-7  # the least time of a message, where timings scatter by more than it takes
STARTS = 1000  # operations that the host starts, of one sample
COVER = 1.5  # times as long as a message: the products that run beside it


@dataclass(frozen=True)
class TimedProduct(Record):
    """The median time of [rows, width] times [width, width], on each of ``ranks`` at once."""

    ranks: int
    rows: int
    width: int
    seconds: float
    fitted_seconds: float = 0.0


@dataclass(frozen=True)
class TimedMessage(Record):
    """The median time of an all-reduce of ``ranks``, behind a product."""

    ranks: int
    bytes: int
    seconds: float
    fitted_seconds: float = 0.0


@dataclass(frozen=True)
class TimedGroup(Record):
    """All that a group of ranks has timed.

    contention: the share by which a message in flight slows the compute beside it.
    launch_us: the host's time for an operation that it starts by itself.
    """

    ranks: int
    backend: str
    environment: Environment
    dtype: str
    products: list[TimedProduct]
    messages: list[TimedMessage]
    contention: float | None
    launch_us: float


def time_group(group: Ranks, sizes: TimedSizes, dtype: str, backend: str, repeat: int, console: Console) -> TimedGroup:
    """Time products and messages, and return the times. All ranks call it. Raises UserError if memory is too small."""
    kind: torch.dtype = getattr(torch, dtype)
    widest = sizes.rows[-1] * sizes.widths[-1] * kind.itemsize
    check_room(2 * sizes.pool_bytes + 3 * widest, group.device, "calibrate", "free some", processes=group.local_size)
    timer = _Timer(group, repeat)
    collectives, chosen = choose(backend, group, max_bytes=max(sizes.message_bytes))
    products, messages, contention = [], [], None
    with torch.inference_mode():
        with console.progress(f"timing {group.size} rank{'s' * (group.size > 1)}", len(sizes.widths)) as advance:
            for width in sizes.widths:
                weights = _weights(width, sizes.pool_bytes, kind, group.device)
                for rows in sizes.rows:
                    x = torch.randn(rows, width, dtype=kind, device=group.device)
                    seconds = timer(partial(_multiply, weights, x, IN_A_ROW), IN_A_ROW)
                    products.append(TimedProduct(group.size, rows, width, seconds))
                advance(1)
        if group.size > 1:
            with console.stage("timing all-reduces"):
                weights = _weights(sizes.widths[0], sizes.pool_bytes, kind, group.device)
                x = torch.randn(1, sizes.widths[0], dtype=kind, device=group.device)
                alone = timer(partial(_multiply, weights, x, IN_A_ROW), IN_A_ROW)
                for size in sizes.message_bytes:
                    both = timer(partial(_multiply_and_sum, weights, x, size, collectives), IN_A_ROW)
                    messages.append(TimedMessage(group.size, size, max(both - alone, LEAST_SECONDS)))
                contention = _contention(timer, collectives, weights, x, alone, messages, sizes)
        launch = _launch_seconds(timer, kind) if group.device.type == "cuda" else 0.0
    collectives.close()
    return TimedGroup(group.size, chosen, environment(group), dtype, products, messages, contention, 1e6 * launch)


class _Timer:
    """A timer of functions on all ranks at once: the median of ``repeat`` samples, each of the slowest rank."""

    def __init__(self, group: Ranks, repeat: int) -> None:
        self.group, self.repeat = group, repeat

    def __call__(self, run: Callable[[], object], count: int, *, graph: bool = True) -> float:
        """Return the seconds of one of ``count`` parts.

        graph: on a GPU, one graph starts them all.
        """
        if graph and self.group.device.type == "cuda":
            run = capture(run, self.group.device, warm_ups=1)[0].replay
        samples = []
        for _ in range(self.repeat + 1):
            self.group.barrier()
            self._finish()
            begin = time.perf_counter()
            run()
            if graph:
                self._finish()
            samples.append(max(self.group.gather(time.perf_counter() - begin)) / count)
        return statistics.median(samples[1:])

    def _finish(self) -> None:
        if self.group.device.type == "cuda":
            torch.cuda.synchronize()


def _weights(width: int, pool_bytes: int, dtype: torch.dtype, device: torch.device) -> list[Linear]:
    """Return at least two weights, and as many as ``pool_bytes`` hold, but no more than are used in a row."""
    count = min(IN_A_ROW, max(2, pool_bytes // (width * width * dtype.itemsize)))
    return [Linear(torch.randn(width, width, dtype=dtype, device=device), pack=True) for _ in range(count)]


def _multiply(weights: list[Linear], x: torch.Tensor, count: int) -> None:
    for number in range(count):
        weights[number % len(weights)](x)


def _multiply_and_sum(weights: list[Linear], x: torch.Tensor, size: int, collectives: Collectives) -> None:
    """Sum a message of ``size`` bytes behind each product."""
    message = torch.zeros(size // x.dtype.itemsize, dtype=x.dtype, device=x.device)
    for number in range(IN_A_ROW):
        weights[number % len(weights)](x)
        collectives.all_reduce(message)


def _multiply_beside(weights: list[Linear], x: torch.Tensor, size: int, count: int, collectives: Collectives) -> None:
    """Multiply ``count`` times while a message of ``size`` bytes is in flight."""
    handle = collectives.all_reduce_async(torch.zeros(size // x.dtype.itemsize, dtype=x.dtype, device=x.device))
    _multiply(weights, x, count)
    handle.wait()


def _contention(
    timer: _Timer,
    collectives: Collectives,
    weights: list[Linear],
    x: torch.Tensor,
    product: float,
    messages: list[TimedMessage],
    sizes: TimedSizes,
) -> float:
    """Return the share by which a message in flight slows the products beside it: the mean over some sizes.

    A message of ``a`` seconds and longer compute of ``c`` take c + contention * a together.
    """
    slowed = []
    for message in messages:
        if message.bytes not in sizes.overlapped_bytes:
            continue
        count = max(1, round(COVER * message.seconds / product))
        both = timer(partial(_multiply_beside, weights, x, message.bytes, count, collectives), 1)
        slowed.append((both - count * product) / message.seconds)
    return min(0.9, max(0.0, statistics.fmean(slowed)))


def _launch_seconds(timer: _Timer, dtype: torch.dtype) -> float:
    """Return the host's time for a small operation that it starts by itself."""
    x, weight = (torch.ones(1, 64, dtype=dtype, device="cuda"), torch.ones(64, 64, dtype=dtype, device="cuda"))
    small = Linear(weight)
    return timer(partial(_multiply, [small], x, STARTS), STARTS, graph=False)
