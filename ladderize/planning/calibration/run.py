"""``ladderize calibrate`` from its options to its file: time or read, choose what is fitted, fit, keep."""

import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from ladderize.console import SILENT, Console, human_bytes
from ladderize.errors import UsageError, UserError
from ladderize.files.documents import check_writable, read_document, write_json
from ladderize.files.work import ABOUT, WorkFolder, work_folder
from ladderize.layout import OVERLAPPED
from ladderize.plan.hardware import DeviceSpec, known_engines, read_device
from ladderize.plan.passes import THIN_ROWS
from ladderize.planning.calibration.fit import FITTED, OF_A_LINK, FitResult, Residual, figure_kind, fit, frees_device
from ladderize.planning.calibration.observations import RUNTIME_ENGINES, Observation, Quantity
from ladderize.planning.calibration.options import CalibrateOptions, TimingsOptions
from ladderize.planning.calibration.timing import (
    CalibrationJob,
    RankTimings,
    TimedGroup,
    calibration_jobs,
    measure_jobs,
)
from ladderize.planning.calibration.timings import read_timings
from ladderize.ranks.device import check_device
from ladderize.ranks.environment import already_started, is_main_rank
from ladderize.runtime.collectives.links import (
    ASSUMED_CONTENTION,
    ASSUMED_ERROR,
    Interconnect,
    InterconnectRow,
    read_interconnect,
)
from ladderize.runtime.launch import check_group_size, run

# where a fit begins that knows nothing: GB/s, TFLOP/s, us for a kernel; us and GB/s of a link
BEGIN = {"cpu": (10.0, 0.1, 10.0), "cuda": (2000.0, 300.0, 3.0)}
BEGIN_LINK = 20.0, 5.0
# Ranks that compute wait for each other, and on a CPU for threads that have to wake up: over gloo a message of a pass
# takes twice as long as one alone. Passes are what is predicted, so a run's link is fitted to them.
UNFITTED_OF_RUN: tuple[Quantity, ...] = ("all_reduce",)
UNEVEN = 0.1  # of a time: as much as groups may differ before it is said
RATES = "matmul_tflop_s"  # of products; its name has a dtype behind it
SHARES = {"bandwidth_share", "matmul_share"}  # with both fitted, a device of a data sheet counts as calibrated
CACHES = Path("/sys/devices/system/cpu/cpu0/cache")


@dataclass(frozen=True)
class CalibrationDocument(FitResult):
    """What ``ladderize calibrate`` writes. ``--hardware`` reads ``device`` of it, ``--link`` reads ``link``, which is
    None where one rank was timed. options: of a run that timed; timings: of one that read timings which were there."""

    notes: list[str]
    observations: list[Observation]
    options: CalibrateOptions | None = None
    timings: TimingsOptions | None = None
    groups: list[TimedGroup] = field(default_factory=list)
    samples_ms: list[list[float]] = field(default_factory=list)


class CalibrationFolder(WorkFolder):
    """Timings of every group that is done, each in a file of its own."""

    COMMAND = "calibrate"
    CONTENT = (ABOUT, ".*.json.*", "ranks-*.json")
    ADVICE = "delete it to begin again"
    OPTION = "--out"


def calibrate(
    options: CalibrateOptions | TimingsOptions, *, out: Path | None = None, console: Console = SILENT
) -> CalibrationDocument:
    """Time what tells a device's and a link's figures apart, or read timings, and fit them; returns the document.

    out: the file that ``--hardware`` and ``--link`` take. Timings lie beside it until it is there, group by group, so
    that a killed run goes on when it is started again. Raises UsageError or UserError for what cannot be timed or
    read, and for figures that the timings leave open.
    """
    if out is not None:
        read = [*options.timings, options.link] if isinstance(options, TimingsOptions) else options.shapes
        check_writable(out, inputs=[*read, options.hardware])
    if isinstance(options, TimingsOptions):
        document = _from_timings(options)
    else:
        document = fit_run(options, _timed(options, out, console))
    if out is not None and is_main_rank():
        write_json(out, document.to_dict())
        if isinstance(options, CalibrateOptions):
            CalibrationFolder.tidy(work_folder(str(out), None), _identity(options))
    return document


# ---- timed here ----


def _timed(options: CalibrateOptions, out: Path | None, console: Console) -> list[RankTimings]:
    options.check()
    check_device(options.device)
    for ranks in options.tp_sizes:
        check_group_size(ranks, options.device)
    jobs = {ranks: calibration_jobs(options, ranks) for ranks in options.tp_sizes}
    if options.hardware is not None:  # what is wrong with it is found before minutes of timing
        read_device(options.hardware).peak_flop_s(jobs[options.tp_sizes[0]][0].specs[0].dtype)
    if out is None or already_started():
        return [_time(options, ranks, own, console) for ranks, own in jobs.items()]
    timed = []
    with CalibrationFolder(work_folder(str(out), None), _identity(options)) as folder:
        for ranks, own in jobs.items():
            kept = folder.folder / f"ranks-{ranks}.json"
            if kept.is_file():
                console.note(f"--tp-size {ranks} was timed before: {kept}")
                timed.append(RankTimings.from_dict(read_document(kept, "calibration's timings"), kept))
            else:
                timed.append(_time(options, ranks, own, console))
                write_json(kept, timed[-1].to_dict())
    return timed


def _time(options: CalibrateOptions, ranks: int, jobs: list[CalibrationJob], console: Console) -> RankTimings:
    if ranks > 1 and not already_started():
        console.note(f"starting {ranks} ranks")
    timed: RankTimings = run(measure_jobs, jobs, console, tp_size=ranks, device=options.device, threads=options.threads)
    return timed


def _identity(options: CalibrateOptions) -> dict[str, object]:
    """What a run times: all options but what the result is called, and the shapes' content."""
    sizes = [[job.specs[0].config for job in calibration_jobs(options, ranks)] for ranks in options.tp_sizes]
    return {"calibration": replace(options, name="", hardware=None).to_dict(), "shapes": sizes}


def fit_run(options: CalibrateOptions, timed: Sequence[RankTimings]) -> CalibrationDocument:
    """The document of what groups of ranks have timed."""
    observations = [seen for one in timed for seen in one.observations]
    memory = timed[0].group.environment.gpu_memory_bytes
    device = begin_device(options, observations, None if memory is None else memory / 2**30)
    link = _begin_link(options, timed)
    result = fit(observations, device, link, free_of_run(options, observations), unfitted=UNFITTED_OF_RUN)
    notes = [*_cache_notes(options, timed), *uneven_ranks(observations, result.residuals)]
    if link is not None:
        notes.append(
            "nothing is fitted to all-reduces alone: in a pass one takes as long as it is waited for, and that is what"
            " is predicted"
        )
    else:
        notes.append("one rank was timed, so the file has no link; time more with --tp-size, or name a link to plan")
    return CalibrationDocument(
        **vars(result),
        notes=notes,
        observations=observations,
        options=options,
        groups=[one.group for one in timed],
        samples_ms=[samples for one in timed for samples in one.samples_ms],
    )


def begin_device(
    options: CalibrateOptions, observations: Sequence[Observation], memory_gib: float | None
) -> DeviceSpec:
    """The device before its figures are fitted: peaks that are held where ``--hardware`` names it, else shares of 1 of
    what is measured."""
    source = "ladderize calibrate, on the device itself"
    engine = RUNTIME_ENGINES[options.device]
    if options.hardware is not None:
        known = read_device(options.hardware)
        return replace(known, name=options.name, engine=engine, calibrated=True, source=source)
    bandwidth, rate, kernel = BEGIN[options.device]
    rates = {seen.dtype: rate for seen in observations if seen.dtype is not None}
    return DeviceSpec(options.name, bandwidth, rates, memory_gib, 1.0, 1.0, kernel, 0.0, 0.05, engine, True, source)


def _begin_link(options: CalibrateOptions, timed: Sequence[RankTimings]) -> Interconnect | None:
    """A row for every number of ranks that sent something; None where there was one rank."""
    rows = []
    for one in sorted(timed, key=lambda one: one.group.ranks):
        sizes = [seen.message_bytes for seen in one.observations if seen.message_bytes is not None]
        if sizes:
            rows.append(InterconnectRow(one.group.ranks, *BEGIN_LINK, min(sizes), max(sizes)))
    backends = " and ".join(dict.fromkeys(one.group.backend for one in timed if one.group.ranks > 1))
    source = f"ladderize calibrate, on the link itself; {backends}"
    return Interconnect(options.name, rows, ASSUMED_CONTENTION, ASSUMED_ERROR, True, source) if rows else None


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
        low, high = THIN_ROWS
        thin = {low <= seen.workload.batch_size <= high for seen in observations if seen.workload is not None}
        free += [*(["thin_us"] if len(thin) == 2 else []), "launch_us"]
    return free + (["alpha_us", "bus_gb_s", "contention"] if any(seen.communicates for seen in observations) else [])


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


def _cache_notes(options: CalibrateOptions, timed: Sequence[RankTimings]) -> list[str]:
    """A model that fits into the processor's cache is read faster than one that does not."""
    largest, least = _largest_cache_bytes(), min(one.group.weight_bytes for one in timed)
    if options.device != "cpu" or largest is None or least > largest:
        return []
    return [
        f"the smallest model has {human_bytes(least)} of weights on a rank, and this processor says that its cache"
        f" holds {human_bytes(largest)}: a model that is larger than the cache may be read more slowly (time one with"
        " --shape)"
    ]


def _largest_cache_bytes() -> int | None:
    """Of the first core; None where the system does not say."""
    sizes = []
    for path in CACHES.glob("index*/size"):
        text = path.read_text().strip()
        unit = {"K": 1 << 10, "M": 1 << 20}.get(text[-1:], 1)
        if text.rstrip("KM").isdigit():
            sizes.append(int(text.rstrip("KM")) * unit)
    return max(sizes, default=None)


# ---- timed before ----


def _from_timings(options: TimingsOptions) -> CalibrationDocument:
    held = read_device(options.hardware)
    engine = options.engine or held.engine
    if engine not in known_engines():
        raise UserError(f"--engine {engine} is not one of {', '.join(known_engines())}")
    observations = [seen for path in options.timings for seen in read_timings(path, engine=engine, shape=options.shape)]
    source = f"ladderize calibrate --timings {','.join(path.name for path in options.timings)}"
    sending = sorted({seen.ranks for seen in observations if seen.communicates})
    link = None
    if options.link is not None:
        link = read_interconnect(options.link)
    elif sending:
        rows = [InterconnectRow(ranks, *BEGIN_LINK) for ranks in sending]
        link = Interconnect(options.name, rows, ASSUMED_CONTENTION, ASSUMED_ERROR, True, source)
    free, notes = _free_of_timings(options, observations, held, link, sending)
    result = fit(observations, held, link, free)
    (timed, *others) = sorted({seen.engine for seen in observations if seen.engine is not None})
    if frees_device(free):
        if others:
            raise UserError(
                f"--timings are of the engines {timed} and {' and '.join(others)}, and a device's figures go with one;"
                " name files of one engine"
            )
        calibrated = (held.calibrated and timed == held.engine) or SHARES.issubset(map(figure_kind, free))
        result = replace(result, device=replace(result.device, engine=timed, calibrated=calibrated, source=source))
    elif (timed, others) != (held.engine, []):
        names = " and ".join((timed, *others))
        notes.append(f"these timings are of the engine {names}, the device's figures of {held.engine}: see --engine")
    return CalibrationDocument(**vars(result), notes=notes, observations=observations, timings=options)


def _free_of_timings(
    options: TimingsOptions,
    observations: Sequence[Observation],
    held: DeviceSpec,
    link: Interconnect | None,
    sending: Sequence[int],
) -> tuple[list[str], list[str]]:
    """What is fitted to timings that are there, and what is said about it.

    The link's latency and bandwidth are free at every number of ranks that sends; contention where a layout overlaps;
    the device's shares where prefills and decode steps of two workloads were timed without communication.
    """
    _check_free(options.free, held, link, sending)
    if options.free:
        return list(options.free), [f"fitted, as --fit says: {', '.join(options.free)}"]
    free, notes = [], []
    if sending and options.link is None:
        *first, last = map(str, sending)
        counts = f"{', '.join(first)} and {last}" if first else last
        free += ["alpha_us", "bus_gb_s"]
        notes.append(f"fitted: latency and bandwidth of the link with {counts} ranks")
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
    return free, notes


def _check_free(names: Sequence[str], held: DeviceSpec, link: Interconnect | None, sending: Sequence[int]) -> None:
    """Raise UsageError for what ``--fit`` names and nothing can be fitted of. sending: numbers of ranks that do."""
    if len(set(names)) < len(names):
        raise UsageError("--fit names a figure twice; name each once")
    for name in names:
        kind, dot, dtype = name.partition(".")
        if kind not in FITTED or (dot and kind != RATES):
            raise UsageError(f"--fit {name} is not one of {', '.join(FITTED)}")
        if kind == RATES and dtype not in held.matmul_tflop_s:
            known = " or ".join(f"{RATES}.{one}" for one in held.matmul_tflop_s)
            raise UsageError(f"--fit {name} is of no dtype that {held.name} has a figure for; say {known}")
        if kind in OF_A_LINK and not sending:
            raise UsageError(f"--fit {name} needs timings of several ranks with communication; --timings have none")
        if kind in OF_A_LINK and kind != "contention" and link is not None and link.any_ranks is not None:
            raise UsageError(f"--fit {name} fits what --link gives by hand; leave one of them out")
