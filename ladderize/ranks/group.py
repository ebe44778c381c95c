"""Who this process is among its ranks, how they find each other, and what they tell each other."""

import contextlib
import itertools
import os
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from ladderize.console import sentence, silenced
from ladderize.errors import UsageError, UserError
from ladderize.ranks.device import check_device
from ladderize.ranks.environment import (
    ALONE,
    LOCAL_RANK,
    MASTER_ADDR,
    MASTER_PORT,
    RENDEZVOUS_SECONDS,
    LaunchVariables,
    Place,
    launch_variables,
    launched,
)

SAY_AFTER_S = 10.0  # ranks that come this late are waited for in words
CONNECT_S = 30.0  # for the answer of a server that is there
GRACE_S = 1.0  # for torch to notice its own limit first
_POLL_S = 0.05
_ONE_TRY_S = 5.0
_Piece = TypeVar("_Piece")
_Result = TypeVar("_Result")


def meet(variables: LaunchVariables, timeout: timedelta) -> dist.Store:
    """The store of a launched group, when all its ranks are there.

    Rank 0 serves it at MASTER_ADDR and MASTER_PORT, or torchrun does. timeout: of what is read from it after that.
    Raises UserError where the address does not resolve, the port is taken, or somebody is missing after
    LADDERIZE_RENDEZVOUS_SECONDS. torch's own rendezvous waits as long as a group's operations may take, which is days
    in training, and does not say who is missing.
    """
    host, port, rank = variables.master_addr, variables.master_port, variables.rank
    assert host is not None
    assert port is not None
    assert rank is not None
    deadline = time.monotonic() + variables.rendezvous_seconds
    _resolve(host, port)
    serves = rank == 0 and not variables.agent_store
    if not serves:
        _wait_for_server(variables, deadline)
    store: dist.Store = _open_store(host, port, serves, max(1.0, min(CONNECT_S, deadline - time.monotonic())))
    if variables.agent_store:
        store = dist.PrefixStore(f"/worker/attempt_{variables.restarts}", store)
    _wait_for_ranks(store, variables, deadline)
    store.set_timeout(timeout)
    return store


def _resolve(host: str, port: int) -> None:
    try:
        socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError) as error:
        raise UserError(
            f"{MASTER_ADDR} is {host!r}, which does not resolve to an address ({sentence(error)}); correct it"
        ) from None


def _open_store(host: str, port: int, serves: bool, seconds: float) -> dist.TCPStore:
    """Serve the store, or connect to it.

    A thread does so, since torch waits without limit for the answer of a program that accepts and never answers.
    """
    opened: list[dist.TCPStore] = []
    errors: list[Exception] = []

    def open_store() -> None:
        limit = timedelta(seconds=seconds)
        try:
            opened.append(
                dist.TCPStore(host, port, is_master=serves, timeout=limit, wait_for_workers=False, multi_tenant=True)
            )
        except (RuntimeError, ValueError) as error:  # torch's DistError is one
            errors.append(error)

    with silenced(2):
        thread = threading.Thread(target=open_store, daemon=True)
        thread.start()
        thread.join(seconds + GRACE_S)
    if not opened:
        raise UserError(_why_no_store(host, port, serves, errors[0] if errors else TimeoutError("no answer")))
    return opened[0]


def _why_no_store(host: str, port: int, serves: bool, error: BaseException) -> str:
    text = sentence(error)
    if "EADDRINUSE" in text:
        return f"{MASTER_PORT} {port} is taken by another program on this machine; choose another port"
    if "EACCES" in text:
        return f"{MASTER_PORT} {port} may not be used by this user; choose a port above 1023"
    what = f"rank 0 cannot serve at {host}:{port}" if serves else f"{host}:{port} does not answer as rank 0 would"
    return f"{what} ({text[:200]}); check {MASTER_ADDR} and {MASTER_PORT}"


def _wait_for_server(variables: LaunchVariables, deadline: float) -> None:
    """Until rank 0, or torchrun, listens."""
    address = f"{variables.master_addr}:{variables.master_port}"
    waiting = Waiting(variables.rendezvous_seconds)
    while True:
        try:
            limit = max(0.1, min(_ONE_TRY_S, deadline - time.monotonic()))
            socket.create_connection((variables.master_addr or "", variables.master_port or 0), timeout=limit).close()
            return
        except OSError as error:
            if time.monotonic() >= deadline:
                raise UserError(
                    f"rank {variables.rank} found no rank 0 at {address} within {variables.rendezvous_seconds} s"
                    f" ({sentence(error)}); check {MASTER_ADDR} and {MASTER_PORT}, or raise {RENDEZVOUS_SECONDS}"
                ) from None
        waiting.say(f"rank {variables.rank} waits for rank 0 at {address}")
        time.sleep(_POLL_S)


def _wait_for_ranks(store: dist.Store, variables: LaunchVariables, deadline: float) -> None:
    """Until every rank has said that it is there."""
    size, rank = variables.world_size or 1, variables.rank
    store.set(_key(rank or 0), "here")
    missing = list(range(size))
    waiting = Waiting(variables.rendezvous_seconds)
    try:
        while missing := _not_started(store, missing):
            if time.monotonic() >= deadline:
                break
            if rank == 0:  # one line for the group
                waiting.say(f"rank 0 waits for {_named(missing)} of {size}")
            time.sleep(_POLL_S)
    except RuntimeError:  # rank 0 gave up just before this one, and took the store with it
        pass
    if missing:
        raise UserError(
            f"{_named(missing)} of {size} did not start within {variables.rendezvous_seconds} s; start all of them"
            f" with the same {MASTER_ADDR} and {MASTER_PORT}, or raise {RENDEZVOUS_SECONDS}"
        )


def _not_started(store: dist.Store, ranks: Sequence[int]) -> list[int]:
    with silenced(2):
        return [rank for rank in ranks if not store.check([_key(rank)])]


class Waiting:
    """Says once, after some seconds, who waits for whom: on stderr of any rank, since rank 0 may be the missing one."""

    def __init__(self, limit_s: int) -> None:
        self.limit_s, self.at, self.announced = limit_s, time.monotonic() + SAY_AFTER_S, False

    def say(self, text: str) -> None:
        if not self.announced and time.monotonic() >= self.at:
            self.announced = True
            print(f"{text}, at most {self.limit_s} s", file=sys.stderr, flush=True)


def _key(rank: int) -> str:
    return f"ladderize/started/{rank}"


def _named(ranks: Sequence[int]) -> str:
    shown = ", ".join(map(str, ranks[:8])) + (f" and {len(ranks) - 8} more" if len(ranks) > 8 else "")
    return f"rank{'s' if len(ranks) > 1 else ''} {shown}"


# Loading, and the fp32 reference that rank 0 computes while the others wait, can be long; a dead rank is noticed
# otherwise.
INFERENCE_TIMEOUT = timedelta(hours=2)
# In training one rank measures, or trains its last block, while the others wait: as long as that takes. The launcher
# ends them if one fails.
TRAINING_TIMEOUT = timedelta(days=30)
# Of what GPUs send each other, and CPUs through shared memory. Who waits for another rank's work does so over gloo;
# these messages come from ranks that do the same at the same time, give or take a compilation.
SAME_WORK_TIMEOUT = timedelta(hours=1)


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

    @property
    def words(self) -> str:
        """Where these ranks compute, for a sentence."""
        return str(self.device) if self.size == 1 else f"{self.size} processes ({self.device.type})"

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

    def shared_out(self, pieces: Sequence[_Piece], work: Callable[[_Piece], _Result]) -> Iterator[list[_Result]]:
        """``work`` of all pieces, in order, on every rank: in each round every rank does one, and all get what the
        round gave."""
        for first in range(0, len(pieces), self.size):
            own = pieces[first + self.rank : first + self.rank + 1]
            yield [*itertools.chain.from_iterable(self.gather([work(piece) for piece in own]))]

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

    def split(self, tp_size: int) -> tuple["Ranks", "Ranks"]:
        """These ranks as a table of ``size / tp_size`` rows and ``tp_size`` columns; returns (data, tensor).

        tensor: this rank's row, ``tp_size`` neighbours that share one model. data: its column, the ranks that hold the
        same part of the model and read different data. All ranks call it. ``tp_size`` divides them.
        """
        alone = replace(self, rank=0, size=1, local_size=1, group=None, others=self.others + self.local_size - 1)
        if tp_size == 1:
            return self, alone
        if tp_size == self.size:
            return alone, self
        table = torch.arange(self.size).view(-1, tp_size)
        hosts = self.gather(host_id())

        def subgroup(lines: list[list[int]]) -> Ranks:
            members = [[_global(self.group, rank) for rank in line] for line in lines]
            groups = [dist.new_group(line, timeout=TRAINING_TIMEOUT) for line in members]
            own, line = next((group, line) for group, line in zip(groups, lines, strict=True) if self.rank in line)
            _limit_nccl(own, self.device)
            here = sum(hosts[rank] == hosts[self.rank] for rank in line)
            others = self.others + self.local_size - here
            return replace(self, rank=line.index(self.rank), size=len(line), local_size=here, group=own, others=others)

        return subgroup(table.t().tolist()), subgroup(table.tolist())


def _limit_nccl(group: Any, device: torch.device) -> None:
    """A group's timeout is of both its backends; NCCL's becomes SAME_WORK_TIMEOUT."""
    if device.type == "cuda":
        group._get_backend(device)._set_default_timeout(SAME_WORK_TIMEOUT)


def _global(group: Any, rank: int) -> int:
    return rank if group is None else dist.get_global_rank(group, rank)


def rank_device(kind: str, local_rank: int) -> torch.device:
    """The device of a rank: cpu, its GPU among those that it sees, or the one that ``kind`` numbers; a GPU becomes
    torch's current one. Raises UserError where there are fewer GPUs than ranks."""
    if kind != "cuda":
        device = torch.device(kind)
        if device.type == "cuda":  # by its number; streams and CUDA graphs are the current one's
            torch.cuda.set_device(device)
        return device
    count = torch.cuda.device_count()
    if local_rank >= count > 1:
        raise UserError(
            f"this is process {local_rank} of its machine, counted from 0, but torch sees {count} GPUs here; start as"
            f" many, or set {LOCAL_RANK} where the launcher does not"
        )
    index = local_rank if count > 1 else 0  # a launcher may show each rank its own GPU only
    torch.cuda.set_device(index)
    return torch.device("cuda", index)


def join_group(place: Place, device: str, *, timeout: timedelta, init_method: str | None = None) -> Ranks:
    """Join torch's process group as ``place`` says, unless this process has; device: cpu or cuda. Alone there is no
    group to join.

    init_method: where the ranks meet, if not where the launcher's variables say. timeout: of the group's operations.
    Raises UserError where ranks do not find each other.
    """
    ranks = Ranks(place.rank, place.size, rank_device(device, place.local_rank), place.local_size)
    if place.size > 1 and not dist.is_initialized():
        backend = "cpu:gloo,cuda:nccl" if device == "cuda" else "gloo"
        meeting: dict[str, Any] = (
            {"init_method": init_method} if init_method is not None else {"store": meet(launch_variables(), timeout)}
        )
        with silenced(1):
            dist.init_process_group(
                backend,
                rank=place.rank,
                world_size=place.size,
                timeout=timeout,
                device_id=ranks.device if device == "cuda" else None,  # else NCCL guesses a rank's GPU from its number
                **meeting,
            )
        _limit_nccl(dist.group.WORLD, ranks.device)
    return ranks


def join_ranks(device: str) -> Ranks:
    """For what is shared out by data: the group that a launcher has started, if one has; device: cpu or cuda.

    It lasts as long as the process: several trainings of one process share it. Raises UserError for a device that is
    not there, or that several processes cannot all have.
    """
    check_device(device)
    place = launched()
    if place != ALONE and ":" in device:
        raise UsageError(f"--device {device} is one device, but each process takes its own; say --device cuda, or none")
    return join_group(place, device, timeout=TRAINING_TIMEOUT)


def host_id() -> str:
    """A name that is equal for processes of one running host only."""
    boot = Path("/proc/sys/kernel/random/boot_id")
    namespace = Path("/proc/self/ns/mnt")
    mounts = os.readlink(namespace) if namespace.is_symlink() else ""
    return f"{socket.gethostname()} {boot.read_text().strip() if boot.exists() else ''} {mounts}"
