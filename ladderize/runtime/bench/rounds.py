"""Variants timed against each other in interleaved rounds: each runs once in every round, with communication and
without.

The order is drawn anew for each round, so that disturbances of the machine hit all variants alike.

Intervals are 95 % intervals of a paired bootstrap: rounds are drawn with replacement, and a round's times of both
variants stay together, since a slow moment of the machine hits both.
"""

import functools
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
    BASELINE_ROW,
    MODEL_ROW,
    NO_COMM,
    BenchDocument,
    BenchRow,
    Overlap,
    PhaseCommunication,
    may_overlap,
)
from ladderize.runtime.bench.messages import Sender, recorded
from ladderize.runtime.bench.options import BenchOptions
from ladderize.runtime.bench.trace import cpu_flights, flights_of, gpu_flights, overlap_of, traced_events
from ladderize.runtime.collectives.base import Collectives, NoCommunication
from ladderize.runtime.collectives.observed import Message
from ladderize.runtime.graphs import capture
from ladderize.runtime.schedule import ScheduleName
from ladderize.runtime.spec import ModelSpec

TRACED_PASSES = 4
ALONE_ROUNDS, ALONE_REPEAT = 6, 10
FAR_FROM_LINK = 0.1  # an emulated message's time, as a share of what its link says
GRAPH_GAP = 1e-6  # seconds between two kernels of a graph, at most
MIN_OVERLAP = 0.01  # of the time in flight: less under compute than this is none at all
DRAWN_ROUNDS = 2000

Run = Callable[[int], Iterator[None]]
Seconds = Mapping[str, Sequence[float]]  # of each counted round, by phase


@dataclass
class Variant:
    """A model, or a baseline, at one batch size, by one schedule.

    run: runs it once, with so many passes of its last phase. It yields when it is ready, and when the work of each
    phase is done. All ranks call it.
    silent: the same without communication; the difference in time is what ``run`` waits for. None in vLLM.
    seconds, silent_seconds: of one pass in every counted round, by phase.
    messages: the messages of each phase; empty in vLLM, whose are not seen.
    has_silent_row: its times without communication are the row of the no-comm baseline.
    """

    name: str
    spec: ModelSpec
    model: Sender
    run: Run
    silent: Run | None = None
    kind: str = MODEL_ROW
    schedule: ScheduleName = "sequential"
    messages: dict[str, list[Message]] = field(default_factory=dict)
    has_silent_row: bool = False
    architecture: str | None = None
    seconds: dict[str, list[float]] = field(default_factory=dict)
    silent_seconds: dict[str, list[float]] = field(default_factory=dict)
    overlap: dict[str, Overlap] | None = None


def variant_name(model: str, schedule: str, options: BenchOptions) -> str:
    """Return the name of the row of a model by a schedule: the model's own by the first schedule that is timed."""
    return model if schedule == options.schedules[0] else f"{model} by the schedule {schedule}"


Alone = Callable[[Message, Variant], float]  # the ms of a message with nothing beside it


def measure(
    document: BenchDocument, open_variants: Callable[[int], list[Variant]], group: Ranks, console: Console
) -> BenchDocument:
    """Time all batch sizes and return the finished document. All ranks call it.

    open_variants: returns what is timed at a batch size; those that fail a check are in ``document.failed`` instead.
    Raises UserError if all variants failed.
    """
    for batch in document.options.batch_sizes:
        time_models(document, open_variants, batch, group, console)
    if not document.rows:
        raise UserError(f"{next(iter(document.failed.values()))}, so nothing was timed")
    document.complete = True
    return document


def time_models(
    document: BenchDocument,
    open_variants: Callable[[int], list[Variant]],
    batch: int,
    group: Ranks,
    console: Console,
) -> None:
    """Time the variants of one batch size, and add their rows to the document, which is reported then, and again with
    their traces. All ranks call it."""
    options, earlier = document.options, [*document.rows]
    alone = functools.partial(time_alone, document=document, group=group, console=console)
    variants = open_variants(batch)
    if not variants:
        return
    timed: list[tuple[Run, dict[str, list[float]]]] = []
    for variant in variants:
        timed.append((variant.run, variant.seconds))
        if variant.silent is not None:
            timed.append((variant.silent, variant.silent_seconds))
    shuffle = random.Random(options.seed)  # the same on every rank
    # nothing moves on the terminal while a sample is taken: the bar is drawn between rounds
    with console.progress(f"timing, batch {batch}", options.warmup + options.repeat) as advance:
        for number in range(1, options.warmup + options.repeat + 1):
            counted = number - options.warmup
            warming = f"warm-up {number} of {options.warmup}"
            advance(0, f"round {counted} of {options.repeat}" if counted > 0 else warming)
            shuffle.shuffle(timed)
            for run, rounds in timed:
                group.barrier()
                running = run(options.steps)
                next(running)
                synchronize(group.device)
                sample, begin = [], time.perf_counter()
                for passes in options.passes.values():
                    next(running)
                    sample.append((time.perf_counter() - begin) / passes)
                    begin = time.perf_counter()
                next(running, None)
                if counted > 0:
                    slowest = np.max(group.gather(sample), axis=0)  # the group is done when its last rank is
                    for phase, seconds in zip(options.passes, slowest.tolist(), strict=True):
                        rounds.setdefault(phase, []).append(seconds)
            advance(1)
    with console.stage("timing messages alone, making rows"):
        document.rows[:] = [*earlier, *rows_of(document, variants, batch, alone)]
    group.report(document)
    if options.profile is not None:
        with console.stage(f"profiling, traces in {options.profile}"):
            for number, variant in enumerate(variants):
                group.barrier()
                stem = "".join(c if c.isalnum() or c in "+-." else "_" for c in Path(variant.name).name)
                path = options.profile / f"{number}-{stem}-batch{batch}-rank{group.rank}.json"
                variant.overlap = traced(variant, options, path, group.device, alone)
        document.rows[:] = [*earlier, *rows_of(document, variants, batch, alone)]
        group.report(document)


def synchronize(device: torch.device) -> None:
    """Wait until a GPU has done all its work; on a CPU do nothing."""
    if device.type == "cuda":
        torch.cuda.synchronize()


# ---- rows ----


def rows_of(document: BenchDocument, variants: Sequence[Variant], batch: int, alone: Alone) -> Iterator[BenchRow]:
    """Yield the rows of timed variants; speed-ups are over the first. All ranks call it."""
    options, shown = document.options, []
    for variant in variants:
        shown.append(variant)
        if variant.has_silent_row:
            silent = replace(variant, name=NO_COMM, kind=BASELINE_ROW, silent=None, overlap=None)
            silent.seconds = variant.silent_seconds
            shown.append(silent)
    tokens, timed = (batch * options.prompt_len, "step") if options.train else (batch, "decode")
    for variant in shown:
        layout, folder = variant.spec.layout, variant.spec.folder
        figures = timed_figures(variant.seconds, variants[0].seconds, options.passes, options.total)
        communication, bound_share = None, None
        if variant.silent is not None:
            communication = {phase: waited(variant, phase, alone) for phase in options.passes}
        if options.train:
            # a model's fastest step without communication, whatever the schedule
            rivals = [rival.silent_seconds.values() for rival in variants if rival.spec is variant.spec]
            bound = min(sum(map(statistics.median, phases)) for phases in rivals)
            bound_share = 1e3 * bound / figures["ms"][options.total]
        yield BenchRow(
            model=variant.name,
            kind=variant.kind,
            schedule=variant.schedule,
            layout=str(layout),
            attention_sync=list(layout.attention_sync),
            mlp_sync=list(layout.mlp_sync),
            sync_tp_size=layout.sync_tp_size,
            weights="random" if folder is None else str(folder),
            dtype=variant.spec.dtype,
            tp_size=options.ranks,
            batch_size=batch,
            tokens_per_s=1e3 * tokens / figures["ms"][timed],
            samples_ms=in_ms(variant.seconds),
            communication=communication,
            no_communication_samples_ms=None if variant.silent is None else in_ms(variant.silent_seconds),
            overlap=variant.overlap,
            bound_share=bound_share,
            architecture=variant.architecture,
            **figures,
        )


def in_ms(rounds: Seconds) -> dict[str, list[float]]:
    return {phase: [1e3 * each for each in seconds] for phase, seconds in rounds.items()}


def timed_figures(rounds: Seconds, first: Seconds, passes: Mapping[str, int], total: str) -> dict[str, Any]:
    """Return the times of each phase and of the total, and their speed-ups over ``first``, as fields of a row.

    passes: the number of passes of each phase that the total has.
    total: its name.
    """

    def by_name(seconds: Seconds) -> dict[str, Any]:
        medians = {phase: _medians(seconds[phase]) for phase in passes}
        return medians | {total: sum(count * medians[phase] for phase, count in passes.items())}

    reference, times = by_name(first), by_name(rounds)
    ratios = {name: reference[name] / times[name] for name in times}
    return {
        "ms": {name: 1e3 * float(values[0]) for name, values in times.items()},
        "speedup": {name: float(values[0]) for name, values in ratios.items()},
        "speedup_interval": {name: _interval(values) for name, values in ratios.items()},
    }


def _medians(seconds: Sequence[float]) -> Any:
    """Return the median of the rounds, and after it that of each resample of them."""
    values = np.asarray(seconds, dtype=float)
    # A fixed seed, so that the same samples give the same interval, and all series the same rounds: they stay paired.
    rounds = np.random.default_rng(0).integers(0, len(values), (DRAWN_ROUNDS, len(values)))
    return np.concatenate([[np.median(values)], np.median(values[rounds], axis=-1)])


def _interval(values: Any) -> list[float]:
    """Return the interval [low, high] that holds 95 % of the resamples' values."""
    low, high = np.percentile(values[1:], (2.5, 97.5))
    return [float(low), float(high)]


def waited(variant: Variant, phase: str, alone: Alone) -> PhaseCommunication:
    """Return the communication of a variant in a phase. All ranks call it."""
    times, silent = (1e3 * _medians(rounds[phase]) for rounds in (variant.seconds, variant.silent_seconds))
    sums = [message.bytes for message in variant.messages[phase] if not message.vocabulary]
    return PhaseCommunication(
        all_reduces=len(sums),
        bytes=sum(sums),
        no_communication_ms=float(silent[0]),
        alone_ms=sum(alone(message, variant) for message in variant.messages[phase]),
        exposed_ms=float(times[0] - silent[0]),
        exposed_interval_ms=_interval(times - silent),
    )


# ---- messages with nothing beside them ----


def time_alone(message: Message, variant: Variant, document: BenchDocument, group: Ranks, console: Console) -> float:
    """Return the ms of a message with nothing beside it, measured when first asked for. All ranks call it.

    An emulated one takes on a CPU what its link says. A GPU's clock may tick too seldom for that, so that it is
    measured there, too, with a warning where it is far off.
    """
    collectives = variant.model.collectives  # the message goes over them, or over a split of them
    link, size = document.link, message.bytes
    label = f"{message.collective}{_group_of(collectives, message.over)} of {size} bytes"
    if label in document.alone_ms:
        return document.alone_ms[label]
    asked = None
    if link is not None and message.over is collectives:
        asked = link.seconds(size * (collectives.ranks if message.collective == "all_gather" else 1))
    if link is not None and not link.in_range(size):
        document.extrapolated_bytes = sorted({*(document.extrapolated_bytes or ()), size})
    if asked is None or group.device.type == "cuda":
        seconds = _seconds_alone(message, variant.spec.torch_dtype, group)
    else:
        seconds = asked
    if asked is not None and abs(seconds - asked) > FAR_FROM_LINK * asked + GRAPH_GAP:
        console.warn(f"an emulated {label} took {1e6 * seconds:.1f} us on this GPU, not {1e6 * asked:.1f} us")
    document.alone_ms[label] = 1e3 * seconds
    return document.alone_ms[label]


def _group_of(collectives: Collectives, over: Collectives) -> str:
    """Return a label for the ranks that a message goes over, of all ranks ""."""
    for size, split in collectives.splits.items():
        if over in split:
            return f" within {size} ranks" if over is split.within else f" across groups of {size} ranks"
    return ""


def _seconds_alone(message: Message, dtype: torch.dtype, group: Ranks) -> float:
    if message.over.ranks == 1 or isinstance(message.over, NoCommunication):
        return 0.0
    content = torch.zeros(message.bytes, dtype=torch.uint8, device=group.device)
    content = content.view(torch.bfloat16 if message.bytes % dtype.itemsize else dtype)
    communicate = getattr(message.over, message.collective)

    def back_to_back() -> None:
        for _ in range(ALONE_REPEAT):  # after a barrier ranks do not start at once
            communicate(content)

    return seconds_together(group, back_to_back, ALONE_REPEAT, ALONE_ROUNDS)


def seconds_together(group: Ranks, run: Callable[[], object], count: int, rounds: int, *, graph: bool = True) -> float:
    """Time a function on all ranks at once; return the seconds of each of the ``count`` times that it does its work.

    They are the median of all rounds but the first, each of the slowest rank.

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


def traced(
    variant: Variant, options: BenchOptions, path: Path, device: torch.device, alone: Alone
) -> dict[str, Overlap]:
    """Write the trace of a variant; return the overlap of each phase, with ``proven`` where there should be some."""

    def run_marked() -> None:
        running = variant.run(min(TRACED_PASSES, options.steps))
        next(running)
        for phase in options.passes:
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
        flights = cpu_flights(events, [1e3 * alone(message, variant) for message in sums])
    if variant.model.collectives.ranks > 1 and any(variant.messages.values()) and not flights:
        raise UserError(
            f"--profile: messages were sent, but none of the kernels in {path} is known to be communication; please"
            " report their names"
        )
    overlaps = {phase: overlap_of(flights_of(phase, flights, events)) for phase in options.passes}
    for phase, overlap in overlaps.items():
        # ranks copy the messages of shared memory themselves: none is in flight
        is_seen = phase in variant.messages and recording.name != "shm"
        if is_seen and may_overlap(variant.spec.layout.modes, variant.schedule, phase):
            proven = overlap.under_compute_ms > MIN_OVERLAP * overlap.in_flight_ms
            overlaps[phase] = replace(overlap, proven=proven)
    return overlaps
