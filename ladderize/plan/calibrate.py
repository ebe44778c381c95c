"""The command ``ladderize calibrate``: products and messages are timed, and straight lines are fitted to the times.

A product of one row takes a start and its bytes over the bandwidth. A product of many rows takes its operations over
the rate. A message takes a latency and its bytes over a bandwidth. A line is fitted to relative errors, so that a
microsecond and a second weigh alike.
"""

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from ladderize.console import SILENT, Console
from ladderize.files.documents import check_writable, write_json
from ladderize.files.records import Record
from ladderize.plan.hardware import DeviceSpec, read_device
from ladderize.plan.options import CalibrateOptions
from ladderize.plan.passes import THIN_ROWS, WIDTHS, product_seconds
from ladderize.plan.timing import SIZES, TimedGroup, TimedMessage, TimedProduct, time_group
from ladderize.ranks.device import check_device
from ladderize.ranks.environment import is_main_rank
from ladderize.runtime.collectives.links import (
    ASSUMED_CONTENTION,
    Interconnect,
    InterconnectRow,
    ring_share,
)
from ladderize.runtime.launch import check_group_size, run

LEAST_ERROR = 0.05  # of a time: products and messages are most of a pass, not all of it
UNEVEN = 0.1  # of a time: the largest difference of groups of ranks without a note
LEAST_ALPHA_US, MOST_GB_S = 0.05, 1e5
RUNTIME_ENGINES = {"cpu": "runtime-cpu", "cuda": "runtime"}  # the names of ladderize's own runtime on a device
SERIAL_SHARES = np.linspace(0.0, 1.0, 41)


@dataclass(frozen=True)
class CalibrationDocument(Record):
    """The file of ``ladderize calibrate``. ``--hardware`` reads ``device`` of it, and ``--link`` reads ``link``, which
    is None where one rank was timed."""

    device: DeviceSpec
    link: Interconnect | None
    groups: list[TimedGroup]
    notes: list[str]
    options: CalibrateOptions


def calibrate(options: CalibrateOptions, *, out: Path | None = None, console: Console = SILENT) -> CalibrationDocument:
    """Time products and messages, and fit a device and a link; return the document.

    out: the file to write.

    Raises UsageError or UserError for what cannot be timed.
    """
    options.check()
    check_device(options.device)
    if out is not None:
        check_writable(out, inputs=[options.hardware])
    dtype = "bfloat16" if options.dtype == "auto" else options.dtype
    known = None if options.hardware is None else read_device(options.hardware)
    if known is not None:
        known.peak_flop_s(dtype)
    for ranks in options.tp_sizes:
        check_group_size(ranks, options.device)
    groups = []
    for ranks in options.tp_sizes:
        how = (SIZES[options.device], dtype, options.backend, options.repeat, console)
        groups.append(run(time_group, *how, tp_size=ranks, device=options.device, threads=options.threads))
    document = fit_groups(options, groups, known)
    if out is not None and is_main_rank():
        write_json(out, document.to_dict())
    return document


# ---- the fit ----


def fit_groups(
    options: CalibrateOptions, groups: Sequence[TimedGroup], known: DeviceSpec | None = None
) -> CalibrationDocument:
    """Return the document of the figures that are fitted to the times of groups of ranks.

    known: a device whose data sheet is kept.
    """
    device, launch = _fitted_device(options, groups, known), statistics.fmean(one.launch_us for one in groups)
    device = replace(device, launch_us=launch)
    dtype = groups[0].dtype

    def fitted(one: TimedProduct) -> TimedProduct:
        return replace(one, fitted_seconds=_product_seconds(device, dtype, one))

    groups = [replace(group, products=[fitted(one) for one in group.products]) for group in groups]
    device = replace(device, relative_error=max(LEAST_ERROR, _spread([p for one in groups for p in one.products])))
    link, groups = _fitted_link(options, groups)
    notes = _uneven(groups)
    if link is None:
        notes.append("one rank was timed, so the file has no link; time more with --tp-size, or name a link to plan")
    return CalibrationDocument(device, link, groups, notes, options)


def _line(x: Sequence[float], seconds: Sequence[float]) -> tuple[float, float]:
    """Return the slope and the intercept of the line of least relative errors, neither below 0."""
    slope, start = np.polyfit(x, seconds, 1, w=1 / np.array(seconds)) if len(x) > 1 else (seconds[0] / x[0], 0.0)
    if start < 0 or slope <= 0:  # through the origin
        slope, start = 1 / float(np.mean(np.array(x) / np.array(seconds))), 0.0
    return float(slope), float(start)


def _fitted_device(options: CalibrateOptions, groups: Sequence[TimedGroup], known: DeviceSpec | None) -> DeviceSpec:
    dtype, products = groups[0].dtype, [one for group in groups for one in group.products]
    width, most = WIDTHS[dtype], max(one.rows for one in products)
    single = [one for one in products if one.rows == 1]
    many = [one for one in products if one.rows == most]
    per_byte, start = _line([width * one.width**2 for one in single], [one.seconds for one in single])
    per_operation, _ = _line([2 * one.rows * one.width**2 for one in many], [one.seconds for one in many])
    bandwidth, rate = 1e-9 / per_byte, 1e-12 / per_operation
    memory = groups[0].environment.gpu_memory_bytes
    device = DeviceSpec(
        name=options.name,
        memory_bandwidth_gb_s=bandwidth,
        matmul_tflop_s={dtype: rate},
        memory_gib=None if memory is None else memory / 2**30,
        bandwidth_share=1.0,
        matmul_share=1.0,
        kernel_us=1e6 * start,
        thin_us=0.0,
        relative_error=LEAST_ERROR,
        engine=RUNTIME_ENGINES[options.device],
        calibrated=True,
        source="ladderize calibrate, on the device itself",
    )
    if known is not None:
        device = replace(
            known,
            name=options.name,
            bandwidth_share=min(1.0, bandwidth / known.memory_bandwidth_gb_s),
            matmul_share=min(1.0, 1e12 * rate / known.peak_flop_s(dtype)),
            kernel_us=device.kernel_us,
            thin_us=0.0,
            thin_share=0.0,
            serial_share=0.0,
            engine=device.engine,
            calibrated=True,
            source=device.source,
        )
    few = [one for one in products if THIN_ROWS[0] <= one.rows <= THIN_ROWS[1] and one.rows < most]
    if not few:
        return device
    if options.device == "cpu":  # a core does arithmetic and waits for memory in turns
        every = [replace(device, serial_share=float(share)) for share in SERIAL_SHARES]
        return min(every, key=lambda one: sum(_off(one, dtype, product) ** 2 for product in (*few, *many)))
    more = statistics.median(one.seconds - _product_seconds(device, dtype, one) for one in few)
    return replace(device, thin_us=1e6 * max(0.0, more))


def _product_seconds(device: DeviceSpec, dtype: str, one: TimedProduct) -> float:
    """Return the seconds of a product on the fitted device, its start included."""
    width, flop_s = WIDTHS[dtype], device.peak_flop_s(dtype) * device.matmul_share
    product = product_seconds(
        device, one.rows, one.width, one.width, weight=width, read=width, width=width, flop_s=flop_s
    )
    return product + 1e-6 * device.kernel_us


def _off(device: DeviceSpec, dtype: str, one: TimedProduct) -> float:
    return math.log(_product_seconds(device, dtype, one) / one.seconds)


def _fitted_link(
    options: CalibrateOptions, groups: Sequence[TimedGroup]
) -> tuple[Interconnect | None, list[TimedGroup]]:
    """Return a link with a row for every number of ranks that sent something, and the groups with fitted messages."""
    rows, after = [], []
    for group in groups:
        if group.messages:
            per_byte, start = _line([one.bytes for one in group.messages], [one.seconds for one in group.messages])
            sizes = [one.bytes for one in group.messages]
            bus = min(MOST_GB_S, 1e-9 / per_byte * ring_share(group.ranks))
            rows.append(InterconnectRow(group.ranks, max(LEAST_ALPHA_US, 1e6 * start), bus, min(sizes), max(sizes)))
            messages = [replace(one, fitted_seconds=start + per_byte * one.bytes) for one in group.messages]
            group = replace(group, messages=messages)
        after.append(group)
    if not rows:
        return None, after
    contentions = [one.contention for one in groups if one.contention is not None]
    backends = " and ".join(dict.fromkeys(one.backend for one in groups if one.messages))
    link = Interconnect(
        options.name,
        sorted(rows, key=lambda row: row.ranks),
        statistics.fmean(contentions) if contentions else ASSUMED_CONTENTION,
        min(1.0, max(LEAST_ERROR, _spread([one for group in after for one in group.messages]))),
        True,
        f"ladderize calibrate, on the link itself; {backends}",
    )
    return link, after


def relative_errors(timed: Sequence[TimedProduct | TimedMessage]) -> list[float]:
    """Return fitted over timed seconds, less 1."""
    return [one.fitted_seconds / one.seconds - 1 for one in timed]


def _spread(timed: Sequence[TimedProduct | TimedMessage]) -> float:
    """Return the relative standard deviation of times about the fit."""
    errors = relative_errors(timed)
    return min(1.0, math.sqrt(sum(error**2 for error in errors) / max(1, len(errors) - 2)))


def _uneven(groups: Sequence[TimedGroup]) -> list[str]:
    """Return a note where one device does not fit all numbers of ranks: ranks that share a memory slow each other
    down."""
    means = {group.ranks: statistics.fmean(relative_errors(group.products)) for group in groups}
    if len(means) < 2 or max(means.values()) - min(means.values()) < UNEVEN:
        return []
    listed = ", ".join(f"{mean:+.0%} with {ranks}" for ranks, mean in sorted(means.items()))
    return [
        f"products are predicted unevenly by the number of ranks ({listed}): ranks share a memory or a processor, and"
        " one device does not fit all; calibrate with only the --tp-size that you plan for"
    ]
