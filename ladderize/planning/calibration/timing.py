"""The least that tells a device's and a link's figures apart: which models a group of ranks times, at which batches."""

import statistics
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch

from ladderize.checkpoint.config import check_config
from ladderize.console import Console
from ladderize.errors import UserError
from ladderize.files.records import Record
from ladderize.memory import check_room
from ladderize.plan.passes import Workload
from ladderize.planning.calibration.observations import RUNTIME_ENGINES, Observation, layout_observation
from ladderize.planning.calibration.options import CalibrateOptions
from ladderize.ranks.group import Ranks
from ladderize.runtime.bench.document import Environment, environment
from ladderize.runtime.bench.inference import TimedGenerator
from ladderize.runtime.bench.options import BenchOptions, named_layout
from ladderize.runtime.bench.plan import needed_bytes
from ladderize.runtime.bench.rounds import AloneTimes, time_rounds
from ladderize.runtime.collectives.base import Collectives, NoCommunication
from ladderize.runtime.collectives.choose import choose
from ladderize.runtime.shards import dense_config, read_shape
from ladderize.runtime.spec import ModelSpec, WeightCache, open_generator, shape_spec

# hidden, intermediate, layers, query heads, KV heads: two widths, so that what a kernel costs and what its bytes cost
# differ; weights of hundreds of megabytes, which no core's own cache holds
MADE_SHAPES = {
    "cpu": ((1024, 2816, 12, 16, 8), (2048, 5632, 4, 16, 8)),
    "cuda": ((4096, 14336, 8, 32, 8), (8192, 28672, 4, 64, 8)),
}
PREFILL_TOKENS = {"cpu": 256, "cuda": 8192}  # of all rows of a batch together
MOST_PROMPT_TOKENS = 1024
LAYOUTS = ("dense", "ladder")  # the second tells how much a message in flight slows the compute beside it


@dataclass(frozen=True)
class TimedGroup(Record):
    """A group of ranks that was timed. weight_bytes: of its smallest model, one rank's part."""

    ranks: int
    backend: str
    environment: Environment
    weight_bytes: int


@dataclass(frozen=True)
class RankTimings(Record):
    """What one group has timed. samples_ms: of each observation, every round; empty where the median alone is kept."""

    group: TimedGroup
    observations: list[Observation]
    samples_ms: list[list[float]]


@dataclass(frozen=True)
class CalibrationJob:
    """One shape at one batch size, in ``LAYOUTS``; with one rank, where all are alike, dense alone."""

    specs: list[ModelSpec]
    options: BenchOptions

    @property
    def batch(self) -> int:
        return self.options.batch_sizes[0]


def calibration_jobs(options: CalibrateOptions, ranks: int) -> list[CalibrationJob]:
    """What a group of ``ranks`` times. Raises UserError or LayoutError for shapes that cannot be run on it."""
    jobs = []
    for config in _configs(options):
        specs = [
            shape_spec(
                config,
                named_layout(name, config["num_hidden_layers"], ranks),
                name=name,
                tp_size=ranks,
                dtype=options.dtype,
            )
            for name in (LAYOUTS if ranks > 1 else LAYOUTS[:1])
        ]
        for batch in options.batch_sizes:
            tokens = options.prefill_tokens or PREFILL_TOKENS[options.device]
            prompt = max(1, min(MOST_PROMPT_TOKENS, tokens // batch))
            if prompt + options.output_len > specs[0].positions:
                raise UserError(
                    f"--shape: prompts of {prompt} tokens and {options.output_len} new ones are over the"
                    f" {specs[0].positions} positions of {config['hidden_size']} hidden; give fewer --prefill-tokens"
                )
            timed = BenchOptions(
                tp_size=ranks,
                batch_sizes=(batch,),
                backend=options.backend if ranks > 1 else "auto",
                warmup=options.warmup,
                repeat=options.repeat,
                device=options.device,
                threads=options.threads,
                seed=options.seed,
                prompt_len=prompt,
                output_len=options.output_len,
            )
            jobs.append(CalibrationJob(specs, timed))
    return jobs


def _configs(options: CalibrateOptions) -> list[dict[str, Any]]:
    """Without the layouts that they may have."""
    if not options.shapes:
        return [_made_config(*sizes) for sizes in MADE_SHAPES[options.device]]
    configs = [read_shape(name, "--shape") for name in options.shapes]
    for config in configs:
        check_config(config)
    return [dense_config(config) for config in configs]


def _made_config(hidden: int, intermediate: int, layers: int, heads: int, kv_heads: int) -> dict[str, Any]:
    return {
        "model_type": "llama",
        "hidden_size": hidden,
        "intermediate_size": intermediate,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "vocab_size": 8192,
        "tie_word_embeddings": False,
        "rope_theta": 10000.0,
        "rms_norm_eps": 1e-5,
        "max_position_embeddings": 4096,
    }


def measure_jobs(group: Ranks, jobs: list[CalibrationJob], console: Console) -> RankTimings:
    """Time ``jobs``; all ranks call it. Raises UserError where they do not fit into memory."""
    check_jobs_memory(jobs, group)
    surroundings = environment(group)
    longest = max(
        job.batch * max(job.specs[0].config["hidden_size"] * job.options.prompt_len, job.specs[0].config["vocab_size"])
        for job in jobs
    )
    collectives, backend = choose(jobs[0].options.backend, group, max_bytes=4 * longest)
    weights = WeightCache(group.device, pack=True)
    alone = AloneTimes(group, collectives, None, jobs[0].specs[0].torch_dtype)
    with torch.inference_mode():
        with console.stage("making random weights"):
            passes = [one for job in jobs for one in _open(group, job, collectives, weights)]
        timed_passes = [one.timed for one in passes]
        time_rounds(group, timed_passes, jobs[0].options, console, f"timing {group.size} rank{'s' * (group.size > 1)}")
        timed = [seen for one in passes for seen in _observations(group, one)]
        if group.size > 1:
            with console.stage("timing all-reduces alone"):
                name = f"all-reduce alone, {group.size} ranks"
                for size in _message_sizes(jobs):
                    seconds = alone.seconds("all_reduce", size)
                    timed.append((Observation("all_reduce", seconds, group.size, name, message_bytes=size), []))
    smallest = min(one.timed.generator.model.weights.resident_bytes for one in passes)
    collectives.close()
    observations, samples = map(list, zip(*timed, strict=True))
    return RankTimings(TimedGroup(group.size, backend, surroundings, smallest), observations, samples)


def check_jobs_memory(jobs: list[CalibrationJob], group: Ranks) -> None:
    """Raise UserError if the ranks of this machine cannot hold what all jobs take, which live side by side."""
    needs = [needed_bytes(job.specs, job.options, group.device) for job in jobs]
    weights = {str(job.specs[0].config): need[0] for job, need in zip(jobs, needs, strict=True)}
    total = sum(weights.values()) + sum(cache for _, cache in needs)
    advice = "give smaller --shape, a smaller --batch-size or fewer --prefill-tokens"
    check_room(total, group.device, "weights and KV caches", advice, processes=group.local_size)


@dataclass(frozen=True)
class TimedJob:
    """A model of a job, with or without communication."""

    job: CalibrationJob
    spec: ModelSpec
    timed: TimedGenerator
    silent: bool


def _open(group: Ranks, job: CalibrationJob, collectives: Collectives, weights: WeightCache) -> Iterator[TimedJob]:
    """What is timed of a job; one cache serves all models, since only one runs at a time.

    Without communication all layouts that drop nothing compute the same, so only dense is timed so; one rank has no
    communication.
    """
    cache = None
    for spec in job.specs:
        for silent in [True] if group.size == 1 else [False, True] if spec.layout.is_dense else [False]:
            means = NoCommunication(collectives.ranks) if silent else collectives
            columns = job.options.prompt_len + job.options.output_len
            generator = open_generator(spec, means, weights, group, job.batch, columns, cache=cache)
            cache = generator.cache
            yield TimedJob(job, spec, TimedGenerator(generator, job.options, job.batch), silent)


def _observations(group: Ranks, one: TimedJob) -> list[tuple[Observation, list[float]]]:
    """Of both phases, each with its rounds in ms."""
    spec, options = one.spec, one.job.options
    return [
        (
            layout_observation(
                spec.layout,
                quantity,
                statistics.median(one.timed.seconds[quantity]),
                group.size,
                "no-comm" if one.silent and group.size > 1 else "layout",
                Workload(one.job.batch, options.prompt_len, options.output_len),
                RUNTIME_ENGINES[group.device.type],
                config=spec.config,
                dtype=spec.dtype,
                name=spec.name,
            ),
            one.timed.samples_ms()[quantity],
        )
        for quantity in ("prefill", "decode")
    ]


def _message_sizes(jobs: list[CalibrationJob]) -> list[int]:
    """The smallest and the largest message of a layer, and those between."""
    sizes = set()
    for job in jobs:
        row = job.specs[0].config["hidden_size"] * job.specs[0].torch_dtype.itemsize * job.batch
        sizes |= {row, row * job.options.prompt_len}
    return sorted(sizes)
