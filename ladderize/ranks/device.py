"""The devices, cores and threads to compute on. Torch is imported inside of functions."""

import ctypes
import mmap
import os
import platform
from pathlib import Path
from typing import Any

from ladderize.choices import DeviceName
from ladderize.errors import UserError
from ladderize.files.documents import read_yaml

M_TRIM_THRESHOLD, M_MMAP_MAX = -1, -4  # of malloc.h
OVERCOMMIT, COUNTS_ADDRESSES = Path("/proc/sys/vm/overcommit_memory"), "2"  # a system that counts them as memory
DEVICE_TABLE = Path(__file__).with_name("devices.yaml")


def default_device() -> DeviceName:
    """Return ``cuda`` where torch sees a GPU, else ``cpu``."""
    import torch

    return "cuda" if torch.cuda.is_available() else "cpu"


def check_device(device: str) -> None:
    """Raise UserError for a word that names no device, or a device that is not here."""
    import torch

    try:
        found_device = torch.device(device)
    except RuntimeError:  # none that torch knows
        found_device = torch.device("meta")
    if found_device.type not in ("cpu", "cuda", "mps"):
        raise UserError(f"--device {device[:80]!r} is nothing to compute on; give cpu, cuda or cuda:0")
    gpus = torch.cuda.device_count() if default_device() == "cuda" else 0
    if found_device.type == "cuda" and (found_device.index or 0) >= gpus:
        raise UserError(f"--device {device}, but torch sees {gpus or 'no'} GPUs here")


def known_gpu(torch_name: str) -> dict[str, Any]:
    """Return the row of devices.yaml of a GPU by torch's name for it; empty for one that is not in there."""
    return next((row for row in read_yaml(DEVICE_TABLE).values() if row["torch_name"] == torch_name), {})


def avoid_cudnn_attention() -> None:
    """Take cuDNN out of the kernels that PyTorch's attention chooses from. Its gradients may be NaN with a mask
    (pytorch/pytorch#196678), and it plans each length anew, for 0.1 s and more."""
    import torch

    torch.backends.cuda.enable_cudnn_sdp(False)


def cores() -> set[int]:
    """Return the cores that this process may run on."""
    return os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else set(range(os.cpu_count() or 1))


def processor() -> str:
    """Return the model of this machine's processor, or its architecture."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, platform.processor() or platform.machine())


def set_threads(threads: int | None, ranks: int) -> None:
    """Set torch's threads; None: this machine's cores, divided by its processes (``ranks``). Spinning OpenMP teams that
    overlap on a core slow each other down a hundredfold."""
    import torch

    torch.set_num_threads(threads or max(1, len(cores()) // ranks))


def set_up_heap() -> None:
    """Make glibc's malloc keep what is freed, and take huge pages.

    New memory comes from the kernel one page fault at a time: a sixth of a CPU's time on prompts of 8 x 1,024 tokens.
    And weights that no cache holds are read up to a quarter faster where pages are huge (docs/runtime.md). The heap
    grows by addresses alone here; memory is taken when it is first written to.
    """
    import torch

    from ladderize.memory import available_bytes

    library = ctypes.CDLL(None)
    if not hasattr(library, "mallopt"):
        return
    library.mallopt(M_MMAP_MAX, 0)
    library.mallopt(M_TRIM_THRESHOLD, -1)
    if OVERCOMMIT.is_file() and OVERCOMMIT.read_text().strip() == COUNTS_ADDRESSES:
        return
    size = available_bytes(torch.device("cpu")) or 0
    library.malloc.restype = ctypes.c_void_p
    if heap := library.malloc(ctypes.c_size_t(size)):
        begin = -(-heap // mmap.PAGESIZE) * mmap.PAGESIZE
        library.madvise(ctypes.c_void_p(begin), ctypes.c_size_t(heap + size - begin), mmap.MADV_HUGEPAGE)
        library.free(ctypes.c_void_p(heap))


def take_cores(rank: int, ranks: int, threads: int | None) -> int | None:
    """Keep this process on its share of the machine's cores, unless that is less than ``threads``; return its threads.
    A rank that waits for a message over gloo sleeps. If it wakes up on a core of another rank, the two take turns for a
    tick of the clock (4 ms), though another core is idle."""
    all_cores = sorted(cores())
    share = len(all_cores) // ranks
    if share < (threads or 1) or not hasattr(os, "sched_setaffinity"):
        return threads
    os.sched_setaffinity(0, all_cores[rank * share : (rank + 1) * share])
    return threads or share
