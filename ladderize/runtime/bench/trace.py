"""The proof of overlap: a Chrome trace of a run, and the share of its communication that ran under compute."""

import bisect
import itertools
import json
import os
import re
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

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


def flights_of(phase: str, flights: Iterable[Flight], events: Iterable[dict[str, Any]]) -> list[Flight]:
    """Return the messages that were started in a phase, which may have run several times."""
    spans = [
        (event["ts"], event["ts"] + event["dur"])
        for event in events
        if event.get("name") == phase and event.get("cat") == "user_annotation"
    ]
    return [flight for begin, end in spans for flight in flights if begin <= flight.start < end]


def overlap_of(flights: Sequence[Flight]) -> Overlap:
    in_flight, covered = sum(flight.in_flight for flight in flights), sum(flight.covered for flight in flights)
    return Overlap(in_flight / 1e3, covered / 1e3)


def cpu_flights(events: Iterable[dict[str, Any]], alone: Sequence[float]) -> list[Flight]:
    """Return the messages: the k-th start with the k-th wait and ``alone[k]`` microseconds. The time between a start
    and its wait is compute, but for the starts and waits of other messages."""
    spans: dict[str, list[tuple[float, float]]] = {TRACED_START: [], TRACED_WAIT: []}
    for event in events:
        if event.get("name") in spans and event.get("ph") == "X":
            spans[event["name"]].append((event["ts"], event["dur"]))
    starts, waits = sorted(spans[TRACED_START]), sorted(spans[TRACED_WAIT])
    talk = sorted(starts + waits)
    begins = [begin for begin, _ in talk]
    before = [0.0, *itertools.accumulate(duration for _, duration in talk)]  # sum of the first k
    flights = []
    for (start, starting), (wait, waiting), time in zip(starts, waits, alone, strict=True):
        stop = start + starting
        compute = wait - stop - (before[bisect.bisect_left(begins, wait)] - before[bisect.bisect_left(begins, stop)])
        flights.append(Flight(start, time, max(0.0, min(compute, time - starting - waiting))))
    return flights


def gpu_flights(events: Iterable[dict[str, Any]]) -> list[Flight]:
    """Return the communication kernels, with the time in which any other kernel ran."""
    spans: dict[bool, list[tuple[float, float]]] = {True: [], False: []}
    for event in events:
        if event.get("cat") == "kernel" and event.get("ph") == "X":
            spans[bool(COMMUNICATION_KERNELS.search(event["name"]))].append((event["ts"], event["ts"] + event["dur"]))
    compute: list[tuple[float, float]] = []  # when any other kernel runs
    for start, stop in sorted(spans[False]):
        if compute and start <= compute[-1][1]:
            start, last = compute.pop()
            stop = max(last, stop)
        compute.append((start, stop))
    starts, stops = [start for start, _ in compute], [stop for _, stop in compute]
    flights = []
    for start, stop in sorted(spans[True]):
        meanwhile = compute[bisect.bisect_right(stops, start) : bisect.bisect_left(starts, stop)]
        covered = sum(min(stop, end) - max(start, begin) for begin, end in meanwhile)
        flights.append(Flight(start, stop - start, covered))
    return flights
