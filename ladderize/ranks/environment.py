"""What the environment says about this process among others: the one place that reads and checks these variables.

Imports no torch: the console asks here who may print.
"""

import contextlib
import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from ladderize.errors import UserError

WORLD_SIZE, RANK, LOCAL_RANK, LOCAL_WORLD_SIZE = "WORLD_SIZE", "RANK", "LOCAL_RANK", "LOCAL_WORLD_SIZE"
MASTER_ADDR, MASTER_PORT, OMP_NUM_THREADS = "MASTER_ADDR", "MASTER_PORT", "OMP_NUM_THREADS"
GLOO_INTERFACE = "GLOO_SOCKET_IFNAME"
RENDEZVOUS_SECONDS = "LADDERIZE_RENDEZVOUS_SECONDS"
DEFAULT_RENDEZVOUS_SECONDS = 300
# Of srun and of two kinds of mpirun: the number of this process, its number on this machine, and how many are there.
# Scripts hand the first on as RANK, and often forget the others.
STARTERS = (
    ("SLURM_PROCID", "SLURM_LOCALID", "SLURM_NTASKS_PER_NODE"),
    ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_SIZE"),
    ("PMI_RANK", "MPI_LOCALRANKID", "MPI_LOCALNRANKS"),
)
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

    _check_threads(environment.get(OMP_NUM_THREADS, ""))
    rank = number(RANK, 0, _MOST_PROCESSES - 1)
    local_rank, local_size = LOCAL_RANK, LOCAL_WORLD_SIZE
    if number(LOCAL_RANK, 0, _MOST_PROCESSES - 1) is None and rank is not None:
        # without RANK's equal they are of the shell that started several, not of this process
        found_here = [names[1:] for names in STARTERS if environment.get(names[0]) == str(rank)]
        local_rank, local_size = next(iter(found_here), (local_rank, local_size))
    found = LaunchVariables(
        rank=rank,
        world_size=number(WORLD_SIZE, 1, _MOST_PROCESSES),
        local_rank=number(local_rank, 0, _MOST_PROCESSES - 1),
        local_world_size=number(local_size, 1, _MOST_PROCESSES)
        or (_tasks_of_node(environment) if local_size == STARTERS[0][2] else None),
        master_addr=environment.get(MASTER_ADDR, "").strip() or None,
        master_port=number(MASTER_PORT, 1, 65535),
        rendezvous_seconds=number(RENDEZVOUS_SECONDS, 1, 10**6) or DEFAULT_RENDEZVOUS_SECONDS,
        agent_store=environment.get("TORCHELASTIC_USE_AGENT_STORE") == str(True),
        restarts=number("TORCHELASTIC_RESTART_COUNT", 0, 10**9) or 0,
    )
    _check_complete(found)
    return found


def _tasks_of_node(environment: Mapping[str, str]) -> int | None:
    """Processes of a Slurm step on this node: of ``4(x2),3`` for three nodes its own part."""
    stated = re.findall(r"([0-9]{1,6})(?:\(x([0-9]{1,6})\))?", environment.get("SLURM_STEP_TASKS_PER_NODE", ""))
    counts = [int(count) for count, times in stated for _ in range(int(times or 1))]
    node = environment.get("SLURM_NODEID", "")
    return counts[int(node)] if node.isdigit() and int(node) < len(counts) else None


def _check_complete(found: LaunchVariables) -> None:
    if found.rank is not None and found.world_size is None:
        raise UserError(
            f"the environment variable {RANK} is set, but {WORLD_SIZE} is not; unset {RANK}, or start with torchrun,"
            " which sets both"
        )
    if found.is_group:
        needed = {RANK: found.rank, MASTER_ADDR: found.master_addr, MASTER_PORT: found.master_port}
        missing = [name for name, value in needed.items() if value is None]
        if missing:
            raise UserError(
                f"the environment variable {WORLD_SIZE} is {found.world_size}, but {missing[0]} is not set; unset"
                f" {WORLD_SIZE}, or start with torchrun, which sets both"
            )
    for smaller, small, larger, large in (
        (RANK, found.rank, WORLD_SIZE, found.world_size),
        (LOCAL_RANK, found.local_rank, LOCAL_WORLD_SIZE, found.local_world_size),
    ):
        if small is not None and large is not None and small >= large:
            raise UserError(
                f"the environment variable {smaller} is {small}, but must be below {larger}, which is {large}"
            )
    if found.local_world_size is not None and found.local_world_size > (found.world_size or found.local_world_size):
        raise UserError(
            f"the environment variable {LOCAL_WORLD_SIZE} is {found.local_world_size}, but must not be above"
            f" {WORLD_SIZE}, which is {found.world_size}"
        )


def _check_threads(text: str) -> None:
    """OpenMP ignores what it cannot read, and then takes every core; it accepts a list, for nested regions."""
    if text.strip() and not re.fullmatch(r"\s*[1-9][0-9]{0,5}\s*(,\s*[1-9][0-9]{0,5}\s*)*", text):
        raise UserError(
            f"the environment variable {OMP_NUM_THREADS} is {text.strip()!r}, but must be a whole number of threads;"
            " correct it or unset it"
        )


def is_main_rank() -> bool:
    """Whether this process is the one that prints and writes: rank 0, or alone."""
    return os.environ.get(RANK, "0") in ("", "0")


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


@contextlib.contextmanager
def environment_with(variables: Mapping[str, str | None]) -> Iterator[None]:
    """A process that is started inside has these variables, from its first instruction; None: it has none of the
    name."""
    before = {name: os.environ.get(name) for name in variables}
    _set_variables(variables)
    try:
        yield
    finally:
        _set_variables(before)


def _set_variables(variables: Mapping[str, str | None]) -> None:
    for name, value in variables.items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value


# ---- places ----


@dataclass(frozen=True)
class Place:
    """This process's number among all and among those of its machine, and how many there are of both."""

    rank: int
    size: int
    local_rank: int
    local_size: int


ALONE = Place(rank=0, size=1, local_rank=0, local_size=1)


def launched() -> Place:
    """Where a launcher has put this process, or ``ALONE`` without one; raises UserError if it says nonsense, or leaves
    out what it has to say."""
    variables = launch_variables()
    if not variables.is_group:
        return ALONE
    assert variables.rank is not None
    assert variables.world_size is not None
    return Place(
        rank=variables.rank,
        size=variables.world_size,
        # one that says neither has started all of them here
        local_rank=variables.rank if variables.local_rank is None else variables.local_rank,
        local_size=variables.local_world_size or variables.world_size,
    )


def already_started() -> bool:
    """Whether a launcher has started this process as one of several."""
    return launched() != ALONE


def started_rank_variables(place: Place, environment: Mapping[str, str]) -> dict[str, str]:
    """The variables that a rank which ladderize itself starts gets on top of ``environment``, as a launcher would set
    them. All ranks on one host meet on its loopback interface; where there are several hosts, the user knows the
    interface."""
    found = {
        RANK: str(place.rank),
        WORLD_SIZE: str(place.size),
        LOCAL_RANK: str(place.local_rank),
        LOCAL_WORLD_SIZE: str(place.local_size),
    }
    if place.local_size == place.size:
        loopback = "lo" if Path("/sys/class/net/lo").exists() else "lo0"
        found[GLOO_INTERFACE] = environment.get(GLOO_INTERFACE) or loopback
    return found
