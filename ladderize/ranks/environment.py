"""The rank of this process, by torchrun's variables, and the server of new processes. Imports no torch."""

import atexit
import contextlib
import os
import signal
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ladderize.errors import UserError

WORLD_SIZE, RANK, LOCAL_RANK, LOCAL_WORLD_SIZE = "WORLD_SIZE", "RANK", "LOCAL_RANK", "LOCAL_WORLD_SIZE"
MASTER_ADDR, MASTER_PORT, OMP_NUM_THREADS = "MASTER_ADDR", "MASTER_PORT", "OMP_NUM_THREADS"
GLOO_INTERFACE = "GLOO_SOCKET_IFNAME"
# Imports that every process needs. They take seconds, which are spent once, in the server.
PRELOADED = ["torch.distributed", "transformers.models.llama.modeling_llama"]


@dataclass(frozen=True)
class Place:
    """The number of a process among all (``rank`` of ``size``), and among those of its machine."""

    rank: int
    size: int
    local_rank: int
    local_size: int


ALONE = Place(rank=0, size=1, local_rank=0, local_size=1)


def launched(environment: Mapping[str, str] = os.environ) -> Place:
    """Return the place that a launcher such as torchrun gave this process; ``ALONE`` without one. Without variables
    about this machine, all processes count as started here. Variables that contradict each other raise UserError."""
    texts = {name: environment.get(name, "").strip() for name in (RANK, WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE)}
    if not texts[RANK] and not texts[WORLD_SIZE]:  # vLLM leaves its own LOCAL_WORLD_SIZE in the process that starts it
        return ALONE
    numbers = {name: int(text) if text.isdecimal() else -1 for name, text in texts.items() if text}
    size = numbers.get(WORLD_SIZE, 1)
    rank = numbers.get(RANK, 0 if size == 1 else -1)
    if (rank, size) == (0, 1):
        return ALONE
    launch = Place(rank, size, numbers.get(LOCAL_RANK, rank), numbers.get(LOCAL_WORLD_SIZE, size))
    if not (0 <= rank < size and 0 <= launch.local_rank < launch.local_size <= size):
        shown = ", ".join(f"{name}={text[:80]}" for name, text in texts.items())
        raise UserError(
            f"the environment variables of launchers contradict each other ({shown}); unset them, or start with"
            " torchrun, which sets all"
        )
    return launch


def end_rank(code: int) -> None:
    """End this process with an exit code, if a launcher has started it as one of several; exit handlers run before. A
    thread of gloo that gives back a tensor while the interpreter ends would abort it, also after
    ``destroy_process_group``, which leaves the threads (torch 2.13)."""
    if already_started():
        atexit._run_exitfuncs()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def already_started() -> bool:
    """Return True where a launcher has started this process as one of several."""
    return launched() != ALONE


def is_main_rank() -> bool:
    """Return True in the process that prints and writes."""
    return os.environ.get(RANK, "0") in ("", "0")


def started_rank_variables(rank: Place, environment: Mapping[str, str]) -> dict[str, str]:
    """Return torchrun's variables for a rank that ladderize itself starts. Ranks of one host meet on its loopback
    interface. Where there are several hosts, the user knows the interface."""
    numbers = (rank.rank, rank.size, rank.local_rank, rank.local_size)
    variables = dict(zip((RANK, WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE), map(str, numbers), strict=True))
    if rank.local_size == rank.size:
        loopback = "lo" if Path("/sys/class/net/lo").exists() else "lo0"
        variables[GLOO_INTERFACE] = environment.get(GLOO_INTERFACE) or loopback
    return variables


@contextlib.contextmanager
def environment_with(variables: Mapping[str, str]) -> Iterator[None]:
    """Set variables for the block and for processes that are started in it."""
    before = dict(os.environ)
    os.environ.update(variables)
    try:
        yield
    finally:
        for name in variables:
            os.environ.pop(name, None)
        os.environ.update({name: before[name] for name in variables.keys() & before.keys()})


def start_context() -> Any:
    """Return the context that forks processes from a server, which has imported torch and transformers. The first start
    takes as long as these imports, every other one a fraction of a second."""
    import multiprocessing.forkserver

    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOADED)
    with contextlib.ExitStack() as stack:
        with contextlib.suppress(ValueError):  # not the main thread: its owner handles signals
            # the server inherits it: Ctrl-C, which a terminal sends to it too, would end its imports in a traceback
            stack.callback(signal.signal, signal.SIGINT, signal.signal(signal.SIGINT, signal.SIG_IGN))
        multiprocessing.forkserver.ensure_running()
    return context
