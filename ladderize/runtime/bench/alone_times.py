"""What one collective takes with nothing beside it."""

import statistics
import time

import torch

from ladderize.ranks.group import Ranks
from ladderize.runtime.collectives.base import Collectives, NoCommunication
from ladderize.runtime.collectives.links import Link

ALONE_ROUNDS, ALONE_REPEAT = 6, 10


def synchronize(device: torch.device) -> None:
    """Wait until a GPU has done all that it was told to."""
    if device.type == "cuda":
        torch.cuda.synchronize()


class AloneTimes:
    """Seconds of one collective with nothing beside it, by its name and the size of its message; measured when first
    asked for."""

    def __init__(self, group: Ranks, collectives: Collectives, link: Link | None, dtype: torch.dtype) -> None:
        self.group, self.collectives, self.link, self.dtype = group, collectives, link, dtype
        self.measured: dict[tuple[str, int], float] = {}

    def seconds(self, collective: str, size: int) -> float:
        """collective: all_reduce or all_gather (of ``size`` bytes from each rank). All ranks call it."""
        if (collective, size) not in self.measured:
            self.measured[collective, size] = self._measure(collective, size)
        return self.measured[collective, size]

    def milliseconds(self) -> dict[str, float]:
        """``alone_ms`` of bench.json: all that was asked for so far."""
        return {
            f"{collective} of {size} bytes": seconds * 1e3
            for (collective, size), seconds in sorted(self.measured.items())
        }

    def sizes_outside_range(self) -> list[int]:
        """Bytes of the messages that an emulated link's time is only extrapolated for."""
        link = self.link
        return sorted(size for _, size in self.measured if link is not None and not link.in_range(size))

    def _measure(self, collective: str, size: int) -> float:
        if self.link is not None:
            return self.link.seconds(size * (self.collectives.ranks if collective == "all_gather" else 1))
        if self.collectives.ranks == 1 or isinstance(self.collectives, NoCommunication):
            return 0.0
        message = torch.zeros(size, dtype=torch.uint8, device=self.group.device)
        message = message.view(torch.bfloat16 if size % self.dtype.itemsize else self.dtype)
        communicate = getattr(self.collectives, collective)
        samples = []
        for _ in range(ALONE_ROUNDS):
            self.group.barrier()
            synchronize(self.group.device)
            begin = time.perf_counter()
            for _ in range(ALONE_REPEAT):  # back to back: after a barrier ranks do not start at once
                communicate(message)
            synchronize(self.group.device)
            samples.append(max(self.group.gather(time.perf_counter() - begin)) / ALONE_REPEAT)
        return statistics.median(samples[1:])
