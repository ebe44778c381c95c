"""The ranks for vLLM: the ranks that share memory, and groups of a part of the ranks.

vLLM keeps its tensor-parallel group in a module's variable, and FlashInfer's buffers for that group in others. An
engine of a part of the ranks has its own values there while it is built and while it runs.
"""

import contextlib
import hashlib
import os
from collections.abc import Iterator
from types import ModuleType
from typing import Any

import torch
from vllm.distributed import parallel_state
from vllm.distributed.device_communicators import flashinfer_all_reduce

from ladderize.ranks.group import Ranks, host_id

IDENTITY = "LADDERIZE_VLLM_HOST"
NETWORK = "/proc/self/ns/net"  # a link, whose target names the network namespace
GROUP = (parallel_state, "_TP")
# the values before vLLM makes the buffers, which it does at first use
MADE_LATER: dict[tuple[ModuleType, str], Any] = {
    (flashinfer_all_reduce, "_fi_ar_workspace"): None,
    (flashinfer_all_reduce, "_fi_ar_quant_workspace"): None,
    (flashinfer_all_reduce, "_fi_ar_workspace_failed"): False,
    (flashinfer_all_reduce, "_fi_ar_quant_workspace_failed"): False,
}


def identify(ranks: Ranks, starter: int) -> None:
    """Name this rank's host and network namespace, so that vLLM finds the ranks that share memory (worker.py).

    starter: the process that removes segments with its number in their names (``remove_segments``).
    """
    namespace = os.readlink(NETWORK) if os.path.islink(NETWORK) else ""
    host = hashlib.sha256((host_id() + namespace).encode()).hexdigest()[:12]
    os.environ[IDENTITY] = f"ladderize-{ranks.broadcast(starter)}-{host}"


class ReplicaGroup:
    """The group of this rank and its neighbours, one of ``count`` of equal size.

    All ranks create it together, after vLLM has created its group of all.
    """

    def __init__(self, ranks: Ranks, count: int) -> None:
        size = ranks.size // count
        self.number = ranks.rank // size
        world = parallel_state.get_world_group()
        group = parallel_state.init_model_parallel_group(
            [list(range(first, first + size)) for first in range(0, ranks.size, size)],
            world.local_rank,
            torch.distributed.get_backend(world.device_group),
            group_name="tp",  # the name of groups that vLLM allows its fast all-reduces
        )
        self.values = {GROUP: group, **MADE_LATER}

    @contextlib.contextmanager
    def entered(self) -> Iterator[None]:
        """Make this vLLM's tensor-parallel group until the end of the block."""
        kept = _current(self.values)
        _set(self.values)
        try:
            yield
        finally:
            self.values = _current(self.values)
            _set(kept)


def _current(names: dict[tuple[ModuleType, str], Any]) -> dict[tuple[ModuleType, str], Any]:
    return {(module, name): getattr(module, name) for module, name in names}


def _set(values: dict[tuple[ModuleType, str], Any]) -> None:
    for (module, name), value in values.items():
        setattr(module, name, value)
