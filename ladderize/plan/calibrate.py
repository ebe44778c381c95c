"""The command ``ladderize calibrate``: products and messages are timed, and straight lines are fitted to the times.

A product of one row takes a start and its bytes over the bandwidth, one of many rows its operations over the rate, a
message a latency and its bytes over a bandwidth. Lines are fitted to relative errors: a microsecond and a second weigh
alike. Weights alternate among more than any cache holds. A message is timed behind a product, since in a pass ranks
also wait for each other: over gloo it takes twice as long there as alone.
"""

import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import NamedTuple

import numpy as np
import torch

from ladderize.console import SILENT, Console
from ladderize.files.documents import check_writable, write_json
from ladderize.files.records import Record
from ladderize.memory import check_room
from ladderize.plan.hardware import DeviceSpec, read_device
from ladderize.plan.options import CalibrateOptions
from ladderize.plan.passes import THIN_ROWS, WIDTHS, product_seconds
from ladderize.ranks.device import check_device, default_device
from ladderize.ranks.environment import is_main_rank
from ladderize.ranks.group import Ranks
from ladderize.runtime.bench.document import Environment, environment
from ladderize.runtime.bench.rounds import seconds_together
from ladderize.runtime.collectives.base import Collectives
from ladderize.runtime.collectives.choose import choose
from ladderize.runtime.collectives.links import Interconnect, InterconnectRow, ring_share
from ladderize.runtime.launch import run
from ladderize.runtime.layers import Linear
from ladderize.runtime.operations import Operations
from ladderize.runtime.spec import choose_operations

Product = Callable[[torch.Tensor], torch.Tensor]

NAME = "this machine"  # of the device and the link
IN_A_ROW = 12  # products or messages of one sample: after a barrier ranks do not start at once
ROUNDS = 8  # of a time; the first is not counted
STARTS = 1000  # operations that the host starts, of one sample
COVER = 1.5  # times as long as a message: the products that run beside it
LEAST_SECONDS = 1e-7  # the least time of a message, where timings scatter by more than it takes
LEAST_ERROR = 0.05  # of a time: products and messages are most of a pass, not all of it
LEAST_ALPHA_US, MOST_GB_S = 0.05, 1e5
MESSAGES = (8 << 10, 64 << 10, 512 << 10, 4 << 20)  # bytes; products run beside the larger half


class TimedSizes(NamedTuple):
    """The products that are timed."""

    widths: tuple[int, ...]  # of square weights
    rows: tuple[int, ...]  # of a decode step of one text, of some texts, of 64, and of a prompt
    pool_bytes: int  # of all weights of one width


SIZES = {
    "cpu": TimedSizes((1024, 2048, 4096), (1, 8, 64, 256), 256 << 20),
    "cuda": TimedSizes((2048, 4096, 8192, 16384), (1, 16, 64, 8192), 2 << 30),
}


class TimedProduct(NamedTuple):
    """The median time of [rows, width] times [width, width], on each rank at once."""

    rows: int
    width: int
    seconds: float


class TimedMessage(NamedTuple):
    """The median time of an all-reduce behind a product."""

    bytes: int
    seconds: float


class TimedGroup(NamedTuple):
    """All that a group of ranks has timed."""

    ranks: int
    backend: str
    environment: Environment
    products: list[TimedProduct]
    messages: list[TimedMessage]
    contention: float  # the share by which a message in flight slows the compute beside it; 0 where nothing is sent
    launch_us: float  # the host's time for an operation that it starts by itself


@dataclass(frozen=True)
class CalibrationDocument(Record):
    """The file of ``ladderize calibrate``, which --hardware and --link read; ``link``: None where one rank was
    timed."""

    device: DeviceSpec
    link: Interconnect | None
    environment: Environment
    options: CalibrateOptions


def calibrate(options: CalibrateOptions, *, console: Console = SILENT) -> CalibrationDocument:
    """Time products and messages, fit a device and a link, and write them; return the document."""
    kind, dtype = options.device or default_device(), options.compute_dtype
    check_device(kind)
    check_writable(options.out, inputs=[options.hardware])
    sheet = None if options.hardware is None else read_device(options.hardware)
    if sheet is not None:
        sheet.reached_flop_s(dtype)  # raises where its data sheet has none
    timed = (SIZES[kind], dtype, options.backend, console)
    groups = [run(time_group, *timed, tp_size=ranks, device=kind) for ranks in options.tp_sizes]
    device = fit_device(kind, dtype, groups, sheet)
    device.check("the fitted figures" if sheet is None else f"this machine is no {options.hardware} (--hardware)")
    document = CalibrationDocument(device, fit_link(groups), groups[0].environment, replace(options, device=kind))
    if is_main_rank():
        write_json(options.out, document.to_dict())
    return document


def time_group(group: Ranks, sizes: TimedSizes, dtype: str, backend: str, console: Console) -> TimedGroup:
    """Return the times of products and messages. All ranks call it."""
    kind: torch.dtype = getattr(torch, dtype)
    widest = sizes.rows[-1] * sizes.widths[-1] * kind.itemsize
    check_room(2 * sizes.pool_bytes + 3 * widest, group.device, "calibrate", "free some", processes=group.local_size)
    timer = partial(seconds_together, group, rounds=ROUNDS)
    collectives, chosen = choose(backend, group, max_bytes=max(MESSAGES))
    operations = choose_operations(group, kind)
    products, messages, slowed, launch = [], [], [], 0.0
    with torch.inference_mode():
        with console.progress(f"timing {group.size} rank{'s' * (group.size > 1)}", len(sizes.widths)) as advance:
            for width in sizes.widths:
                pool = _pool(width, sizes.pool_bytes, kind, operations, group.device)
                for rows in sizes.rows:
                    x = torch.randn(rows, width, dtype=kind, device=group.device)
                    products.append(TimedProduct(rows, width, timer(partial(_multiply, pool, x), IN_A_ROW)))
                advance(1)
        if group.size > 1:
            with console.stage("timing all-reduces"):
                pool = _pool(sizes.widths[0], sizes.pool_bytes, kind, operations, group.device)
                x = torch.randn(1, sizes.widths[0], dtype=kind, device=group.device)
                product = timer(partial(_multiply, pool, x), IN_A_ROW)
                for size in MESSAGES:
                    message = torch.zeros(size // kind.itemsize, dtype=kind, device=group.device)
                    sums = partial(_multiply, pool, x, after=partial(collectives.all_reduce, message))
                    both = timer(sums, IN_A_ROW)
                    messages.append(TimedMessage(size, max(both - product, LEAST_SECONDS)))
                    if size in MESSAGES[len(MESSAGES) // 2 :]:
                        # a message of ``a`` seconds and longer compute of ``c`` take c + contention * a together
                        count = max(1, round(COVER * messages[-1].seconds / product))
                        hidden = timer(partial(_multiply_beside, pool, x, message, collectives, count), 1)
                        slowed.append((hidden - count * product) / messages[-1].seconds)
        if group.device.type == "cuda":
            small, weight = (torch.ones(rows, 64, dtype=kind, device="cuda") for rows in (1, 64))
            launch = timer(partial(_multiply, [Linear(weight)], small, STARTS), STARTS, graph=False)
    collectives.settle()
    contention = min(0.9, max(0.0, statistics.fmean(slowed))) if slowed else 0.0
    return TimedGroup(group.size, chosen, environment(group), products, messages, contention, 1e6 * launch)


def _pool(
    width: int, pool_bytes: int, dtype: torch.dtype, operations: Operations, device: torch.device
) -> list[Product]:
    """Return the runtime's products with at least two weights, and as many as ``pool_bytes`` hold, but no more than are
    used in a row."""
    count = min(IN_A_ROW, max(2, pool_bytes // (width * width * dtype.itemsize)))
    weights = (torch.randn(width, width, dtype=dtype, device=device) for _ in range(count))
    return [partial(operations.product, Linear(weight, pack=True)) for weight in weights]


def _multiply(
    pool: Sequence[Product], x: torch.Tensor, count: int = IN_A_ROW, after: Callable[[], object] = lambda: None
) -> None:
    for number in range(count):
        pool[number % len(pool)](x)
        after()


def _multiply_beside(
    pool: Sequence[Product], x: torch.Tensor, message: torch.Tensor, collectives: Collectives, count: int
) -> None:
    """Multiply ``count`` times while a message is in flight."""
    handle = collectives.all_reduce_async(message)
    _multiply(pool, x, count)
    handle.wait()


def fit_device(kind: str, dtype: str, groups: Sequence[TimedGroup], sheet: DeviceSpec | None = None) -> DeviceSpec:
    """Return the device whose figures are fitted to the products of all groups; a data ``sheet`` is kept."""
    products = [product for group in groups for product in group.products]
    most = max(product.rows for product in products)
    single = [product for product in products if product.rows == 1]
    many = [product for product in products if product.rows == most]
    few = [product for product in products if THIN_ROWS[0] <= product.rows <= min(THIN_ROWS[1], most - 1)]
    per_byte, start = _line([WIDTHS[dtype] * product.width**2 for product in single], single)
    per_operation, _ = _line([2 * product.rows * product.width**2 for product in many], many)
    bandwidth, rate = 1e-9 / per_byte, 1e-12 / per_operation
    memory = groups[0].environment.gpu_memory_bytes
    speeds = "runtime-cpu" if kind == "cpu" else "runtime"
    if sheet is None:
        gib = None if memory is None else memory / 2**30
        sheet = DeviceSpec(NAME, bandwidth, {dtype: rate}, gib, 1.0, 1.0, 0.0, 0.0, LEAST_ERROR, speeds, True, "")
    device = replace(
        sheet,
        name=NAME,
        bandwidth_share=min(1.0, bandwidth / sheet.memory_bandwidth_gb_s),
        matmul_share=min(1.0, rate / sheet.matmul_tflop_s[dtype]),
        kernel_us=1e6 * start,
        thin_us=0.0,
        thin_share=0.0,
        serial_share=0.0,
        speeds=speeds,
        calibrated=True,
        source="ladderize calibrate, on the device itself",
        launch_us=statistics.fmean(group.launch_us for group in groups),
    )
    if few and kind == "cpu":  # a core does arithmetic and waits for memory in turns

        def misfit(share: float) -> float:
            offs = [_off(replace(device, serial_share=share), dtype, product) for product in (*few, *many)]
            return sum(math.log1p(off) ** 2 for off in offs)

        device = replace(device, serial_share=min((number / 40 for number in range(41)), key=misfit))
    elif few:
        extra = statistics.median(-_off(device, dtype, product) * product.seconds for product in few)
        device = replace(device, thin_us=1e6 * max(0.0, extra))
    return replace(device, relative_error=_spread([_off(device, dtype, product) for product in products]))


def _line(x: Sequence[float], timed: Sequence[TimedProduct | TimedMessage]) -> tuple[float, float]:
    """Return the slope and the intercept of the line of least relative errors, neither below 0."""
    seconds = np.array([times.seconds for times in timed])
    slope, start = np.polyfit(x, seconds, 1, w=1 / seconds) if len(x) > 1 else (seconds[0] / x[0], 0.0)
    if start < 0 or slope <= 0:  # through the origin
        slope, start = 1 / np.mean(np.array(x) / seconds), 0.0
    return float(slope), float(start)


def _off(device: DeviceSpec, dtype: str, product: TimedProduct) -> float:
    """Return fitted over timed seconds of a product, its start included, less 1."""
    side, width, flop_s = product.width, WIDTHS[dtype], device.reached_flop_s(dtype)
    fitted = product_seconds(device, product.rows, side, side, width, flop_s, read=width)
    return (fitted + 1e-6 * device.kernel_us) / product.seconds - 1


def fit_link(groups: Sequence[TimedGroup]) -> Interconnect | None:
    """Return a link with a row for every number of ranks; None where nothing was sent."""
    rows, errors = [], []
    sending = sorted((group for group in groups if group.messages), key=lambda group: group.ranks)
    for group in sending:
        sizes = [message.bytes for message in group.messages]
        per_byte, start = _line(sizes, group.messages)
        bus = min(MOST_GB_S, 1e-9 / per_byte * ring_share(group.ranks))
        rows.append(InterconnectRow(group.ranks, max(LEAST_ALPHA_US, 1e6 * start), bus, min(sizes), max(sizes)))
        errors += [(start + per_byte * message.bytes) / message.seconds - 1 for message in group.messages]
    if not rows:
        return None
    contention = statistics.fmean(group.contention for group in sending)
    backends = " and ".join(dict.fromkeys(group.backend for group in sending))
    source = f"ladderize calibrate, on the link itself; {backends}"
    return Interconnect(NAME, rows, contention, _spread(errors), True, source)


def _spread(errors: Sequence[float]) -> float:
    """Return the relative standard deviation of times about the fit, between LEAST_ERROR and 1."""
    return min(1.0, max(LEAST_ERROR, math.sqrt(sum(error**2 for error in errors) / max(1, len(errors) - 2))))
