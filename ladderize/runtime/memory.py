"""How far memory rises while something runs."""

from pathlib import Path
from types import TracebackType

import torch

STATUS, CLEAR = Path("/proc/self/status"), Path("/proc/self/clear_refs")


class PeakMemory:
    """``rise``: bytes of this process's peak above where it stood on entry; None where the system cannot tell.

    GPU: of the device's allocator. Linux: of the resident set, whose high-water mark is reset on entry.
    """

    def __init__(self, device: torch.device) -> None:
        self.on_gpu = device.type == "cuda"
        self.rise: int | None = None

    def __enter__(self) -> "PeakMemory":
        if self.on_gpu:
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
            self.before: int | None = torch.cuda.memory_allocated()
        else:
            try:
                CLEAR.write_text("5")
                self.before = resident("VmRSS")
            except OSError:
                self.before = None
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        peak = torch.cuda.max_memory_allocated() if self.on_gpu else resident("VmHWM") if self.before is not None else None
        if peak is not None and self.before is not None:
            self.rise = max(0, peak - self.before)


def resident(key: str) -> int | None:
    """VmRSS or VmHWM of this process in bytes."""
    for line in STATUS.read_text().splitlines():
        if line.startswith(key + ":"):
            return int(line.split()[1]) * 1024
    return None
