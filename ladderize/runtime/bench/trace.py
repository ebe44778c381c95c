"""The proof of overlap: a Chrome trace of a run, and the share of its communication that ran under compute.

On a CPU, the hidden time is the time that an all-reduce takes alone, less the time that its start and its wait blocked,
and at most the compute between the two. On a GPU, it is the time in which a communication kernel and another stream's
kernel ran at once.
"""

import bisect
import itertools
import json
import os
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

from ladderize.errors import UserError
from ladderize.runtime.bench.document import Overlap
from ladderize.runtime.collectives.observed import TRACED_START, TRACED_WAIT, Traced

# Kernels of NCCL; of torch's symmetric memory; of vLLM's custom all-reduce (cross_device_reduce) and quick reduce; of
# FlashInfer, TensorRT-LLM and MSCCL++ (all of whose names hold allreduce). The spin_kernel of emulated.py stands for
# communication in emulated runs. Inductor's kernels, which are named after operators around them, never send anything.
COMMUNICATION_KERNELS = re.compile(
    r"^(?!triton_\w+_fused_).*?(?:nccl|nvshmem|one_?shot|two_?shot|multimem|cross_device_reduce|quickreduce|all_?reduce"
    r"|all_?gather|reduce_?scatter|lamport|spin_kernel)",
    re.IGNORECASE,
)


@dataclass(frozen=True)
class Flight:
    """A message: its start, its time in flight, and the part of that under compute, in microseconds."""

    start: float
    in_flight: float
    covered: float


def trace(
    run: Callable[[], None],
    parts: Sequence[str],
    path: Path,
    device: torch.device,
    traced: Traced,
    alone: Callable[[int], float],
) -> dict[str, Overlap]:
    """Write the trace of ``run()`` to ``path``, and return the overlap of each part.

    parts: names of spans that ``run()`` marks with ``record_function``; the device is idle at their ends.
    traced: the collectives of the model that runs.
    alone: returns the seconds of an all-reduce of so many bytes with nothing beside it.
    """
    flights, events = _traced_flights(run, path, device, traced, alone)
    overlaps = {}
    for part in parts:
        spans = [event for event in events if event.get("name") == part and event.get("cat") == "user_annotation"]
        inside = [f for f in flights if any(e["ts"] <= f.start < e["ts"] + e["dur"] for e in spans)]
        overlaps[part] = overlap_of(inside)
    return overlaps


def overlap_of(flights: Iterable[Flight]) -> Overlap:
    flights = list(flights)
    in_flight, covered = sum(flight.in_flight for flight in flights), sum(flight.covered for flight in flights)
    return Overlap(in_flight / 1e3, covered / 1e3, covered / in_flight if in_flight else 0.0)


def _traced_flights(
    run: Callable[[], None], path: Path, device: torch.device, traced: Traced, alone: Callable[[int], float]
) -> tuple[list[Flight], list[dict[str, Any]]]:
    """Trace a run, write the trace to ``path``, and return the run's messages and the trace's events."""
    on_gpu = device.type == "cuda"
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # the profiler's own remarks
    run()  # warm-up, not traced
    traced.sizes.clear()
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if on_gpu else [])]
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
    document = json.loads(path.read_text(encoding="utf-8"))
    events = document["traceEvents"]
    if on_gpu:
        flights = gpu_flights(events)
        if traced.sizes and not flights:
            raise UserError(
                f"--profile: {len(traced.sizes)} all-reduces ran, but none of the kernels in {path} is known to be"
                " communication; please report their names"
            )
        return flights, events
    flights = cpu_flights(events, [alone(size) * 1e6 for size in traced.sizes])
    path.write_text(json.dumps(document), encoding="utf-8")  # with the row of communication that cpu_flights has added
    return flights, events


def cpu_flights(events: list[dict[str, Any]], alone: Sequence[float]) -> list[Flight]:
    """Return the messages: the k-th start with the k-th wait and ``alone[k]`` microseconds.

    Adds each all-reduce to ``events`` as a span on a row of its own.

    The time between a start and its wait is compute, but for the starts and waits of other messages.
    """
    spans = {
        name: sorted((e for e in events if e.get("name") == name and e.get("ph") == "X"), key=lambda e: e["ts"])
        for name in (TRACED_START, TRACED_WAIT)
    }
    talk = sorted((e["ts"], e["dur"]) for found in spans.values() for e in found)
    begins = [begin for begin, _ in talk]
    before = [0.0, *itertools.accumulate(duration for _, duration in talk)]  # sum of the first k
    flights = []
    for start, wait, time in zip(spans[TRACED_START], spans[TRACED_WAIT], alone, strict=True):
        stop = start["ts"] + start["dur"]
        others = before[bisect.bisect_left(begins, wait["ts"])] - before[bisect.bisect_left(begins, stop)]
        compute = wait["ts"] - stop - others
        flights.append(Flight(start["ts"], time, max(0.0, min(compute, time - start["dur"] - wait["dur"]))))
        shown = {"ph": "X", "cat": "communication", "name": "all-reduce", "tid": "communication"}
        events.append(shown | {"pid": start["pid"], "ts": start["ts"], "dur": wait["ts"] + wait["dur"] - start["ts"]})
    return flights


def gpu_flights(events: list[dict[str, Any]]) -> list[Flight]:
    """Return the communication kernels, with the time in which any other kernel ran."""
    kernels = [event for event in events if event.get("cat") == "kernel" and event.get("ph") == "X"]
    spans: dict[bool, list[tuple[float, float]]] = {True: [], False: []}
    for event in kernels:
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
        beside = compute[bisect.bisect_right(stops, start) : bisect.bisect_left(starts, stop)]
        covered = sum(min(stop, end) - max(start, begin) for begin, end in beside)
        flights.append(Flight(start, stop - start, covered))
    return flights
