"""Which figures a calibration fits, and where they begin. Imports no torch."""

import dataclasses
import statistics
from collections.abc import Sequence

from ladderize.errors import UsageError
from ladderize.layout import OVERLAPPED
from ladderize.planning.calibration.document import RankTimings
from ladderize.planning.calibration.fit import FITTED, Residual
from ladderize.planning.calibration.observations import Observation, Quantity
from ladderize.planning.calibration.options import CalibrateOptions, TimingsOptions
from ladderize.planning.calibration.timed import RUNTIME_ENGINES
from ladderize.planning.hardware import DeviceSpec, read_device
from ladderize.planning.passes import THIN_ROWS
from ladderize.runtime.collectives.links import ASSUMED_CONTENTION, ASSUMED_ERROR, Interconnect, InterconnectRow

LINK_FIGURES = ("alpha_us", "bus_gb_s", "contention")
# where a fit begins that knows nothing: GB/s, TFLOP/s, us for a kernel
BEGIN = {"cpu": (10.0, 0.1, 10.0), "cuda": (2000.0, 300.0, 3.0)}
# Ranks that compute wait for each other, and on a CPU for threads that have to wake up: over gloo a message of a pass
# takes twice as long as one alone. Passes are what is predicted, so a run's link is fitted to them.
UNFITTED_OF_RUN: tuple[Quantity, ...] = ("all_reduce",)
BEGIN_LINK = 20.0, 5.0  # us, GB/s
UNEVEN = 0.1  # of a time: as much as groups may differ before it is said


def begin_device(
    options: CalibrateOptions, observations: Sequence[Observation], memory_gib: float | None = None
) -> DeviceSpec:
    """The device before its figures are fitted: peaks that are held where ``--hardware`` names it, else shares of 1 of
    what is measured."""
    source = "ladderize calibrate, on the device itself"
    engine = RUNTIME_ENGINES[options.device]
    if options.hardware is not None:
        known = read_device(options.hardware)
        return dataclasses.replace(known, name=options.name, engine=engine, calibrated=True, source=source)
    bandwidth, rate, kernel = BEGIN[options.device]
    rates = {seen.dtype: rate for seen in observations if seen.dtype is not None}
    return DeviceSpec(options.name, bandwidth, rates, memory_gib, 1.0, 1.0, kernel, 0.0, 0.05, engine, True, source)


def begin_link(options: CalibrateOptions, timed: Sequence[RankTimings]) -> Interconnect | None:
    """A row for every number of ranks that sent something; None where there was one rank."""
    rows = []
    for one in timed:
        sizes = [seen.message_bytes for seen in one.observations if seen.message_bytes is not None]
        if sizes:
            rows.append(InterconnectRow(one.group.ranks, *BEGIN_LINK, min(sizes), max(sizes)))
    if not rows:
        return None
    backends = " and ".join(dict.fromkeys(one.group.backend for one in timed if one.group.ranks > 1))
    rows.sort(key=lambda row: row.ranks)
    return Interconnect(
        options.name,
        rows,
        ASSUMED_CONTENTION,
        ASSUMED_ERROR,
        True,
        f"ladderize calibrate, on the link itself; {backends}",
    )


def free_of_run(options: CalibrateOptions, observations: Sequence[Observation]) -> list[str]:
    """What a run of ``ladderize calibrate`` fits."""
    if options.hardware is None:
        dtypes = dict.fromkeys(seen.dtype for seen in observations if seen.dtype is not None)
        free = ["memory_bandwidth_gb_s", *(f"matmul_tflop_s.{dtype}" for dtype in dtypes), "kernel_us"]
    else:
        free = ["bandwidth_share", "matmul_share", "kernel_us"]
    if options.device == "cpu":
        free.append("serial_share")
    else:
        free += ["thin_us"] * _has_thin(observations) + ["launch_us"]
    return free + (list(LINK_FIGURES) if any(seen.communicates for seen in observations) else [])


def free_of_timings(
    options: TimingsOptions, observations: Sequence[Observation], link: Interconnect | None
) -> tuple[Interconnect | None, list[str], list[str]]:
    """What is fitted to timings that are there: the link that is begun with, the free figures, and what is said about
    them.

    The link's latency and bandwidth are free at every number of ranks that sends; contention where a layout overlaps;
    the device's shares where prefills and decode steps of two workloads were timed without communication.
    """
    sending = sorted({seen.ranks for seen in observations if seen.communicates})
    begin = link
    if sending and options.link is None:
        rows = [InterconnectRow(ranks, *BEGIN_LINK) for ranks in sending]
        source = f"ladderize calibrate --timings {','.join(path.name for path in options.timings)}"
        begin = Interconnect(options.name, rows, ASSUMED_CONTENTION, ASSUMED_ERROR, True, source)
    if options.free:
        return begin, _said(options, sending), [f"fitted, as --fit says: {', '.join(options.free)}"]
    free, notes = [], []
    if sending and options.link is None:
        free += ["alpha_us", "bus_gb_s"]
        notes.append(f"fitted: latency and bandwidth of the link with {_counts(sending)} ranks")
        if any(OVERLAPPED in (seen.attention_sync or []) + (seen.mlp_sync or []) for seen in observations):
            free.append("contention")
            notes.append("fitted: contention, from layouts that overlap")
        else:
            notes.append(f"held: contention at {ASSUMED_CONTENTION:g}, since no layout here overlaps")
    silent = [seen for seen in observations if not seen.communicates]
    passes = {(seen.ranks, str(seen.config), seen.workload) for seen in silent}
    if len(passes) > 1 and {"prefill", "decode"} <= {seen.quantity for seen in silent}:
        free += ["bandwidth_share", "matmul_share"]
        notes.append("fitted: the device's shares of its peaks, from passes without communication")
    else:
        notes.append(f"held: the figures of {options.hardware}; few passes here were timed without communication")
    if not free:
        raise UsageError(
            "--timings leave nothing to fit: they have no passes of several ranks, or --link holds their link, and less"
            " than two workloads without communication; leave --link out, or add such timings"
        )
    return begin, free, notes


def _said(options: TimingsOptions, sending: Sequence[int]) -> list[str]:
    for name in options.free:
        kind = name.partition(".")[0]
        if kind not in FITTED:
            raise UsageError(f"--fit {name} is not one of {', '.join(FITTED)}")
        if (kind in LINK_FIGURES or kind == "alpha_per_rank_us") and not sending:
            raise UsageError(f"--fit {name} needs timings of several ranks with communication; --timings have none")
    return list(options.free)


def uneven_ranks(observations: Sequence[Observation], residuals: Sequence[Residual]) -> list[str]:
    """What is to be said where one device for all numbers of ranks is wrong: ranks that share a memory slow each other
    down."""
    errors: dict[int, list[float]] = {}
    for seen, residual in zip(observations, residuals, strict=True):
        if seen.quantity == "decode" and not seen.communicates:
            errors.setdefault(seen.ranks, []).append(residual.relative_error)
    means = {ranks: statistics.fmean(own) for ranks, own in sorted(errors.items())}
    if len(means) < 2 or max(means.values()) - min(means.values()) < UNEVEN:
        return []
    listed = ", ".join(f"{mean:+.0%} with {ranks}" for ranks, mean in means.items())
    return [
        f"decode steps without communication are predicted unevenly by the number of ranks ({listed}): ranks share a"
        " memory or a processor, and one device does not fit all; calibrate with only the --tp-size that you plan for"
    ]


def _has_thin(observations: Sequence[Observation]) -> bool:
    low, high = THIN_ROWS
    batches = {seen.workload.batch_size for seen in observations if seen.workload is not None}
    return any(low <= batch <= high for batch in batches) and not all(low <= batch <= high for batch in batches)


def _counts(counts: Sequence[int]) -> str:
    *first, last = map(str, counts)
    return f"{', '.join(first)} and {last}" if first else last
