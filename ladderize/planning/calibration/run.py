"""``ladderize calibrate`` from its options to its file: time, fit, keep."""

import dataclasses
import statistics
from pathlib import Path

import torch

from ladderize.console import SILENT, Console, human_bytes
from ladderize.errors import UserError
from ladderize.files.documents import check_writable, read_document, write_json
from ladderize.files.work import ABOUT, WorkFolder, work_folder
from ladderize.planning.calibration.document import CalibrationDocument, RankTimings, TimedGroup
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
from ladderize.planning.calibration.observations import Observation
from ladderize.planning.calibration.options import CalibrateOptions, TimingsOptions
from ladderize.planning.calibration.timed import RUNTIME_ENGINES, layout_observation
from ladderize.planning.calibration.timings import read_timings
from ladderize.planning.hardware import known_engines, read_device
from ladderize.planning.passes import Workload
from ladderize.ranks.device import check_device
from ladderize.ranks.environment import is_main_rank
from ladderize.ranks.group import Ranks, already_started
from ladderize.runtime.bench.alone_times import AloneTimes
from ladderize.runtime.bench.environment import environment
from ladderize.runtime.bench.memory_need import check_bench_memory
from ladderize.runtime.bench.rows import TimedGenerator, TimedModel
from ladderize.runtime.bench.speed_row import PHASES
from ladderize.runtime.bench.timing import TimedPass, time_passes
from ladderize.runtime.collectives.base import Collectives, NoCommunication
from ladderize.runtime.collectives.choose import choose
from ladderize.runtime.collectives.links import read_interconnect
from ladderize.runtime.launch import check_group_size, run
from ladderize.runtime.spec import WeightCache, open_generator


def measure_jobs(group: Ranks, jobs: list[CalibrationJob], console: Console) -> RankTimings:
    """Time ``jobs``; all ranks call it. Raises UserError where they do not fit into memory."""
    for job in jobs:
        check_bench_memory(job.specs, job.options, group)
    surroundings = environment(group)
    collectives, backend = _collectives(group, jobs)
    weights = WeightCache(group.device, pack=True)
    alone = AloneTimes(group, collectives, None, jobs[0].specs[0].torch_dtype)
    with torch.inference_mode():
        with console.stage("making random weights"):
            opened = [(job, _open(group, job, collectives, weights)) for job in jobs]
        passes = [
            TimedPass(model, way, job.options, job.batch)
            for job, models in opened
            for model in models
            for way in _ways(group, model)
        ]
        time_passes(group, passes, console, f"timing {group.size} rank{'s' * (group.size > 1)}")
        observations, samples = _observations(group, passes)
        if group.size > 1:
            with console.stage("timing all-reduces alone"):
                for size in _message_sizes(jobs):
                    seconds = alone.seconds("all_reduce", size)
                    name = f"all-reduce alone, {group.size} ranks"
                    observations.append(Observation("all_reduce", seconds, group.size, name, message_bytes=size))
                    samples.append([])
    smallest = min(model.communicating.generator.model.weights.resident_bytes for _, own in opened for model in own)
    collectives.close()
    return RankTimings(TimedGroup(group.size, backend, surroundings, smallest), observations, samples)


def _collectives(group: Ranks, jobs: list[CalibrationJob]) -> tuple[Collectives, str]:
    longest = 0
    for job in jobs:
        hidden, vocabulary = (int(job.specs[0].config[key]) for key in ("hidden_size", "vocab_size"))
        longest = max(longest, job.batch * max(hidden * job.options.prompt_len, vocabulary))
    return choose(jobs[0].options.backend, group, max_bytes=4 * longest)


def _open(group: Ranks, job: CalibrationJob, collectives: Collectives, weights: WeightCache) -> list[TimedModel]:
    """The models of a job, each with and without communication; one cache serves all, since only one runs at a time."""
    models, cache = [], None
    for spec in job.specs:
        ways = []
        for means in (collectives, NoCommunication(collectives.ranks)):
            columns = job.options.prompt_len + job.options.output_len
            generator = open_generator(spec, means, weights, group, job.batch, columns, cache=cache)
            cache = generator.cache
            ways.append(TimedGenerator(generator))
        communicating, silent = ways
        models.append(TimedModel(spec.name, spec, communicating, silent))
    return models


def _ways(group: Ranks, model: TimedModel) -> list[TimedGenerator]:
    """Without communication all layouts that drop nothing compute the same, so only dense is timed so; one rank has no
    communication."""
    if group.size == 1:
        return [model.silent]
    return [model.communicating, model.silent] if model.spec.layout.is_dense else [model.communicating]


def _observations(group: Ranks, passes: list[TimedPass]) -> tuple[list[Observation], list[list[float]]]:
    observations, samples = [], []
    for one in passes:
        silent = one.way is one.model.silent
        for phase in PHASES:
            seconds = one.way.seconds[phase]
            observations.append(
                layout_observation(
                    one.model.spec.layout,
                    "prefill" if phase == "prefill" else "decode",
                    statistics.median(seconds),
                    group.size,
                    "no-comm" if silent and group.size > 1 else "layout",
                    Workload(one.batch, one.options.prompt_len, one.options.output_len),
                    RUNTIME_ENGINES[group.device.type],
                    config=one.model.spec.config,
                    dtype=one.model.spec.dtype,
                    name=one.model.name,
                )
            )
            samples.append([1e3 * value for value in seconds])
    return observations, samples


def _message_sizes(jobs: list[CalibrationJob]) -> list[int]:
    """The smallest and the largest message of a layer, and those between."""
    sizes = set()
    for job in jobs:
        row = job.specs[0].config["hidden_size"] * job.specs[0].torch_dtype.itemsize * job.batch
        sizes |= {row, row * job.options.prompt_len}
    return sorted(sizes)


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
