"""Proof of overlap: a trace of a prefill and some decode steps in vLLM, and the share of its messages that was under
compute."""

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

from torch.profiler import record_function

from ladderize.ranks.group import Ranks
from ladderize.runtime.bench.alone_times import AloneTimes, synchronize
from ladderize.runtime.bench.measure import TRACED_STEPS
from ladderize.runtime.bench.speed_row import PHASES
from ladderize.runtime.bench.trace import Overlap, trace_passes
from ladderize.runtime.collectives.base import Collectives
from ladderize.runtime.collectives.observed import Traced
from ladderize.serving.vllm.backends import MessageBackend
from ladderize.serving.vllm.bench.engine import TimedEngine


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
