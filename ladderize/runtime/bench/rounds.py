"""Variants timed against each other in interleaved rounds, with communication and without.

Disturbances of the machine hit all alike: the order is drawn anew for each round, and the paired bootstrap of the 95 %
intervals keeps a round's times of both variants together."""

import random
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.profiler import record_function

from ladderize.console import Console
from ladderize.errors import UserError
from ladderize.ranks.group import Ranks
from ladderize.runtime.bench.document import (
    MODEL_ROW,
    BenchDocument,
    BenchRow,
    Overlap,
    PhaseCommunication,
    may_overlap,
)
from ladderize.runtime.bench.messages import Message, recorded
from ladderize.runtime.bench.options import BenchOptions
from ladderize.runtime.bench.trace import cpu_flights, flights_of, gpu_flights, overlap_of, traced_events
from ladderize.runtime.collectives.base import NoCommunication
from ladderize.runtime.decode import capture
from ladderize.runtime.schedule import ScheduleName
from ladderize.runtime.shards import Shape, decode_read_bytes
from ladderize.runtime.spec import ModelSpec

TRACED_PASSES = 4
ALONE_ROUNDS, ALONE_REPEAT = 6, 10
FAR_FROM_LINK = 0.1  # an emulated message's time, as a share of what its link says
GRAPH_GAP = 1e-6  # seconds between two kernels of a graph, at most
MIN_OVERLAP = 0.01  # of the time in flight: less under compute than this is none at all
DRAWN_ROUNDS = 2000

Run = Callable[[int], Iterator[None]]
Samples = dict[str, list[float]]  # ms of one pass in every counted round, by phase


@dataclass
class Variant:
    """A model, or a baseline, at one batch size, by one schedule.

    run: runs it once, with so many passes of its last phase. It yields when it is ready, and when the work of each
    phase is done. All ranks call it.
    silent: the same without communication; the difference in time is what ``run`` waits for. None in vLLM.
    has_silent_row: its times without communication are the row of the no-comm baseline.
    """

    name: str
    spec: ModelSpec
    model: Any  # which has ``collectives``
    run: Run
    silent: Run | None = None
    schedule: ScheduleName = "sequential"
    messages: dict[str, list[Message]] = field(default_factory=dict)  # by phase; empty in vLLM, whose are not seen
    has_silent_row: bool = False
    architecture: str | None = None
    samples: Samples = field(default_factory=dict)
    silent_samples: Samples = field(default_factory=dict)
    overlap: dict[str, Overlap] | None = None


@dataclass(frozen=True)
class Benchmark:
    """A benchmark on one of its ranks. Each rank adds to a document of its own."""

    document: BenchDocument
    group: Ranks
    console: Console


def variant_name(model: str, schedule: str, options: BenchOptions) -> str:
    """Return the name of the row of a model by a schedule: the model's own by the first schedule that is timed."""
    return model if schedule == options.schedules[0] else f"{model} by the schedule {schedule}"


def measure(benchmark: Benchmark, open_variants: Callable[[int], list[Variant]]) -> BenchDocument:
    """Time all batch sizes and return the finished document. All ranks call it.

    open_variants: returns what is timed at a batch size; those that fail a check are in ``document.failed`` instead.
    Raises UserError if all variants failed.
    """
    document = benchmark.document
    for batch in document.options.batch_sizes:
        if variants := open_variants(batch):
            time_models(benchmark, variants, batch)
        del variants  # before the caches of the next batch size are made
    if not document.rows:
        raise UserError(f"{next(iter(document.failed.values()))}, so nothing was timed")
    document.complete = True
    return document


def time_models(benchmark: Benchmark, variants: list[Variant], batch: int) -> None:
    """Time the variants of one batch size, and add their rows to the document, which is reported then, and again with
    their traces. All ranks call it."""
    document, group, console = benchmark.document, benchmark.group, benchmark.console
    options, earlier = document.options, [*document.rows]
    timed = [(variant.run, variant.samples) for variant in variants]
    timed += [(variant.silent, variant.silent_samples) for variant in variants if variant.silent is not None]
    shuffle = random.Random(options.seed)  # the same on every rank
    # nothing moves on the terminal while a sample is taken: the bar is drawn between rounds
    with console.progress(f"timing, batch {batch}", options.warmup + options.repeat) as advance:
        for number in range(1, options.warmup + options.repeat + 1):
            counted = number - options.warmup
            warming = f"warm-up {number} of {options.warmup}"
            advance(0, f"round {counted} of {options.repeat}" if counted > 0 else warming)
            shuffle.shuffle(timed)
            for run, samples in timed:
                group.barrier()
                running = run(options.passes.get("decode", 1))
                next(running)
                synchronize(group.device)
                times, begin = [], time.perf_counter()
                for passes in options.passes.values():
                    next(running)
                    times.append(1e3 * (time.perf_counter() - begin) / passes)
                    begin = time.perf_counter()
                next(running, None)
                if counted > 0:
                    slowest = np.max(group.gather(times), axis=0)  # the group is done when its last rank is
                    for phase, milliseconds in zip(options.passes, slowest.tolist(), strict=True):
                        samples.setdefault(phase, []).append(milliseconds)
            advance(1)
    with console.stage("timing messages alone, making rows"):
        document.rows[:] = [*earlier, *rows_of(benchmark, variants, batch)]
    group.report(document)
    if options.profile is not None:
        with console.stage(f"profiling, traces in {options.profile}"):
            for number, variant in enumerate(variants):
                group.barrier()
                stem = "".join(c if c.isalnum() or c in "+-." else "_" for c in Path(variant.name).name)
                path = options.profile / f"{number}-{stem}-batch{batch}-rank{group.rank}.json"
                variant.overlap = traced(benchmark, variant, path)
        document.rows[:] = [*earlier, *rows_of(benchmark, variants, batch)]
        group.report(document)


def synchronize(device: torch.device) -> None:
    """Wait until a GPU has done all its work; on a CPU do nothing."""
    if device.type == "cuda":
        torch.cuda.synchronize()


# ---- rows ----


def rows_of(benchmark: Benchmark, variants: Sequence[Variant], batch: int) -> Iterator[BenchRow]:
    """Yield the rows of timed variants; speed-ups are over the first. All ranks call it."""
    options, shown = benchmark.document.options, []
    gb_s = benchmark.document.environment.gpu_memory_gb_s
    for variant in variants:
        shown.append(variant)
        if variant.has_silent_row:
            shown.append(replace(variant, name="no-comm baseline", silent=None, overlap=None))
            shown[-1].samples = variant.silent_samples
    total, counted, tokens = "end_to_end", "decode", batch
    if options.train:
        total, counted, tokens = "step", "step", batch * options.prompt_len
    for variant in shown:
        layout, folder = variant.spec.layout, variant.spec.folder
        figures = timed_figures(variant.samples, variants[0].samples, options.passes, total)
        communication, bound_share, read_bytes, bandwidth_share = None, None, None, None
        if variant.silent is not None:
            communication = {phase: waited(benchmark, variant, phase) for phase in options.passes}
        if options.train:
            # a model's fastest step without communication, whatever the schedule
            rivals = [rival.silent_samples.values() for rival in variants if rival.spec is variant.spec]
            bound_share = min(sum(map(statistics.median, phases)) for phases in rivals) / figures["ms"][total]
        else:
            shape = Shape.from_config(
                variant.spec.config, tp_size=options.ranks, rank=0, replicate_vocab=options.replicate_vocab
            )
            columns = options.prompt_len + options.output_len // 2  # that the mean step sees
            read_bytes = decode_read_bytes(shape, layout, batch, columns, variant.spec.torch_dtype.itemsize)
            if gb_s is not None:
                bandwidth_share = read_bytes / (1e6 * gb_s * figures["ms"]["decode"])
        yield BenchRow(
            model=variant.name,
            kind=MODEL_ROW if variant.name == variant.spec.name else "baseline, for timing only",
            schedule=variant.schedule,
            layout=str(layout),
            **layout.to_config(),
            weights="random" if folder is None else str(folder),
            dtype=variant.spec.dtype,
            tp_size=options.ranks,
            batch_size=batch,
            tokens_per_s=1e3 * tokens / figures["ms"][counted],
            samples_ms=variant.samples,
            communication=communication,
            no_communication_samples_ms=None if variant.silent is None else variant.silent_samples,
            overlap=variant.overlap,
            bound_share=bound_share,
            architecture=variant.architecture,
            decode_read_bytes=read_bytes,
            bandwidth_share=bandwidth_share,
            **figures,
        )


def timed_figures(samples: Samples, first: Samples, passes: Mapping[str, int], total: str) -> dict[str, Any]:
    """Return the times of each phase and of the total, which has so many ``passes`` of each, and their speed-ups over
    ``first``, as fields of a row."""

    def by_name(rounds: Samples) -> dict[str, Any]:
        medians = {phase: _medians(rounds[phase]) for phase in passes}
        return medians | {total: sum(count * medians[phase] for phase, count in passes.items())}

    times, reference = by_name(samples), by_name(first)
    ratios = {name: reference[name] / times[name] for name in times}
    return {
        "ms": {name: float(values[0]) for name, values in times.items()},
        "speedup": {name: float(values[0]) for name, values in ratios.items()},
        "speedup_interval": {name: _interval(values) for name, values in ratios.items()},
    }


def _medians(rounds: Sequence[float]) -> Any:
    """Return the median of the rounds, and after it that of each resample of them."""
    values = np.asarray(rounds, dtype=float)
    # A fixed seed, so that the same samples give the same interval, and all series the same rounds: they stay paired.
    drawn = np.random.default_rng(0).integers(0, len(values), (DRAWN_ROUNDS, len(values)))
    return np.concatenate([[np.median(values)], np.median(values[drawn], axis=-1)])


def _interval(values: Any) -> list[float]:
    """Return the interval [low, high] that holds 95 % of the resamples' values."""
    low, high = np.percentile(values[1:], (2.5, 97.5))
    return [float(low), float(high)]


def waited(benchmark: Benchmark, variant: Variant, phase: str) -> PhaseCommunication:
    """Return the communication of a variant in a phase. All ranks call it."""
    times, silent = _medians(variant.samples[phase]), _medians(variant.silent_samples[phase])
    sums = [message.bytes for message in variant.messages[phase] if not message.vocabulary]
    return PhaseCommunication(
        all_reduces=len(sums),
        bytes=sum(sums),
        no_communication_ms=float(silent[0]),
        alone_ms=sum(time_alone(benchmark, variant, message) for message in variant.messages[phase]),
        exposed_ms=float(times[0] - silent[0]),
        exposed_interval_ms=_interval(times - silent),
    )


# ---- messages with nothing beside them ----


def time_alone(benchmark: Benchmark, variant: Variant, message: Message) -> float:
    """Return the ms of a message with nothing beside it, measured when first asked for. All ranks call it. An emulated
    one takes on a CPU what its link says. A GPU's clock may tick too seldom for that, so that it is measured there,
    too, with a warning where it is far off."""
    document, group = benchmark.document, benchmark.group
    link, size, over = document.link, message.bytes, message.over
    collectives = variant.model.collectives  # the message goes over them, or over a split of them
    label = message.collective
    for ranks, split in collectives.splits.items():
        if over in split:
            label += f" within {ranks} ranks" if over is split.within else f" across groups of {ranks} ranks"
    label += f" of {size} bytes"
    if label in document.alone_ms:
        return document.alone_ms[label]
    asked = None
    if link is not None and over is collectives:
        asked = link.seconds(size * (over.ranks if message.collective == "all_gather" else 1))
    seconds = asked or 0.0
    is_sent = over.ranks > 1 and not isinstance(over, NoCommunication)
    if is_sent and (asked is None or group.device.type == "cuda"):
        dtype = variant.spec.torch_dtype if size % variant.spec.torch_dtype.itemsize == 0 else torch.bfloat16
        content = torch.zeros(size // dtype.itemsize, dtype=dtype, device=group.device)
        communicate = getattr(over, message.collective)

        def back_to_back() -> None:
            for _ in range(ALONE_REPEAT):  # after a barrier ranks do not start at once
                communicate(content)

        seconds = seconds_together(group, back_to_back, ALONE_REPEAT, ALONE_ROUNDS)
    if asked is not None and abs(seconds - asked) > FAR_FROM_LINK * asked + GRAPH_GAP:
        benchmark.console.warn(f"an emulated {label} took {1e6 * seconds:.1f} us on this GPU, not {1e6 * asked:.1f} us")
    if link is not None and not link.in_range(size):
        document.extrapolated_bytes = sorted({*(document.extrapolated_bytes or ()), size})
    document.alone_ms[label] = 1e3 * seconds
    return document.alone_ms[label]


def seconds_together(group: Ranks, run: Callable[[], object], count: int, rounds: int, *, graph: bool = True) -> float:
    """Time a function on all ranks at once; return the seconds of each of the ``count`` times that it does its work:
    the median of all rounds but the first, each of the slowest rank.

    graph: on a GPU one graph starts all of it: launched one by one, small kernels take as long as their launches.
    """
    if graph and group.device.type == "cuda":
        run = capture(run, group.device, warm_ups=1)[0].replay
    samples = []
    for _ in range(rounds):
        group.barrier()
        synchronize(group.device)
        begin = time.perf_counter()
        run()
        if graph:
            synchronize(group.device)
        samples.append(max(group.gather(time.perf_counter() - begin)) / count)
    return statistics.median(samples[1:])


# ---- traces ----


def traced(benchmark: Benchmark, variant: Variant, path: Path) -> dict[str, Overlap]:
    """Write the trace of a variant; return the overlap of each phase, with ``proven`` where there should be some."""
    passes, device = benchmark.document.options.passes, benchmark.group.device

    def run_marked() -> None:
        running = variant.run(min(TRACED_PASSES, passes.get("decode", 1)))
        next(running)
        for phase in passes:
            with record_function(phase):
                next(running)
                synchronize(device)
        next(running, None)

    with recorded(variant.model) as recording:
        events = traced_events(run_marked, path, device, recording)
    if device.type == "cuda":
        flights = gpu_flights(events)
    else:
        sums = [message for message in recording.messages if message.collective == "all_reduce"]
        flights = cpu_flights(events, [1e3 * time_alone(benchmark, variant, message) for message in sums])
    if variant.model.collectives.ranks > 1 and any(variant.messages.values()) and not flights:
        raise UserError(
            f"--profile: messages were sent, but none of the kernels in {path} is known to be communication; please"
            " report their names"
        )
    overlaps = {phase: overlap_of(flights_of(phase, flights, events)) for phase in passes}
    for phase, overlap in overlaps.items():
        # ranks copy the messages of shared memory themselves: none is in flight
        is_seen = phase in variant.messages and recording.name != "shm"
        if is_seen and may_overlap(variant.spec.layout.modes, variant.schedule, phase):
            proven = overlap.under_compute_ms > MIN_OVERLAP * overlap.in_flight_ms
            overlaps[phase] = replace(overlap, proven=proven)
    return overlaps
