"""The processes of ``accelerate launch`` or torchrun, or this one alone."""

import contextlib
import os
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch

from ladderize.console import silent_stdout

# One rank measures, or trains its last block, while the others wait: as long as that takes. The launcher ends them if
# one fails.
TIMEOUT = timedelta(days=30)


@dataclass(frozen=True)
class Ranks:
    """This process's place. state: accelerate's, where there are several."""

    rank: int
    size: int
    device: torch.device
    state: Any = None

    @property
    def local_size(self) -> int:
        """How many of the processes run on this machine."""
        return self.size if self.state is None else int(os.environ.get("LOCAL_WORLD_SIZE") or self.size)

    def mesh(self) -> Any:
        """All ranks in a row, for FSDP2."""
        return torch.distributed.init_device_mesh(self.device.type, (self.size,))

    @property
    def is_main(self) -> bool:
        return self.rank == 0

    @contextlib.contextmanager
    def main_first(self) -> Iterator[None]:
        """The main process goes through the block before the others enter it."""
        with self.state.main_process_first() if self.state is not None else contextlib.nullcontext():
            yield

    def barrier(self) -> None:
        if self.state is not None:
            self.state.wait_for_everyone()


def join_ranks(device: str) -> Ranks:
    """Join the group that a launcher has started, if one has; device: cpu or cuda."""
    if os.environ.get("WORLD_SIZE", "1") in ("", "1"):
        return Ranks(0, 1, torch.device(device, 0) if device == "cuda" else torch.device(device))
    from accelerate import PartialState

    with silent_stdout():
        state = PartialState(cpu=device == "cpu", timeout=TIMEOUT)
    return Ranks(state.process_index, state.num_processes, state.device, state)
