"""Groups of ranks: start one on this host, or join the one that torchrun or ``accelerate launch`` has started."""

import contextlib
import gc
import multiprocessing
import os
import signal
import socket
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from ladderize.console import DEBUG, UserError, sentence, silent_stdout

# A rank that fails because another one did reports it too: wait so long for the one that failed first.
CAUSE_SECONDS = 1.0
TERMINATE_SECONDS = 3.0
# Loading, and the fp32 reference that rank 0 computes while the others wait, can be long; a dead rank is noticed
# otherwise.
TIMEOUT = timedelta(hours=2)
SEGMENTS = Path("/dev/shm")  # noqa: S108 - a memory file system is the point


@dataclass(frozen=True)
class Group:
    """This process's place: ``rank`` of ``size`` processes, and the device it computes on."""

    rank: int
    size: int
    device: torch.device

    @property
    def is_main(self) -> bool:
        return self.rank == 0

    def gather(self, value: Any) -> list[Any]:
        """Every rank's ``value`` (any picklable object), in order, on every rank."""
        if self.size == 1:
            return [value]
        values: list[Any] = [None] * self.size
        dist.all_gather_object(values, value)
        return values

    def broadcast(self, value: Any) -> Any:
        """Rank 0's ``value`` on every rank."""
        if self.size == 1:
            return value
        values = [value]
        dist.broadcast_object_list(values, src=0, device=torch.device("cpu"))
        return values[0]

    def barrier(self) -> None:
        """Wait for all ranks, blocked in the kernel rather than spinning, so that whoever is late has the cores."""
        self.gather(None)


def already_started() -> bool:
    """Whether a launcher has started this process as one of several; raises UserError if it left out what it has to
    say."""
    names = ("WORLD_SIZE", "RANK", "MASTER_ADDR", "MASTER_PORT")
    if os.environ.get("WORLD_SIZE", "1") in ("", "1"):
        return False
    for name in names:
        value = os.environ.get(name, "")
        if not value or (name != "MASTER_ADDR" and not value.isdecimal()):
            raise UserError(
                f"WORLD_SIZE is set, as a launcher does, but {name} is {value!r}; unset WORLD_SIZE or start with"
                " torchrun"
            )
    return True


def check_tp_size(tp_size: int, device: str) -> None:
    """Raise UserError unless ``tp_size`` agrees with the launcher, if any, and with the devices of this host."""
    if already_started():
        world = int(os.environ["WORLD_SIZE"])
        if tp_size != world:
            raise UserError(
                f"--tp-size {tp_size} was asked for, but the launcher started {world} processes; make them equal"
            )
    elif device == "cuda" and tp_size > torch.cuda.device_count():
        raise UserError(
            f"--tp-size {tp_size} needs as many GPUs; this host has {torch.cuda.device_count()} (see --emulate-tp of"
            " bench)"
        )


def default_device() -> str:
    return "cuda" if torch.cuda.is_available() else "cpu"


def run(function: Callable[..., Any], *args: Any, tp_size: int, device: str, threads: int | None = None) -> Any:
    """Call ``function(group, *args)`` on every rank of a group and return what rank 0 returned.

    One rank runs in this process. More are started as processes of this host, unless a launcher has done so.
    ``function`` and ``args`` are pickled by reference. Raises UserError with the cause if any rank fails; by then all
    ranks are gone. threads: of each rank; None shares this host's cores out.
    """
    check_tp_size(tp_size, device)
    if already_started():
        rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        local_rank, local_size = (
            int(os.environ.get(key) or default) for key, default in (("LOCAL_RANK", 0), ("LOCAL_WORLD_SIZE", 1))
        )
        with _initialised(rank, size, local_rank, device, threads, local_size, "env://") as group:
            return function(group, *args)
    if tp_size == 1:
        set_threads(threads, 1)
        try:
            return function(Group(0, 1, _device(device, 0)), *args)
        except (RuntimeError, MemoryError) as error:
            raise _out_of_memory(error) or error from None
    with tempfile.TemporaryDirectory(prefix="ladderize-group-") as folder:
        return _start(function, args, tp_size, device, threads, Path(folder) / "store")


def set_threads(threads: int | None, ranks: int) -> None:
    """Share the cores out: spinning OpenMP teams that overlap on a core slow each other down a hundredfold."""
    torch.set_num_threads(threads or max(1, len(cores()) // ranks))


def cores() -> set[int]:
    """The cores that this process may run on."""
    return os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else set(range(os.cpu_count() or 1))


def _device(kind: str, local_rank: int) -> torch.device:
    if kind != "cuda":
        return torch.device(kind)
    index = local_rank % torch.cuda.device_count()  # a launcher may show each rank its own GPU only
    torch.cuda.set_device(index)
    return torch.device("cuda", index)


@contextlib.contextmanager
def _initialised(
    rank: int, size: int, local_rank: int, device: str, threads: int | None, local_size: int, init_method: str
) -> Iterator[Group]:
    set_threads(threads, local_size)
    group = Group(rank, size, _device(device, local_rank))
    backend = "cpu:gloo,cuda:nccl" if device == "cuda" else "gloo"
    with silent_stdout():
        dist.init_process_group(backend, init_method=init_method, rank=rank, world_size=size, timeout=TIMEOUT)
    yield group
    gc.collect()  # NCCL waits for every CUDA graph that has captured it
    # not after an error: the others would fail of that, and say so before this rank says why
    dist.destroy_process_group()


# ---- starting ranks on this host ----


def _start(
    function: Callable[..., Any], args: tuple[Any, ...], size: int, device: str, threads: int | None, store: Path
) -> Any:
    context = multiprocessing.get_context("spawn")
    pipes, processes = [], []
    try:
        for rank in range(size):
            ours, theirs = context.Pipe(duplex=False)
            arguments = (function, args, rank, size, device, threads, f"file://{store}", theirs)
            process = context.Process(target=_work, args=arguments, name=f"rank {rank}")
            process.start()
            theirs.close()
            pipes.append(ours)
            processes.append(process)
        return _supervise(pipes, processes)
    finally:
        _stop(processes)
        for left in SEGMENTS.glob(f"ladderize-{os.getpid()}-*"):  # of ranks that were stopped while they attached
            left.unlink(missing_ok=True)
        for pipe in pipes:
            pipe.close()


def _supervise(pipes: list[Connection], processes: list[Any]) -> Any:
    """Wait until every rank is done; return rank 0's value, or raise UserError as soon as one rank fails."""
    values: dict[int, Any] = {}
    errors: dict[int, tuple[float, Exception]] = {}
    running = set(range(len(processes)))
    deadline = None
    while running and (deadline is None or time.monotonic() < deadline):
        wait(
            [processes[rank].sentinel for rank in running]
            + [pipes[rank] for rank in running - values.keys() - errors.keys()],
            timeout=0.2,
        )
        for rank in sorted(running):
            _receive(rank, pipes[rank], values, errors)
            if processes[rank].exitcode is not None:
                _receive(rank, pipes[rank], values, errors)
                running.discard(rank)
        if deadline is None and (errors or any(process.exitcode not in (None, 0) for process in processes)):
            deadline = time.monotonic() + CAUSE_SECONDS
    for rank, process in enumerate(processes):  # a killed rank is the cause of what the others report
        if process.exitcode not in (None, 0) and rank not in errors:
            raise UserError(f"rank {rank} {_death(process.exitcode)}; the whole group was stopped")
    if errors:
        raise min(errors.values(), key=lambda failure: failure[0])[1]
    return values[0]


def _receive(rank: int, pipe: Connection, values: dict[int, Any], errors: dict[int, tuple[float, Exception]]) -> None:
    if rank in values or rank in errors:
        return
    with contextlib.suppress(EOFError, OSError):
        if pipe.poll():
            kind, value = pipe.recv()
            (values if kind == "value" else errors)[rank] = value


def _death(exitcode: int) -> str:
    if exitcode >= 0:
        return f"ended with exit code {exitcode}"
    name = signal.Signals(-exitcode).name
    return f"was killed by {name}" + (" (out of memory, perhaps)" if name == "SIGKILL" else "")


def _stop(processes: list[Any]) -> None:
    for process in processes:
        if process.is_alive():
            process.terminate()
    deadline = time.monotonic() + TERMINATE_SECONDS
    for process in processes:
        process.join(max(0.0, deadline - time.monotonic()))
        if process.is_alive():
            process.kill()
            process.join()


def _work(
    function: Callable[..., Any],
    args: tuple[Any, ...],
    rank: int,
    size: int,
    device: str,
    threads: int | None,
    store: str,
    pipe: Connection,
) -> None:
    """The life of a started rank: it reports a value or one sentence, and ends with whoever started it."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C goes to the parent, which stops the ranks
    end_with_parent()
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(size))
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo" if Path("/sys/class/net/lo").exists() else "lo0")
    try:
        with _initialised(rank, size, rank, device, threads, size, store) as group:
            value = function(group, *args)
            pipe.send(("value", value if rank == 0 else None))
    except BaseException as error:
        failed_at = time.monotonic()  # one clock for all processes of a host
        if os.environ.get(DEBUG):
            import traceback

            traceback.print_exc()
        if not isinstance(error, UserError | BrokenPipeError):  # the latter: whoever read our stdout went away
            error = _out_of_memory(error) or UserError(f"rank {rank} failed: {type(error).__name__}: {sentence(error)}")
        with contextlib.suppress(OSError):
            pipe.send(("error", (failed_at, error)))
        # without leaving through the group's destructors: the others may be gone
        os._exit(1)


def end_with_parent() -> None:
    """Let this process end when the one that started it does, however that ends."""
    parent = multiprocessing.parent_process()

    def watch() -> None:
        if parent is not None:
            wait([parent.sentinel])
            os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


def _out_of_memory(error: BaseException) -> UserError | None:
    if (
        isinstance(error, torch.OutOfMemoryError | MemoryError)
        or "can't allocate memory" in str(error)
        or "Storage size" in str(error)
    ):
        return UserError(
            f"out of memory: {sentence(error)[:150]}; a smaller --batch-size, shorter texts or a larger --tp-size take"
            " less"
        )
    return None


def host_id() -> str:
    """A name that is equal for processes of one running host only."""
    boot = Path("/proc/sys/kernel/random/boot_id")
    namespace = Path("/proc/self/ns/mnt")
    mounts = os.readlink(namespace) if namespace.is_symlink() else ""
    return f"{socket.gethostname()} {boot.read_text().strip() if boot.exists() else ''} {mounts}"
