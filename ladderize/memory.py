"""Memory: the peak so far, and the free bytes."""

import contextlib
import gc
from pathlib import Path

import torch

from ladderize.console import human_bytes
from ladderize.errors import UserError

GPU_RESERVE = 16  # one part in so many is for the buffers of NCCL and cuBLAS, and for what graphs of prompts hold
STATUS, MEMINFO = Path("/proc/self/status"), Path("/proc/meminfo")
CGROUP = Path("/sys/fs/cgroup")
# Control groups of versions 2 and 1: limit, usage, and a table with the part of the usage that is droppable page cache.
CGROUPS = (
    (CGROUP / "memory.max", CGROUP / "memory.current", CGROUP / "memory.stat"),
    (CGROUP / "memory/memory.limit_in_bytes", CGROUP / "memory/memory.usage_in_bytes", CGROUP / "memory/memory.stat"),
)


def resident(key: str) -> int | None:
    """Return VmRSS or VmHWM of this process in bytes; None where the system does not tell."""
    kilobytes = _table(STATUS).get(f"{key}:")
    return None if kilobytes is None else kilobytes * 1024


def peak_bytes(device: torch.device) -> int | None:
    """Return the most bytes that this process has held so far: in torch's allocator on a GPU, else resident."""
    return torch.cuda.max_memory_allocated(device) if device.type == "cuda" else resident("VmHWM")


def available_bytes(device: torch.device) -> int | None:
    """Return the bytes that can still be allocated, also those that torch's allocator keeps, or a control group
    leaves."""
    if device.type == "cuda":
        kept = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return int(torch.cuda.mem_get_info(device)[0]) + kept
    limits = []
    if MEMINFO.is_file():
        limits.append(_table(MEMINFO)["MemAvailable:"] * 1024)
    for limit, used, stat in CGROUPS:
        # without such a version of control groups, and without a limit ("max")
        with contextlib.suppress(OSError, ValueError, KeyError):
            limits.append(int(limit.read_text()) - int(used.read_text()) + _table(stat)["inactive_file"])
    return min(limits, default=None)


def release(device: torch.device) -> None:
    """Give back what torch's allocator keeps of a GPU, to other processes on it too, and count its peak anew."""
    if device.type == "cuda":
        gc.collect()
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(device)


def check_room(needed: int, device: torch.device, user: str, advice: str, *, processes: int = 1) -> None:
    """Raise UserError if ``user`` needs more bytes than are free, before the system starts to kill processes; the
    ``processes`` of a machine share its memory, and have a GPU each."""
    available = available_bytes(device)
    if device.type == "cuda" and available is not None:
        available -= available // GPU_RESERVE
    if device.type == "cpu" and processes > 1:
        needed, user = needed * processes, f"{user} in each of {processes} processes"
    if available is not None and needed > available:
        raise UserError(
            f"{user} needs {human_bytes(needed)} of memory, and {human_bytes(available)} are free; {advice}"
        )


def _table(path: Path) -> dict[str, int]:
    lines = (line.split() for line in path.read_text().splitlines())
    return {line[0]: int(line[1]) for line in lines if len(line) > 1 and line[1].isdecimal()}
