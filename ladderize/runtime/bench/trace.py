"""The proof of overlap: a Chrome trace of a run, and the share of its communication that ran under compute."""

import json
import os
import re
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch.profiler import ProfilerActivity, profile

from ladderize.errors import UserError
from ladderize.runtime.bench.document import Overlap
from ladderize.runtime.bench.messages import TRACED_START, TRACED_WAIT, Recording

# Kernels of NCCL; of torch's symmetric memory; of vLLM's custom all-reduce (cross_device_reduce) and quick reduce; of
# FlashInfer, TensorRT-LLM and MSCCL++ (all of whose names hold allreduce). The spin_kernel of emulated.py stands for
# communication in emulated runs. Inductor's kernels, which are named after operators around them, never send anything.
COMMUNICATION_KERNELS = re.compile(
    r"^(?!triton_\w+_fused_).*?(?:nccl|nvshmem|one_?shot|two_?shot|multimem|cross_device_reduce|quickreduce|all_?reduce"
    r"|all_?gather|reduce_?scatter|lamport|spin_kernel)",
    re.IGNORECASE,
)


class Flight(NamedTuple):
    """A message: its start, its time in flight, and how much of that was under compute, in microseconds."""

    start: float
    in_flight: float
    covered: float


def traced_events(run: Callable[[], None], path: Path, device: torch.device, traced: Recording) -> list[dict[str, Any]]:
    """Run twice, write the trace of the second run to ``path``, and return its events."""
    on_gpu = device.type == "cuda"
    activities = [ProfilerActivity.CPU, ProfilerActivity.CUDA] if on_gpu else [ProfilerActivity.CPU]
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # the profiler's own remarks
    run()  # warm-up, not traced
    traced.messages.clear()
    with profile(activities=activities) as profiler:
        run()
        # Gloo notes the end of each send and receive in the profiler that was active at its start. A receive that is
        # still posted when the profiler stops would later note its end in memory that has been freed.
        traced.settle()
        if on_gpu:
            torch.cuda.synchronize()
    try:
        profiler.export_chrome_trace(str(path))
    except RuntimeError as error:
        raise UserError(f"--profile: {path} cannot be written: {error}") from None
    events: list[dict[str, Any]] = json.loads(path.read_text(encoding="utf-8"))["traceEvents"]
    return events


def spans_of(events: Iterable[dict[str, Any]], **named: str) -> list[tuple[float, float]]:
    """Return the start and the end of the events whose entries are as ``named``, ascending."""
    chosen = (event for event in events if named.items() <= event.items())
    return sorted((event["ts"], event["ts"] + event["dur"]) for event in chosen)


def flights_of(phase: str, flights: Iterable[Flight], events: Iterable[dict[str, Any]]) -> list[Flight]:
    """Return the messages that were started in a phase, which may have run several times."""
    spans = spans_of(events, name=phase, cat="user_annotation")
    return [flight for begin, end in spans for flight in flights if begin <= flight.start < end]


def overlap_of(flights: Sequence[Flight]) -> Overlap:
    in_flight, covered = sum(flight.in_flight for flight in flights), sum(flight.covered for flight in flights)
    return Overlap(in_flight / 1e3, covered / 1e3)


def covered_between(
    spans: Iterable[tuple[float, float]], begins: Sequence[float], ends: Sequence[float]
) -> list[float]:
    """Return how much of the time from each of ``begins`` to its end the ascending ``spans`` cover."""
    edges, before = [0.0], [0.0]  # times, and how much is covered before them
    for start, stop in spans:
        start, stop = max(start, edges[-1]), max(stop, edges[-1])
        edges += [start, stop]
        before += [before[-1], before[-1] + stop - start]
    covered: list[float] = (np.interp(ends, edges, before) - np.interp(begins, edges, before)).tolist()
    return covered


def cpu_flights(events: Sequence[dict[str, Any]], alone: Sequence[float]) -> list[Flight]:
    """Return the messages: the k-th start with the k-th wait and ``alone[k]`` microseconds. The time between a start
    and its wait is compute, but for the starts and waits of other messages."""
    starts, waits = (spans_of(events, name=name, ph="X") for name in (TRACED_START, TRACED_WAIT))
    begins, ends = [started for _, started in starts], [wait for wait, _ in waits]
    talk = covered_between(sorted(starts + waits), begins, ends)
    flights = []
    for (start, started), (wait, arrived), talked, time in zip(starts, waits, talk, alone, strict=True):
        compute, not_blocked = wait - started - talked, time - (started - start) - (arrived - wait)
        flights.append(Flight(start, time, max(0.0, min(compute, not_blocked))))
    return flights


def gpu_flights(events: Iterable[dict[str, Any]]) -> list[Flight]:
    """Return the communication kernels, with the time in which any other kernel ran."""
    kernels = [event for event in events if event.get("cat") == "kernel" and event.get("ph") == "X"]
    spans = spans_of(event for event in kernels if COMMUNICATION_KERNELS.search(event["name"]))
    others = spans_of(event for event in kernels if not COMMUNICATION_KERNELS.search(event["name"]))
    covered = covered_between(others, [begin for begin, _ in spans], [end for _, end in spans])
    return [Flight(begin, end - begin, under) for (begin, end), under in zip(spans, covered, strict=True)]
