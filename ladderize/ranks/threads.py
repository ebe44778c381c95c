"""Cores and threads: a rank that takes a core which another one has slows both down."""

import os

import torch


def cores() -> set[int]:
    """The cores that this process may run on."""
    return os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else set(range(os.cpu_count() or 1))


def set_threads(threads: int | None, ranks: int) -> None:
    """Share the cores out: spinning OpenMP teams that overlap on a core slow each other down a hundredfold.

    threads: of each process; None divides the cores by ``ranks``, the processes of this machine.
    """
    torch.set_num_threads(threads or max(1, len(cores()) // ranks))
