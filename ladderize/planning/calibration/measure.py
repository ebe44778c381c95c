"""One rank's part of a calibration: the models of all jobs, timed in turn in every round, and all-reduces alone."""

import statistics

import torch

from ladderize.console import Console
from ladderize.planning.calibration.document import RankTimings, TimedGroup
from ladderize.planning.calibration.jobs import CalibrationJob
from ladderize.planning.calibration.observations import Observation
from ladderize.planning.calibration.timed import RUNTIME_ENGINES, layout_observation
from ladderize.planning.passes import Workload
from ladderize.ranks.group import Ranks
from ladderize.runtime.bench.alone_times import AloneTimes
from ladderize.runtime.bench.environment import environment
from ladderize.runtime.bench.memory_need import check_bench_memory
from ladderize.runtime.bench.rows import TimedGenerator, TimedModel
from ladderize.runtime.bench.speed_row import PHASES
from ladderize.runtime.bench.timing import TimedPass, time_passes
from ladderize.runtime.collectives.base import Collectives, NoCommunication
from ladderize.runtime.collectives.choose import choose
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
