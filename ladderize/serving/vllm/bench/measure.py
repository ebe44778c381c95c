"""One rank's part of the benchmark: all rows' engines in one process, timed in turn, in an order drawn anew for each
round, so that whatever the machine does hits all alike."""

import contextlib
import os
import random
from collections.abc import Iterator
from pathlib import Path

import torch
from torch.profiler import record_function

from ladderize.console import Console
from ladderize.ranks.group import Ranks
from ladderize.runtime.bench.alone_times import AloneTimes, synchronize
from ladderize.runtime.bench.environment import environment
from ladderize.runtime.bench.measure import TRACED_STEPS
from ladderize.runtime.bench.speed_row import PHASES
from ladderize.runtime.bench.trace import Overlap, trace_passes
from ladderize.runtime.collectives.base import Collectives
from ladderize.runtime.collectives.observed import Traced
from ladderize.serving.vllm.backends import MessageBackend
from ladderize.serving.vllm.bench.document import ENGINE, VllmBenchDocument, VllmBenchRow
from ladderize.serving.vllm.bench.engine import TimedEngine, communicator, identify
from ladderize.serving.vllm.bench.rows import Timed, vllm_rows
from ladderize.serving.vllm.bench.served import VllmPlan, file_stem
from ladderize.serving.vllm.plugin import register_plugin
from ladderize.serving.vllm.versions import installed_version


def trace_pass(engine: TimedEngine, prompts: list[list[int]], path: Path, ranks: Ranks) -> dict[str, Overlap] | None:
    """Write the trace of a pass to ``path``; returns what it shows of each phase, or None for vLLM's own class, which
    has no messages in flight. All ranks call it."""

    def run() -> None:
        with record_function(PHASES[0]):
            engine.prefill(prompts, TRACED_STEPS + 1)
            synchronize(ranks.device)
        with record_function(PHASES[1]):
            engine.decode()
            synchronize(ranks.device)

    with _traced(engine) as traced:
        link = MessageBackend.from_environment(os.environ).link
        alone = AloneTimes(ranks, traced.inner, link, engine.dtype)
        found = trace_passes(run, PHASES, path, ranks.device, traced, lambda size: alone.seconds("all_reduce", size))
    return None if engine.messages is None else found


@contextlib.contextmanager
def _traced(engine: TimedEngine) -> Iterator[Traced]:
    """The engine's messages appear in torch's profiler inside the block."""
    messages = engine.messages
    if messages is None:
        yield Traced(Collectives())
        return
    inner = messages.collectives
    messages.collectives = traced = Traced(inner)
    try:
        yield traced
    finally:
        messages.collectives = inner


def measure_vllm(ranks: Ranks, plan: VllmPlan, console: Console) -> tuple[VllmBenchDocument, list[TimedEngine]]:
    """Start the engines and time them; reports the document after each batch size. All ranks call it.

    Returns the engines, too: where one goes, vLLM ends the group that all share.
    """
    options = plan.options
    surroundings = environment(ranks, settings=("VLLM_", "LADDERIZE_"))
    identify(ranks)
    register_plugin()  # also where ladderize runs from a source tree, whose entry points are not installed
    engines = []
    for number, served in enumerate(plan.served, start=1):
        with console.stage(f"starting vLLM, {number} of {len(plan.served)}: {served.name}"):
            engines.append(TimedEngine(served, options, ranks, len(plan.served), plan.config))
    backend = communicator()
    carriers = sorted({engine.messages.collectives.name for engine in engines if engine.messages is not None})
    messages = ", ".join(carriers) if carriers else None
    rows: list[VllmBenchRow] = []

    def document(*, complete: bool) -> VllmBenchDocument:
        return VllmBenchDocument(
            engine=ENGINE,
            complete=complete,
            emulated=MessageBackend.from_environment(os.environ).link is not None,
            options=options,
            vllm=installed_version() or "unknown",
            backend=backend,
            messages=messages,
            environment=surroundings,
            rows=list(rows),
        )

    for batch in options.batch_sizes:
        timed = [Timed(served) for served in plan.served]
        _time_engines(ranks, list(zip(timed, engines, strict=True)), plan, batch, console)
        done = len(rows)
        rows[done:] = vllm_rows(timed, options, batch)
        ranks.report(document(complete=False))
        if options.profile is not None:
            with console.stage(f"profiling, traces in {options.profile}"):
                _trace_engines(ranks, list(zip(timed, engines, strict=True)), plan, batch, options.profile)
            rows[done:] = vllm_rows(timed, options, batch)
            ranks.report(document(complete=False))
    return document(complete=True), engines


def _time_engines(
    ranks: Ranks, engines: list[tuple[Timed, TimedEngine]], plan: VllmPlan, batch: int, console: Console
) -> None:
    options = plan.options
    prompts = _prompts(plan, batch)
    order = list(engines)
    shuffle = random.Random(options.seed)  # the same on every rank
    rounds = options.warmup + options.repeat
    with console.progress(f"timing, batch {batch}", rounds, animated=False) as advance:
        for number in range(rounds):
            shuffle.shuffle(order)
            for timed, engine in order:
                ranks.barrier()
                times = engine.time_pass(prompts, options.output_len)
                # the group is done when its last rank is
                times = tuple(max(values) for values in zip(*ranks.gather(times), strict=True))
                if number >= options.warmup:
                    for phase, seconds in zip(PHASES, times, strict=True):
                        timed.seconds[phase].append(seconds)
            advance(1)


def _trace_engines(
    ranks: Ranks, engines: list[tuple[Timed, TimedEngine]], plan: VllmPlan, batch: int, folder: Path
) -> None:
    prompts = _prompts(plan, batch)
    for number, (timed, engine) in enumerate(engines):
        path = folder / f"{number}-{file_stem(engine.name)}-batch{batch}-rank{ranks.rank}.json"
        ranks.barrier()
        timed.overlap = trace_pass(engine, prompts, path, ranks)


def _prompts(plan: VllmPlan, batch: int) -> list[list[int]]:
    numbers = torch.Generator().manual_seed(plan.options.seed)
    shape = (batch, plan.options.prompt_len)
    ids: list[list[int]] = torch.randint(0, int(plan.config["vocab_size"]), shape, generator=numbers).tolist()
    return ids
