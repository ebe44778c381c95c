"""The start of a function on every rank of a group: in this process, in new ones of this host, or in a launcher's.

New processes are forked from a server that has imported torch and transformers (``ranks.server``). Torch's own
``start_processes`` would name the first rank whose end it sees, which may be one that only lost the rank that failed.
"""

import contextlib
import dataclasses
import faulthandler
import fcntl
import gc
import multiprocessing
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from types import FrameType
from typing import Any

import torch
import torch.distributed as dist

from ladderize.boundary import DEBUG
from ladderize.console import is_out_of_memory, sentence
from ladderize.errors import LadderizeError, UsageError, UserError
from ladderize.files.temporaries import temporary_folder
from ladderize.ranks.environment import ALONE, Place, environment_with, launched, started_rank_variables
from ladderize.ranks.group import INFERENCE_TIMEOUT, Ranks, join_group
from ladderize.ranks.server import start_context
from ladderize.ranks.threads import set_threads, take_cores
from ladderize.runtime.collectives.shm import remove_segments

# A rank that fails because another one did reports an error too: wait so long for the one that failed first.
CAUSE_SECONDS = 1.0
TERMINATE_SECONDS = 3.0

Report = Callable[[Any], None]
Send = Callable[[str, Any], None]  # (kind, content) to the process that started this one; kind: report or value


def ignore(value: Any) -> None:
    """Do nothing with a report."""


def check_group_size(tp_size: int, device: str) -> None:
    """Raise UserError unless ``tp_size`` agrees with the launcher, if any, and with the devices of this host.

    Raises UsageError for one device for several ranks.
    """
    place = launched()
    if tp_size > 1 and ":" in device:
        raise UsageError(
            f"--device {device} is one device, but each of {tp_size} ranks takes its own; say --device cuda"
        )
    if place != ALONE:
        if tp_size != place.size:
            raise UserError(
                f"--tp-size {tp_size} was asked for, but the launcher started {place.size} processes; make them equal"
            )
    elif device == "cuda" and tp_size > torch.cuda.device_count():
        raise UserError(
            f"--tp-size {tp_size} needs as many GPUs; this host has {torch.cuda.device_count()} (see --emulate-tp of"
            " bench)"
        )


def run(
    function: Callable[..., Any],
    *args: Any,
    tp_size: int,
    device: str,
    threads: int | None = None,
    report: Report | None = None,
    timeout: timedelta = INFERENCE_TIMEOUT,
    stoppable: bool = False,
) -> Any:
    """Call ``function(ranks, *args)`` on every rank of a group and return what rank 0 returned.

    One rank runs in this process. More are started as processes of this host, unless a launcher has done so.
    ``function`` and ``args`` are pickled by reference. Raises UserError with the cause if any rank fails; by then all
    ranks are gone.

    threads: of each rank; None: this host's cores are divided among the ranks.
    report: is called in this process with each value that rank 0 gives to ``ranks.report``, as soon as it comes.
    timeout: of the group's operations.
    stoppable: SIGTERM and Ctrl-C are passed on to the ranks, which save and end.
    """
    report = report or ignore
    check_group_size(tp_size, device)
    place = launched()
    if place != ALONE or tp_size == 1:
        try:
            with joined(place, device, threads, report, timeout) as ranks:
                return function(ranks, *args)
        except (RuntimeError, MemoryError) as error:
            raise _out_of_memory(error) or error from None
    places = [Place(rank, tp_size, rank, tp_size) for rank in range(tp_size)]
    with temporary_folder("group") as folder:
        meeting = f"file://{folder / 'store'}"
        inside = (function, args, device, threads, meeting, timeout)
        return run_processes(_work_as_rank, inside, places, report, stoppable=stoppable)


@contextlib.contextmanager
def joined(
    place: Place, device: str, threads: int | None, report: Report, timeout: timedelta, meeting: str = "env://"
) -> Iterator[Ranks]:
    """Make this process the rank at ``place`` until the end of the block.

    A group that this process has joined before is used, and stays, for several models in turn.

    meeting: torch's init_method.
    """
    set_threads(threads, place.local_size)
    stays = dist.is_initialized()
    ranks = join_group(place, device, timeout=timeout, init_method=meeting)
    yield dataclasses.replace(ranks, report=report) if ranks.is_main else ranks
    if place.size > 1:
        gc.collect()  # CUDA graphs of the block that hold the group: NCCL waits for each of them
    if place.size > 1 and not stays:
        # not after an error: the others would fail in turn, and report it before this rank reports the cause
        dist.destroy_process_group()


def _work_as_rank(
    place: Place,
    send: Send,
    function: Callable[..., Any],
    args: tuple[Any, ...],
    device: str,
    threads: int | None,
    meeting: str,
    timeout: timedelta,
) -> Any:
    if device == "cpu":
        threads = take_cores(place.local_rank, place.local_size, threads)
    with joined(place, device, threads, lambda value: send("report", value), timeout, meeting) as ranks:
        return function(ranks, *args)


# ---- processes of this host ----


def run_processes(
    function: Callable[..., Any],
    args: tuple[Any, ...],
    places: Sequence[Place] = (ALONE,),
    report: Report = ignore,
    *,
    context: Any = None,
    variables: Callable[[Place, Mapping[str, str]], Mapping[str, str]] = started_rank_variables,
    stoppable: bool = False,
) -> Any:
    """Call ``function(place, send, *args)`` in a new process for each place; return the value of the first.

    A function that must not return, because that would run destructors, sends ``("value", value)`` and ends the
    process. Raises UserError with the cause if any process fails; by then all are gone.

    context: of multiprocessing; None: processes are forked from the server.
    variables: called with the place and ``os.environ``; returns further environment variables of the process.
    stoppable: SIGTERM and Ctrl-C are passed on to the processes, which save and end.
    """
    context = context or start_context()
    streams = [Connection(os.dup(number), readable=False) for number in (1, 2)]
    pipes, processes = [], []
    try:
        for place in places:
            ours, theirs = context.Pipe(duplex=False)
            with environment_with(variables(place, os.environ)):
                # a daemon: a process that leaves early does not wait for ranks that wait for it
                process = context.Process(
                    target=_work,
                    args=(function, args, place, theirs, streams, dict(os.environ)),
                    name=f"rank {place.rank}",
                    daemon=True,
                )
                process.start()
            theirs.close()
            pipes.append(ours)
            processes.append(process)
        with passing_on_signals(processes) if stoppable else contextlib.nullcontext():
            return _watch(processes, pipes, report)
    finally:
        _stop(processes)
        remove_segments(os.getpid())
        for connection in (*pipes, *streams):
            connection.close()


def _watch(processes: Sequence[BaseProcess], pipes: Sequence[Connection], report: Report) -> Any:
    """Listen until every process is done; return the first one's value. Raises UserError as soon as one fails."""
    values: dict[int, Any] = {}
    errors: dict[int, tuple[float, Exception]] = {}
    running, deadline = set(range(len(processes))), float("inf")
    while running and time.monotonic() < deadline:
        speaking = running - values.keys() - errors.keys()
        wait([processes[rank].sentinel for rank in running] + [pipes[rank] for rank in speaking], timeout=0.2)
        for rank in sorted(running):
            has_ended = processes[rank].exitcode is not None  # seen first: then nothing more is sent
            with contextlib.suppress(EOFError, OSError):  # the rank is gone
                while rank in speaking and pipes[rank].poll():
                    kind, content = pipes[rank].recv()
                    if kind == "report":
                        report(content)
                    else:
                        (values if kind == "value" else errors)[rank] = content
                        break
            if has_ended:
                running.discard(rank)
        if errors or any(process.exitcode not in (None, 0) for process in processes):
            deadline = min(deadline, time.monotonic() + CAUSE_SECONDS)
    for rank, process in enumerate(processes):  # a killed rank is the cause of what the others report
        if process.exitcode not in (None, 0) and rank not in errors:
            raise UserError(
                f"rank {process.name.split()[-1]} {how_it_ended(process.exitcode)}; the whole group was stopped"
            )
    if errors:
        raise min(errors.values(), key=lambda failure: failure[0])[1]
    return values[0]


def how_it_ended(exitcode: int) -> str:
    """Return words for the end of a process that reported nothing."""
    if exitcode >= 0:
        return f"ended with exit code {exitcode}"
    name = signal.Signals(-exitcode).name
    return f"was killed by {name}" + (" (out of memory, perhaps)" if name == "SIGKILL" else "")


def _stop(processes: Sequence[BaseProcess]) -> None:
    for process in processes:
        if process.is_alive():
            process.terminate()
    deadline = time.monotonic() + TERMINATE_SECONDS
    for process in processes:
        process.join(max(0.0, deadline - time.monotonic()))
        if process.is_alive():
            process.kill()
            process.join()


@contextlib.contextmanager
def passing_on_signals(processes: Sequence[BaseProcess]) -> Iterator[None]:
    """Pass SIGTERM and the first Ctrl-C on to the processes, as SIGTERM, while the block waits for them.

    A second signal kills them. Raises KeyboardInterrupt or UserError where they ended before they could save.
    """
    if threading.current_thread() is not threading.main_thread():  # its owner handles signals
        yield
        return
    received: list[int] = []

    def pass_on(number: int, frame: FrameType | None) -> None:
        received.append(number)
        for process in processes:
            process.terminate() if len(received) == 1 else process.kill()

    before = {number: signal.signal(number, pass_on) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield
    except UserError:
        if received and any(process.exitcode in (-signal.SIGTERM, -signal.SIGKILL) for process in processes):
            if received[-1] == signal.SIGINT:
                raise KeyboardInterrupt from None
            raise UserError(
                "stopped by SIGTERM; run the same command again to resume from the last saved state"
            ) from None
        raise
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


# ---- in the new process ----


def _work(
    function: Callable[..., Any],
    args: tuple[Any, ...],
    place: Place,
    pipe: Connection,
    streams: list[Connection],
    environment: Mapping[str, str],
) -> None:
    """Call ``function`` in the new process, and report its value or an error. Ends with the process that started it."""
    multiprocessing.current_process().daemon = False  # a daemon may not start processes, as bench's check does
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C goes to the parent, which stops the ranks
    end_with_parent()
    for number, stream in zip((1, 2), streams, strict=True):  # the server was started with other ones
        os.dup2(stream.fileno(), number)
        stream.close()
    os.environ.clear()
    os.environ.update(environment)
    faulthandler.enable()  # where native code dies, stderr says what Python was doing
    try:
        value = function(place, lambda kind, content: pipe.send((kind, content)), *args)
        pipe.send(("value", value if place.rank == 0 else None))
    except BaseException as error:
        failed_at = time.monotonic()  # one clock for all processes of a host
        if os.environ.get(DEBUG):
            traceback.print_exc()
        if not isinstance(error, LadderizeError | BrokenPipeError):  # the latter: whoever read our stdout went away
            error = _out_of_memory(error) or UserError(
                f"rank {place.rank} failed: {type(error).__name__}: {sentence(error)}"
            )
        with contextlib.suppress(OSError):
            pipe.send(("error", (failed_at, error)))
        # without leaving through the group's destructors: the others may be gone
        os._exit(1)


def end_with_parent() -> None:
    """Make this process end when the one that started it ends, however that happens."""
    parent = multiprocessing.parent_process()
    if parent is None:
        return
    if sys.platform == "linux":  # from the kernel: torch's FileStore waits without a file, and lets no thread run
        fcntl.fcntl(parent.sentinel, fcntl.F_SETOWN, os.getpid())
        fcntl.fcntl(parent.sentinel, fcntl.F_SETSIG, signal.SIGKILL)
        flags = fcntl.fcntl(parent.sentinel, fcntl.F_GETFL)
        fcntl.fcntl(parent.sentinel, fcntl.F_SETFL, flags | os.O_ASYNC)

    def watch(seconds: float | None = None) -> None:
        if wait([parent.sentinel], seconds):
            os._exit(1)

    watch(0.0)  # it may have ended before
    threading.Thread(target=watch, daemon=True).start()


def _out_of_memory(error: BaseException) -> UserError | None:
    if not is_out_of_memory(error) and "Storage size" not in str(error):
        return None
    return UserError(
        f"out of memory: {sentence(error)[:150]}; a smaller --batch-size, shorter texts or a larger --tp-size take less"
    )
