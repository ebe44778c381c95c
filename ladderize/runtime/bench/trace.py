"""Proof of overlap: a Chrome trace of one prefill and a few decode steps, and the share of communication that ran under
compute.

CPU: of the time that an all-reduce takes alone, what its start and its wait did not block, at most the compute between
the two. GPU: the time in which a communication kernel and another stream's kernel ran at once.
"""

import json
import os
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch.profiler import ProfilerActivity, profile

from ladderize.errors import UserError
from ladderize.files.records import Record
from ladderize.runtime.collectives.observed import TRACED_START, TRACED_WAIT, Traced

# torch.cuda._sleep's kernel stands for communication in emulated runs
COMMUNICATION_KERNELS = re.compile(r"nccl|spin_kernel|one_shot|two_shot|multimem", re.IGNORECASE)


@dataclass(frozen=True)
class Overlap(Record):
    """Milliseconds in flight, and of these under compute, in one traced run.

    proven: whether that is any overlap at all; None where the layout promises none.
    """

    LEFT_OUT: ClassVar = ("proven",)

    in_flight_ms: float
    under_compute_ms: float
    share: float
    proven: bool | None = None

    @classmethod
    def of_microseconds(cls, in_flight: float, under_compute: float) -> "Overlap":
        return cls(in_flight / 1e3, under_compute / 1e3, under_compute / in_flight if in_flight else 0.0)


def trace(
    run: Callable[[], None], path: Path, device: torch.device, traced: Traced, alone: Callable[[int], float]
) -> Overlap:
    """Write the trace of ``run()`` to ``path`` and measure its overlap.

    traced: the collectives of the model in it. alone: seconds of an all-reduce of so many bytes with nothing beside it.
    """
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
    if on_gpu:
        return gpu_overlap(document["traceEvents"])
    overlap = cpu_overlap(document["traceEvents"], [alone(size) * 1e6 for size in traced.sizes])
    path.write_text(json.dumps(document), encoding="utf-8")  # with the row of communication that cpu_overlap has added
    return overlap


def cpu_overlap(events: list[dict[str, Any]], alone: Sequence[float]) -> Overlap:
    """Pair the k-th start with the k-th wait and with ``alone[k]`` microseconds; adds each all-reduce as a span on a
    row of its own."""
    spans = {
        name: sorted((e for e in events if e.get("name") == name and e.get("ph") == "X"), key=lambda e: e["ts"])
        for name in (TRACED_START, TRACED_WAIT)
    }
    flight = covered = 0.0
    for start, wait, time in zip(spans[TRACED_START], spans[TRACED_WAIT], alone, strict=True):
        compute = wait["ts"] - start["ts"] - start["dur"]
        flight += time
        covered += max(0.0, min(compute, time - start["dur"] - wait["dur"]))
        events.append(
            {
                "ph": "X",
                "cat": "communication",
                "name": "all-reduce",
                "pid": start["pid"],
                "tid": "communication",
                "ts": start["ts"],
                "dur": wait["ts"] + wait["dur"] - start["ts"],
            }
        )
    return Overlap.of_microseconds(flight, covered)


def gpu_overlap(events: list[dict[str, Any]]) -> Overlap:
    """Intersect communication kernels with all other kernels."""
    kernels = [event for event in events if event.get("cat") == "kernel" and event.get("ph") == "X"]
    spans: dict[bool, list[tuple[float, float]]] = {True: [], False: []}
    for event in kernels:
        spans[bool(COMMUNICATION_KERNELS.search(event["name"]))].append((event["ts"], event["ts"] + event["dur"]))
    compute = _union(spans[False])
    flight = sum(stop - start for start, stop in spans[True])
    covered, first = 0.0, 0
    for start, stop in sorted(spans[True]):
        while first < len(compute) and compute[first][1] <= start:
            first += 1
        index = first
        while index < len(compute) and compute[index][0] < stop:
            covered += max(0.0, min(stop, compute[index][1]) - max(start, compute[index][0]))
            index += 1
    return Overlap.of_microseconds(flight, covered)


def _union(spans: list[tuple[float, float]]) -> list[tuple[float, float]]:
    merged: list[tuple[float, float]] = []
    for start, stop in sorted(spans):
        if merged and start <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(merged[-1][1], stop))
        else:
            merged.append((start, stop))
    return merged
