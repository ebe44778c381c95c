"""Who this process is among its ranks, and what they tell each other."""

import contextlib
import os
import socket
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from ladderize.console import silenced
from ladderize.errors import UserError
from ladderize.ranks.device import check_device
from ladderize.ranks.environment import launch_variables
from ladderize.ranks.launcher import ALONE, Place, launched_place
from ladderize.ranks.rendezvous import meet

# Loading, and the fp32 reference that rank 0 computes while the others wait, can be long; a dead rank is noticed
# otherwise.
INFERENCE_TIMEOUT = timedelta(hours=2)
# In training one rank measures, or trains its last block, while the others wait: as long as that takes. The launcher
# ends them if one fails.
TRAINING_TIMEOUT = timedelta(days=30)


def _unheard(value: Any) -> None:
    """Reports were not asked for."""


@dataclass(frozen=True)
class Ranks:
    """This process is ``rank`` of ``size``, ``local_size`` of them on this machine; ``device`` is what it computes on.

    All ranks call the same methods in the same order. Messages between them go over the CPU.
    ``report(value)`` gives a value to whoever started the ranks, while they go on; only what rank 0 reports is heard.
    ``split`` makes subgroups. ``group``: torch's process group of these ranks; None: the default one, of all ranks that
    were started, or a rank alone. ``others``: ranks of this machine that were started with these and are not of them.
    """

    rank: int
    size: int
    device: torch.device
    local_size: int = 1
    report: Callable[[Any], None] = _unheard
    group: Any = None
    others: int = 0

    @property
    def is_main(self) -> bool:
        """Whether this is the first of these ranks. Every subgroup has a first rank of its own: who writes files or
        prints for all asks the Ranks of all."""
        return self.rank == 0

    def gather(self, value: Any) -> list[Any]:
        """Every rank's ``value`` (any picklable object), in order, on every rank."""
        if self.size == 1:
            return [value]
        values: list[Any] = [None] * self.size
        dist.all_gather_object(values, value, group=self.group)
        return values

    def broadcast(self, value: Any) -> Any:
        """Rank 0's ``value`` on every rank."""
        if self.size == 1:
            return value
        values = [value]
        dist.broadcast_object_list(values, group=self.group, group_src=0, device=torch.device("cpu"))
        return values[0]

    def barrier(self) -> None:
        """Wait for all ranks, blocked in the kernel rather than spinning, so that whoever is late has the cores."""
        self.gather(None)

    @contextlib.contextmanager
    def main_first(self) -> Iterator[None]:
        """Rank 0 goes through the block before the others enter it."""
        if not self.is_main:
            self.barrier()
        yield
        if self.is_main:  # not after an error: then the launcher ends the others
            self.barrier()

    def sum(self, values: torch.Tensor) -> torch.Tensor:
        """``values`` summed over the ranks, in place, wherever the tensor is."""
        if self.size > 1:
            dist.all_reduce(values, group=self.group)
        return values

    def mesh(self) -> Any:
        """These ranks in a row, as a device mesh, for FSDP2."""
        if self.group is None:
            return dist.init_device_mesh(self.device.type, (self.size,))
        return DeviceMesh.from_group(self.group, self.device.type)

    def groups_of(self, tp_size: int) -> int:
        """How many groups of ``tp_size`` these ranks make. Raises UserError where ``tp_size`` does not divide them."""
        if self.size % tp_size:
            raise UserError(
                f"--tp-size {tp_size} does not divide the {self.size} processes that the launcher started; start a"
                " multiple of it"
            )
        return self.size // tp_size

    def split(self, tp_size: int, *, timeout: timedelta = TRAINING_TIMEOUT) -> tuple["Ranks", "Ranks"]:
        """These ranks as a table of ``size / tp_size`` rows and ``tp_size`` columns; returns (data, tensor).

        tensor: this rank's row, ``tp_size`` neighbours that share one model. data: its column, the ranks that hold the
        same part of the model and read different data. All ranks call it. timeout: of the new groups' operations.
        Raises UserError where ``tp_size`` does not divide the ranks.
        """
        self.groups_of(tp_size)
        alone = replace(self, rank=0, size=1, local_size=1, group=None, others=self.others + self.local_size - 1)
        if tp_size == 1:
            return self, alone
        if tp_size == self.size:
            return alone, self
        table = torch.arange(self.size).view(-1, tp_size)
        hosts = self.gather(host_id())

        def subgroup(lines: list[list[int]]) -> Ranks:
            groups = [dist.new_group([_global(self.group, rank) for rank in line], timeout=timeout) for line in lines]
            own, line = next((group, line) for group, line in zip(groups, lines, strict=True) if self.rank in line)
            here = sum(hosts[rank] == hosts[self.rank] for rank in line)
            others = self.others + self.local_size - here
            return replace(self, rank=line.index(self.rank), size=len(line), local_size=here, group=own, others=others)

        return subgroup(table.t().tolist()), subgroup(table.tolist())


def _global(group: Any, rank: int) -> int:
    return rank if group is None else dist.get_global_rank(group, rank)


def launched() -> Place:
    """Where a launcher has put this process, or alone; raises UserError if the launcher left out what it has to say."""
    try:
        return launched_place()
    except ValueError as error:
        raise UserError(str(error)) from None


def already_started() -> bool:
    """Whether a launcher has started this process as one of several."""
    return launched() != ALONE


def rank_device(kind: str, local_rank: int) -> torch.device:
    """The device of a rank: cpu, or its GPU among those that it sees, which becomes torch's current one."""
    if kind != "cuda":
        return torch.device(kind)
    index = local_rank % torch.cuda.device_count()  # a launcher may show each rank its own GPU only
    torch.cuda.set_device(index)
    return torch.device("cuda", index)


def join_group(place: Place, device: str, *, timeout: timedelta, init_method: str | None = None) -> Ranks:
    """Join torch's process group as ``place`` says; device: cpu or cuda. Alone there is no group to join.

    init_method: where the ranks meet, if not where the launcher's variables say. timeout: of the group's operations.
    Raises UserError where ranks do not find each other.
    """
    ranks = Ranks(place.rank, place.size, rank_device(device, place.local_rank), place.local_size)
    if place.size > 1:
        backend = "cpu:gloo,cuda:nccl" if device == "cuda" else "gloo"
        meeting: dict[str, Any] = (
            {"init_method": init_method} if init_method is not None else {"store": meet(launch_variables(), timeout)}
        )
        with silenced(1):
            dist.init_process_group(backend, rank=place.rank, world_size=place.size, timeout=timeout, **meeting)
    return ranks


def join_ranks(device: str) -> Ranks:
    """For training: the group that a launcher has started, if one has; device: cpu or cuda.

    It lasts as long as the process: several trainings of one process share it.
    """
    check_device(device)
    place = launched()
    if place != ALONE and dist.is_initialized():
        return Ranks(place.rank, place.size, rank_device(device, place.local_rank), place.local_size)
    return join_group(place, device, timeout=TRAINING_TIMEOUT)


def host_id() -> str:
    """A name that is equal for processes of one running host only."""
    boot = Path("/proc/sys/kernel/random/boot_id")
    namespace = Path("/proc/self/ns/mnt")
    mounts = os.readlink(namespace) if namespace.is_symlink() else ""
    return f"{socket.gethostname()} {boot.read_text().strip() if boot.exists() else ''} {mounts}"
