"""The group of ranks: joining it, and messages between its processes."""

import contextlib
import itertools
import os
import socket
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from ladderize.console import sentence
from ladderize.errors import UsageError, UserError
from ladderize.ranks.device import check_device
from ladderize.ranks.environment import ALONE, LOCAL_RANK, MASTER_ADDR, MASTER_PORT, Place, launched

_Piece = TypeVar("_Piece")
_Result = TypeVar("_Result")

# The time for ranks to find each other. Later operations may take longer.
MEETING_TIMEOUT = timedelta(minutes=5)
# Loading, and the fp32 reference that rank 0 computes while the others wait, can be long. A dead rank is noticed.
INFERENCE_TIMEOUT = timedelta(hours=2)
# In training one rank measures, or trains its last block, while the others wait. The launcher ends them if one fails.
TRAINING_TIMEOUT = timedelta(days=30)
# The timeout of messages between GPUs, and between CPUs through shared memory. These ranks do the same work at the same
# time, give or take a compilation. A rank that waits for another's work waits over gloo.
SAME_WORK_TIMEOUT = timedelta(hours=1)


def ignore(value: Any) -> None:
    """Do nothing with a report."""


@dataclass(frozen=True)
class Ranks:
    """This process as one of a group of ranks, which all call the same methods in the same order. Messages between them
    go over the CPU."""

    rank: int
    size: int
    device: torch.device
    local_size: int = 1  # the number of these ranks on this machine
    report: Callable[[Any], None] = ignore  # to the process that started the ranks; only rank 0's reports count
    group: Any = None  # torch's process group; None: the default one, of all ranks that were started, or a rank alone
    others: int = 0  # the ranks on this machine that were started with these and are not in the group

    @property
    def is_main(self) -> bool:
        """True for the first of these ranks; every subgroup has its own."""
        return self.rank == 0

    @property
    def words(self) -> str:
        return str(self.device) if self.size == 1 else f"{self.size} processes ({self.device.type})"

    def gather(self, value: Any) -> list[Any]:
        """Return every rank's ``value`` (any picklable object), in order, on every rank."""
        if self.size == 1:
            return [value]
        values: list[Any] = [None] * self.size
        dist.all_gather_object(values, value, group=self.group)
        return values

    def broadcast(self, value: Any) -> Any:
        """Return rank 0's ``value`` on every rank."""
        if self.size == 1:
            return value
        values = [value]
        dist.broadcast_object_list(values, group=self.group, group_src=0, device=torch.device("cpu"))
        return values[0]

    def shared_out(self, pieces: Sequence[_Piece], work: Callable[[_Piece], _Result]) -> Iterator[list[_Result]]:
        """Yield the results of ``work`` for all pieces, in order, on every rank: each does one piece in a round."""
        for first in range(0, len(pieces), self.size):
            mine = pieces[first + self.rank : first + self.rank + 1]
            yield [*itertools.chain.from_iterable(self.gather([work(piece) for piece in mine]))]

    def barrier(self) -> None:
        """Wait for all ranks, blocked in the kernel rather than spinning, so that late ranks have the cores."""
        self.gather(None)

    @contextlib.contextmanager
    def main_first(self) -> Iterator[None]:
        """Let rank 0 go through the block before the others enter it."""
        if not self.is_main:
            self.barrier()
        yield
        if self.is_main:  # not after an error: then the launcher ends the others
            self.barrier()

    def sum(self, values: torch.Tensor) -> torch.Tensor:
        """Sum ``values``, on any device, over the ranks, in place, and return it."""
        if self.size > 1:
            dist.all_reduce(values, group=self.group)
        return values

    def split(self, tp_size: int, timeout: timedelta = TRAINING_TIMEOUT) -> tuple["Ranks", "Ranks"]:
        """Arrange the ranks as a table of ``size / tp_size`` rows and ``tp_size`` columns; return (data, tensor).
        ``tensor`` is this rank's row: ``tp_size`` neighbours that share one model. ``data`` is its column: the ranks
        that hold the same part of the model and read different data. All ranks call it; ``tp_size`` divides them."""
        alone = replace(self, rank=0, size=1, local_size=1, group=None, others=self.others + self.local_size - 1)
        if tp_size == 1:
            return self, alone
        if tp_size == self.size:
            return alone, self
        table = torch.arange(self.size).view(-1, tp_size)
        hosts = self.gather(host_id())

        def subgroup(lines: list[list[int]]) -> Ranks:
            group: Any = self.group or dist.group.WORLD
            ids = torch.tensor([dist.get_global_rank(group, rank) for rank in range(self.size)])
            subgroup, _ = dist.new_subgroups_by_enumeration(ids[torch.tensor(lines)].tolist(), timeout=timeout)
            _limit_nccl(subgroup, self.device)
            line = next(line for line in lines if self.rank in line)
            here = sum(hosts[rank] == hosts[self.rank] for rank in line)
            rank, others = line.index(self.rank), self.others + self.local_size - here
            return replace(self, rank=rank, size=len(line), local_size=here, group=subgroup, others=others)

        return subgroup(table.t().tolist()), subgroup(table.tolist())


def _limit_nccl(group: Any, device: torch.device) -> None:
    """Give a group's NCCL SAME_WORK_TIMEOUT: the group's own timeout would hold for both backends."""
    if device.type == "cuda":
        group._get_backend(device)._set_default_timeout(SAME_WORK_TIMEOUT)


def rank_device(kind: str, local_rank: int) -> torch.device:
    """Return the device of a rank: cpu, its GPU among those that it sees, or the one that ``kind`` numbers. A GPU
    becomes torch's current one, to which streams and CUDA graphs belong."""
    device = torch.device(kind)
    if kind == "cuda":
        count = torch.cuda.device_count()
        if local_rank >= count > 1:
            raise UserError(
                f"this is process {local_rank} of its machine, counted from 0, but torch sees {count} GPUs here; start"
                f" as many, or set {LOCAL_RANK} where the launcher does not"
            )
        device = torch.device("cuda", local_rank if count > 1 else 0)  # a launcher may show each rank its own GPU only
    if device.type == "cuda":
        torch.cuda.set_device(device)
    return device


@contextlib.contextmanager
def _silenced() -> Iterator[None]:
    """Drop what C++ code writes: gloo's lines, which would break ``--json``, and torch's stack frames of an error."""
    sys.stdout.flush()
    sys.stderr.flush()
    kept = [os.dup(stream) for stream in (1, 2)]
    with open(os.devnull, "w") as nowhere:
        for stream in (1, 2):
            os.dup2(nowhere.fileno(), stream)
    try:
        yield
    finally:
        for stream, copy in zip((1, 2), kept, strict=True):
            os.dup2(copy, stream)
            os.close(copy)


def join_group(launch: Place, device: str, *, timeout: timedelta, init_method: str = "env://") -> Ranks:
    """Join torch's process group as ``launch``, unless this process has; device: cpu or cuda. Alone there is no group.
    init_method: where the ranks meet; by default as torchrun's variables say."""
    ranks = Ranks(launch.rank, launch.size, rank_device(device, launch.local_rank), launch.local_size)
    if launch.size > 1 and not dist.is_initialized():
        if device == "cuda":
            # While a graph is captured, NCCL would register its messages with all ranks. With torch's expandable
            # segments that ended in illegal accesses (pytorch/pytorch#158029), on two machines in a stall
            # (NVIDIA/nccl#2389). The switch's sum, which gains most by it, takes no memory of cudaMalloc anyway.
            os.environ.setdefault("NCCL_GRAPH_REGISTER", "0")
        try:
            with _silenced():
                dist.init_process_group(
                    "cpu:gloo,cuda:nccl" if device == "cuda" else "gloo",
                    init_method=init_method,
                    rank=launch.rank,
                    world_size=launch.size,
                    timeout=MEETING_TIMEOUT,
                    # else NCCL guesses a rank's GPU from its number
                    device_id=ranks.device if device == "cuda" else None,
                )
        except (RuntimeError, ValueError) as error:
            raise UserError(
                f"rank {launch.rank} of {launch.size} does not find the others ({sentence(error)[:300]}); start all of"
                f" them with the same {MASTER_ADDR} and {MASTER_PORT}"
            ) from None
        dist.distributed_c10d._get_default_store().set_timeout(timeout)
        world: Any = dist.group.WORLD
        world._get_backend(torch.device("cpu"))._set_default_timeout(timeout)
        _limit_nccl(world, ranks.device)
    return ranks


def join_ranks(device: str) -> Ranks:
    """Join the group that a launcher has started, if one has, to share out data; device: cpu or cuda. It lasts as long
    as the process: several trainings of one process share it."""
    check_device(device)
    launch = launched()
    if launch != ALONE and ":" in device:
        raise UsageError(f"--device {device} is one device, but each process takes its own; say --device cuda, or none")
    return join_group(launch, device, timeout=TRAINING_TIMEOUT)


def host_id() -> str:
    """Return a name that processes share only if they run on one host, since one boot, with one mount namespace."""
    boot = Path("/proc/sys/kernel/random/boot_id")
    namespace = Path("/proc/self/ns/mnt")
    mounts = os.readlink(namespace) if namespace.is_symlink() else ""
    return f"{socket.gethostname()} {boot.read_text().strip() if boot.exists() else ''} {mounts}"
