"""How the hosts of a sweep meet: launchers' variables, and a store at which each says that it is there."""

import contextlib
import os
import re
import socket
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta

import torch.distributed as dist

from ladderize.console import sentence, silenced
from ladderize.errors import UserError
from ladderize.ranks.environment import (
    LOCAL_RANK,
    LOCAL_WORLD_SIZE,
    MASTER_ADDR,
    MASTER_PORT,
    RANK,
    WORLD_SIZE,
    environment_with,
)

SAY_AFTER_S = 10.0
CONNECT_S = 30.0
GRACE_S = 1.0
_POLL_S = 0.05
_ONE_TRY_S = 5.0
RENDEZVOUS_SECONDS = "LADDERIZE_RENDEZVOUS_SECONDS"
DEFAULT_RENDEZVOUS_SECONDS = 300
OF_LAUNCHERS = (WORLD_SIZE, RANK, LOCAL_RANK, LOCAL_WORLD_SIZE, MASTER_ADDR, MASTER_PORT)
_MOST_PROCESSES = 10**6


@dataclass(frozen=True)
class LaunchVariables:
    """What a launcher such as torchrun has set; None for what it has not.

    rendezvous_seconds: how long ranks wait for each other when they start. agent_store: torchrun itself serves the
    store at ``master_addr``. restarts: how often it has started this group again.
    """

    rank: int | None
    world_size: int | None
    local_rank: int | None
    local_world_size: int | None
    master_addr: str | None
    master_port: int | None
    rendezvous_seconds: int
    agent_store: bool
    restarts: int

    @property
    def is_group(self) -> bool:
        """Whether this process is one of several."""
        return self.world_size is not None and self.world_size > 1


def launch_variables(environment: Mapping[str, str] = os.environ) -> LaunchVariables:
    """Read and check the variables. Raises UserError for one that is wrong or lacks another."""

    def number(name: str, least: int, most: int) -> int | None:
        text = environment.get(name, "").strip()
        if not text:
            return None
        if not re.fullmatch(r"[0-9]{1,12}", text) or not least <= int(text) <= most:
            raise UserError(
                f"the environment variable {name} is {text!r}, but must be a whole number from {least} to {most};"
                " correct it or unset it"
            )
        return int(text)

    rank = number(RANK, 0, _MOST_PROCESSES - 1)
    return LaunchVariables(
        rank=rank,
        world_size=number(WORLD_SIZE, 1, _MOST_PROCESSES),
        local_rank=number(LOCAL_RANK, 0, _MOST_PROCESSES - 1),
        local_world_size=number(LOCAL_WORLD_SIZE, 1, _MOST_PROCESSES),
        master_addr=environment.get(MASTER_ADDR, "").strip() or None,
        master_port=number(MASTER_PORT, 1, 65535),
        rendezvous_seconds=number(RENDEZVOUS_SECONDS, 1, 10**6) or DEFAULT_RENDEZVOUS_SECONDS,
        agent_store=environment.get("TORCHELASTIC_USE_AGENT_STORE") == str(True),
        restarts=number("TORCHELASTIC_RESTART_COUNT", 0, 10**9) or 0,
    )


def _tasks_of_node(environment: Mapping[str, str]) -> int | None:
    """Processes of a Slurm step on this node: of ``4(x2),3`` for three nodes its own part."""
    stated = re.findall(r"([0-9]{1,6})(?:\(x([0-9]{1,6})\))?", environment.get("SLURM_STEP_TASKS_PER_NODE", ""))
    counts = [int(count) for count, times in stated for _ in range(int(times or 1))]
    node = environment.get("SLURM_NODEID", "")
    return counts[int(node)] if node.isdigit() and int(node) < len(counts) else None


def set_by_srun(environment: Mapping[str, str] = os.environ) -> dict[str, str]:
    """What torchrun would have set, where srun alone has started this process as one of several; else nothing. A batch
    script is no such process, though it has most of Slurm's variables."""
    tasks, hosts = environment.get("SLURM_STEP_NUM_TASKS", ""), environment.get("SLURM_STEP_NUM_NODES", "")
    if environment.get(WORLD_SIZE) or not (tasks.isdigit() and hosts.isdigit() and int(tasks) > 1 <= int(hosts)):
        return {}
    first = re.match(r"([^\[,]*)(?:\[([0-9]+))?", environment.get("SLURM_STEP_NODELIST", ""))  # gpu[03-07,9]: gpu03
    job = environment.get("SLURM_JOB_ID", "")
    return {
        RANK: environment.get("SLURM_PROCID", ""),
        WORLD_SIZE: tasks,
        LOCAL_RANK: environment.get("SLURM_LOCALID", ""),
        LOCAL_WORLD_SIZE: str(_tasks_of_node(environment) or -(-int(tasks) // int(hosts))),
        MASTER_ADDR: "".join(part or "" for part in first.groups()) if first else "",
        MASTER_PORT: str(20000 + int(job) % 20000) if job.isdigit() else "",
    }


def without_launcher(environment: Mapping[str, str]) -> dict[str, str]:
    """Variables for a process that begins anew: no launcher's."""
    return {
        name: value
        for name, value in environment.items()
        if name not in OF_LAUNCHERS and not name.startswith("TORCHELASTIC_")
    }


def hidden_launcher() -> contextlib.AbstractContextManager[None]:
    """Around work that this process does as if it had been started alone."""
    return environment_with(dict.fromkeys(os.environ.keys() - without_launcher(os.environ).keys()))


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
