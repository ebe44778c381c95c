"""``ladderize calibrate`` from its options to its file: time, fit, keep."""

import dataclasses
from pathlib import Path

from ladderize.console import SILENT, Console, human_bytes
from ladderize.errors import UserError
from ladderize.files.documents import check_writable, read_document, write_json
from ladderize.files.work import ABOUT, WorkFolder, work_folder
from ladderize.planning.calibration.document import CalibrationDocument, RankTimings
from ladderize.planning.calibration.figures import (
    UNFITTED_OF_RUN,
    begin_device,
    begin_link,
    free_of_run,
    free_of_timings,
    uneven_ranks,
)
from ladderize.planning.calibration.fit import figure_kind, fit, frees_device
from ladderize.planning.calibration.jobs import CalibrationJob, calibration_jobs
from ladderize.planning.calibration.measure import measure_jobs
from ladderize.planning.calibration.options import CalibrateOptions, TimingsOptions
from ladderize.planning.calibration.timings import read_timings
from ladderize.planning.hardware import known_engines, read_device
from ladderize.ranks.device import check_device
from ladderize.ranks.environment import is_main_rank
from ladderize.ranks.group import already_started
from ladderize.runtime.collectives.links import read_interconnect
from ladderize.runtime.launch import check_group_size, run

SHARES = {"bandwidth_share", "matmul_share"}  # with both fitted, a device of a data sheet counts as calibrated
CACHES = Path("/sys/devices/system/cpu/cpu0/cache")


class CalibrationFolder(WorkFolder):
    """Timings of every group that is done, each in a file of its own."""

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
        check_writable(out)
    if isinstance(options, TimingsOptions):
        document = _from_timings(options)
    else:
        document = _from_run(options, out, console)
    if out is not None and is_main_rank():
        write_json(out, document.to_dict())
        if isinstance(options, CalibrateOptions):
            CalibrationFolder.tidy(work_folder(str(out), None), _identity(options))
    return document


# ---- timed here ----


def _from_run(options: CalibrateOptions, out: Path | None, console: Console) -> CalibrationDocument:
    options.check()
    check_device(options.device)
    for ranks in options.tp_sizes:
        check_group_size(ranks, options.device)
    jobs = {ranks: calibration_jobs(options, ranks) for ranks in options.tp_sizes}
    if options.hardware is not None:  # what is wrong with it is found before minutes of timing
        read_device(options.hardware).peak_flop_s(jobs[options.tp_sizes[0]][0].specs[0].dtype)
    if out is None or already_started():
        timed = [_time(options, ranks, jobs[ranks], console) for ranks in options.tp_sizes]
    else:
        timed = []
        with CalibrationFolder(work_folder(str(out), None), _identity(options)) as folder:
            for ranks in options.tp_sizes:
                kept = folder.folder / f"ranks-{ranks}.json"
                if kept.is_file():
                    console.note(f"--tp-size {ranks} was timed before: {kept}")
                    timed.append(RankTimings.from_dict(read_document(kept, "calibration's timings"), kept))
                else:
                    timed.append(_time(options, ranks, jobs[ranks], console))
                    write_json(kept, timed[-1].to_dict())
    return _fitted(options, timed)


def _time(options: CalibrateOptions, ranks: int, jobs: list[CalibrationJob], console: Console) -> RankTimings:
    if ranks > 1 and not already_started():
        console.note(f"starting {ranks} ranks")
    timed: RankTimings = run(measure_jobs, jobs, console, tp_size=ranks, device=options.device, threads=options.threads)
    return timed


def _identity(options: CalibrateOptions) -> dict[str, object]:
    """What a run times: all options but what the result is called, and the shapes' content."""
    sizes = [[job.specs[0].config for job in calibration_jobs(options, ranks)] for ranks in options.tp_sizes]
    plain = dataclasses.replace(options, name="", hardware=None).to_dict()
    return {"calibration": plain, "shapes": sizes}


def _fitted(options: CalibrateOptions, timed: list[RankTimings]) -> CalibrationDocument:
    observations = [seen for one in timed for seen in one.observations]
    memory = timed[0].group.environment.gpu_memory_bytes
    device = begin_device(options, observations, None if memory is None else memory / 2**30)
    link = begin_link(options, timed)
    result = fit(observations, device, link, free_of_run(options, observations), unfitted=UNFITTED_OF_RUN)
    assert result.device is not None
    notes = [*_cache_notes(options, timed), *uneven_ranks(observations, result.residuals)]
    if link is not None:
        notes.append(
            "nothing is fitted to all-reduces alone: in a pass one takes as long as it is waited for, and that is what"
            " is predicted"
        )
    else:
        notes.append("one rank was timed, so the file has no link; time more with --tp-size, or name a link to plan")
    return CalibrationDocument(
        device=result.device,
        link=result.interconnect,
        figures=result.figures,
        mean_error=result.mean_error,
        worst_error=result.worst_error,
        notes=notes,
        residuals=result.residuals,
        observations=observations,
        options=options,
        groups=[one.group for one in timed],
        samples_ms=[samples for one in timed for samples in one.samples_ms],
    )


def _cache_notes(options: CalibrateOptions, timed: list[RankTimings]) -> list[str]:
    """A model that fits into the processor's cache is read faster than one that does not."""
    largest, least = largest_cache_bytes(), min(one.group.weight_bytes for one in timed)
    if options.device != "cpu" or largest is None or least > largest:
        return []
    return [
        f"the smallest model has {human_bytes(least)} of weights on a rank, and this processor says that its cache"
        f" holds {human_bytes(largest)}: a model that is larger than the cache may be read more slowly (time one with"
        " --shape)"
    ]


def largest_cache_bytes() -> int | None:
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
    device = read_device(options.hardware)
    engine = options.engine or device.engine
    if engine not in known_engines():
        raise UserError(f"--engine {engine} is not one of {', '.join(known_engines())}")
    observations = [seen for path in options.timings for seen in read_timings(path, engine=engine, shape=options.shape)]
    link = None if options.link is None else read_interconnect(options.link)
    begin, free, notes = free_of_timings(options, observations, link)
    result = fit(observations, device, begin, free)
    assert result.device is not None
    (timed, *others) = sorted({seen.engine for seen in observations if seen.engine is not None})
    if frees_device(free):
        if others:
            raise UserError(
                f"--timings are of the engines {timed} and {' and '.join(others)}, and a device's figures go with one;"
                " name files of one engine"
            )
        device = dataclasses.replace(
            result.device,
            engine=timed,
            calibrated=(device.calibrated and timed == device.engine) or SHARES.issubset(map(figure_kind, free)),
            source=_source(options),
        )
    elif (timed, others) != (device.engine, []):
        names = " and ".join((timed, *others))
        notes.append(f"these timings are of the engine {names}, the device's figures of {device.engine}: see --engine")
    return CalibrationDocument(
        device=device,
        link=result.interconnect,
        figures=result.figures,
        mean_error=result.mean_error,
        worst_error=result.worst_error,
        notes=notes,
        residuals=result.residuals,
        observations=observations,
        timings=options,
    )


def _source(options: TimingsOptions) -> str:
    return f"ladderize calibrate --timings {','.join(path.name for path in options.timings)}"
