"""What vLLM is told about the ranks: which of them share memory, and groups of a part of them.

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
from vllm.v1.worker.cpu_worker import CPUWorker

from ladderize.ranks.group import Ranks, host_id

IDENTITY = "LADDERIZE_VLLM_HOST"
NETWORK = "/proc/self/ns/net"  # a link, whose target names the network namespace
GROUP = (parallel_state, "_TP")
# what vLLM makes when they are first needed
MADE_LATER: dict[tuple[ModuleType, str], Any] = {
    (flashinfer_all_reduce, "_fi_ar_workspace"): None,
    (flashinfer_all_reduce, "_fi_ar_quant_workspace"): None,
    (flashinfer_all_reduce, "_fi_ar_workspace_failed"): False,
    (flashinfer_all_reduce, "_fi_ar_quant_workspace_failed"): False,
}


def identify(ranks: Ranks) -> None:
    """Let vLLM see which ranks share memory (``IdentifiedWorker``). Rank 0's starter removes what has these names."""
    namespace = os.readlink(NETWORK) if os.path.islink(NETWORK) else ""
    host = hashlib.sha256((host_id() + namespace).encode()).hexdigest()[:12]
    os.environ[IDENTITY] = ranks.broadcast(f"ladderize-{os.getppid()}") + "-" + host


class IdentifiedWorker(CPUWorker):
    """Ranks that others start get one name for their shared memory from vLLM, wherever they are; it then sums over
    memory that they may not share, or over memory where they are to use a link. With a name for each host and network
    namespace, vLLM's own check finds out, and takes gloo.
    """

    def init_device(self) -> None:
        """vLLM makes the name from the end of this address. The ranks have met before, so it is not used otherwise."""
        self.distributed_init_method = f"env:{os.environ[IDENTITY]}"
        super().init_device()


class ReplicaGroup:
    """This rank's, one of ``count`` of as many neighbours each; all ranks make it together, after vLLM made its own of
    all."""

    def __init__(self, ranks: Ranks, count: int) -> None:
        size = ranks.size // count
        self.number = ranks.rank // size
        world = parallel_state.get_world_group()
        group = parallel_state.init_model_parallel_group(
            [list(range(first, first + size)) for first in range(0, ranks.size, size)],
            world.local_rank,
            torch.distributed.get_backend(world.device_group),
            group_name="tp",  # by which vLLM tells where its fast all-reduces are allowed
        )
        self.values = {GROUP: group, **MADE_LATER}

    @contextlib.contextmanager
    def entered(self) -> Iterator[None]:
        """vLLM has this group meanwhile."""
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
