"""One rank's part of ``ladderize bench --engine vllm``: vLLM's engines of all rows side by side, timed in turn.

A change from one to the next costs nothing, and no idle processes disturb the engine that is timed.
"""

import os
from collections.abc import Sequence
from pathlib import Path

from torch.profiler import record_function

from ladderize.console import Console
from ladderize.errors import UserError
from ladderize.ranks.group import Ranks
from ladderize.runtime.bench.document import (
    BASELINE_ROW,
    MODEL_ROW,
    PHASES,
    BenchDocument,
    BenchRow,
    Environment,
    Overlap,
    environment,
)
from ladderize.runtime.bench.inference import TRACED_STEPS
from ladderize.runtime.bench.options import UNFUSED, BenchOptions
from ladderize.runtime.bench.plan import check_bench_memory
from ladderize.runtime.bench.rounds import AloneTimes, TimedVariant, sending_over, synchronize, time_rounds
from ladderize.runtime.bench.trace import trace
from ladderize.runtime.collectives.base import Collectives
from ladderize.runtime.collectives.observed import Traced
from ladderize.runtime.shards import weight_bytes
from ladderize.vllm.bench.engine import ServingEngine, TimedEngine, communicator, kv_cache_bytes
from ladderize.vllm.bench.groups import identify
from ladderize.vllm.bench.served import VllmPlan, vllm_rows
from ladderize.vllm.environment import MessageBackend, installed_version
from ladderize.vllm.plugin import register_plugin


def start_engines(engines: list[ServingEngine], ranks: Ranks, plan: VllmPlan, console: Console) -> None:
    """Start the engines of all rows, and add them to ``engines``. All ranks call it.

    Raises UserError if memory is too small, or vLLM refuses a model.
    """
    options, needed = plan.options, 0
    for served in plan.served:  # they share the memory
        weights = weight_bytes(served.shape(options.tp_size), served.spec.torch_dtype.itemsize, packed=False)
        needed += weights + kv_cache_bytes(served, options)
    check_bench_memory(needed, ranks)
    register_plugin()  # also where ladderize runs from a source tree, whose entry points are not installed
    identify(ranks, plan.starter)
    for number, served in enumerate(plan.served, start=1):
        with console.stage(f"starting vLLM, {number} of {len(plan.served)}: {served.name}"):
            engines.append(ServingEngine(served, options, ranks, len(plan.served)))
    if UNFUSED in options.baselines and not engines[0].fused_norm:
        raise UserError(f"--baselines {UNFUSED} has no effect: vLLM fuses no norms into all-reduces here; leave it out")


def measure_engines(
    engines: Sequence[ServingEngine], ranks: Ranks, options: BenchOptions, console: Console
) -> BenchDocument:
    """Time the engines against each other, and return the document. All ranks call it."""
    surroundings = environment(ranks, settings=("VLLM_", "LADDERIZE_"), vllm=installed_version() or "unknown")
    rows: list[BenchRow] = []
    for batch in options.batch_sizes:
        variants = [_variant(engine, options, batch) for engine in engines]
        time_rounds(ranks, [variant.timed for variant in variants], options, console, f"timing, batch {batch}")
        done = len(rows)
        rows += vllm_rows(variants, options, batch)
        ranks.report(_document(rows, engines, options, surroundings, complete=False))
        if options.profile is not None:
            with console.stage(f"profiling, traces in {options.profile}"):
                for number, variant in enumerate(variants):
                    ranks.barrier()
                    path = variant.trace_path(options.profile, number, batch, ranks.rank)
                    variant.overlap = _trace(variant, ranks, path)
            rows[done:] = vllm_rows(variants, options, batch)
            ranks.report(_document(rows, engines, options, surroundings, complete=False))
    return _document(rows, engines, options, surroundings, complete=True)


def _variant(engine: ServingEngine, options: BenchOptions, batch: int) -> TimedVariant:
    served = engine.served
    figures = {
        "architecture": served.architecture,
        "fused_norm": engine.fused_norm,
        "weight_bytes": weight_bytes(served.shape(options.tp_size), engine.dtype.itemsize, packed=False),
        "kv_cache_bytes": kv_cache_bytes(served, options),
    }
    kind = MODEL_ROW if served.baseline is None else BASELINE_ROW
    return TimedVariant(served.name, served.spec, TimedEngine(engine, options, batch), kind=kind, figures=figures)


def _trace(variant: TimedVariant, ranks: Ranks, path: Path) -> dict[str, Overlap] | None:
    """Write a trace; return the overlap of each phase, or None for vLLM's own class, which has no messages in
    flight."""
    engine, prompts, device = variant.timed.engine, variant.timed.prompts, ranks.device

    def run() -> None:
        with record_function(PHASES[0]):
            engine.prefill(prompts, TRACED_STEPS + 1)
            synchronize(device)
        with record_function(PHASES[1]):
            engine.decode()
            synchronize(device)

    if engine.messages is None:
        trace(run, PHASES, path, device, Traced(Collectives()), lambda size: 0.0)
        return None
    link = MessageBackend.from_environment(os.environ).link
    alone = AloneTimes(ranks, engine.messages.collectives, link, engine.dtype)
    with sending_over(engine.messages, Traced(engine.messages.collectives)) as traced:
        return trace(run, PHASES, path, device, traced, lambda size: alone.seconds("all_reduce", size))


def _document(
    rows: list[BenchRow],
    engines: Sequence[ServingEngine],
    options: BenchOptions,
    surroundings: Environment,
    *,
    complete: bool,
) -> BenchDocument:
    link = MessageBackend.from_environment(os.environ).link
    carriers = {engine.messages.collectives.name for engine in engines if engine.messages is not None}
    return BenchDocument(
        complete=complete,
        emulated=link is not None,
        options=options,
        backend=communicator(),
        environment=surroundings,
        link=link,
        message_bytes_outside_link_range=[],
        alone_ms={},
        rows=list(rows),
        failed={},
        engine="vllm",
        messages=", ".join(sorted(carriers)) or None,
    )
