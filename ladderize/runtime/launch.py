"""A function on every rank of a group: in this process, in new processes of this host, or in those of a launcher.

Ranks are forked from a server of multiprocessing's rather than started by torch's elastic launcher: two of them then
take 3.5 s to start the first time and 0.3 s after that, where the launcher takes 4.3 and 4.4 s, for it imports torch
and transformers anew in each (benchmarks/start_ranks.py); and the error is one sentence of the rank that failed first.
"""

import contextlib
import dataclasses
import faulthandler
import fcntl
import functools
import gc
import multiprocessing
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from types import FrameType
from typing import Any

import torch
import torch.distributed as dist

from ladderize.boundary import DEBUG
from ladderize.console import is_out_of_memory, sentence
from ladderize.errors import LadderizeError, UsageError, UserError
from ladderize.files.temporaries import temporary_folder
from ladderize.ranks.environment import ALONE, Place, launched, started_rank_variables
from ladderize.ranks.group import INFERENCE_TIMEOUT, Ranks, join_group
from ladderize.ranks.server import start_context
from ladderize.ranks.threads import set_threads, take_cores
from ladderize.runtime.collectives.shm import remove_segments


@contextlib.contextmanager
def handing_on_signals(processes: Sequence[BaseProcess]) -> Iterator[None]:
    """SIGTERM and the first Ctrl-C reach every process as SIGTERM, and the block goes on: it ends when they do.

    A second signal kills them and ends the block. Raises KeyboardInterrupt or UserError where a signal ended the
    processes before they were ready to save.
    """
    received: list[int] = []

    def hand_on(number: int, frame: FrameType | None) -> None:
        received.append(number)
        again = len(received) > 1
        for process in processes:
            with contextlib.suppress(ProcessLookupError):
                os.kill(process.pid or 0, signal.SIGKILL if again else signal.SIGTERM)
        if again:
            raise _stopped(number)

    try:
        before = {number: signal.signal(number, hand_on) for number in (signal.SIGTERM, signal.SIGINT)}
    except ValueError:  # not the main thread: its owner handles signals
        yield
        return
    try:
        yield
    except UserError:
        if received and any(process.exitcode == -signal.SIGTERM for process in processes):
            raise _stopped(received[0]) from None
        raise
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _stopped(number: int) -> BaseException:
    if number == signal.SIGINT:
        return KeyboardInterrupt()
    return UserError("stopped by SIGTERM; run the same command again to resume from the last saved state")


# A rank that fails because another one did reports it too: wait so long for the one that failed first.
CAUSE_SECONDS = 1.0
TERMINATE_SECONDS = 3.0


def check_group_size(tp_size: int, device: str) -> None:
    """Raise UserError unless ``tp_size`` agrees with the launcher, if any, and with the devices of this host;
    UsageError for one device for several ranks."""
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


Report = Callable[[Any], None]


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
    ranks are gone. threads: of each rank; None shares this host's cores out. report: is called here, in this process,
    with each value that rank 0 gives to ``ranks.report``, so that results are safe before something else fails.
    timeout: of the group's operations. stoppable: a signal that stops this process is given to the ranks that it has
    started, which save what they have (signals.py).
    """
    report = report or (lambda value: None)
    check_group_size(tp_size, device)
    place = launched()
    if place != ALONE:
        with joined(place, device, threads, None, report, timeout) as ranks:
            return function(ranks, *args)
    if tp_size == 1:
        try:
            with joined(ALONE, device, threads, None, report, timeout) as ranks:
                return function(ranks, *args)
        except (RuntimeError, MemoryError) as error:
            raise _out_of_memory(error) or error from None
    with temporary_folder("group") as folder:
        with started(function, [args] * tp_size, device, threads, folder / "store", report, timeout) as group:
            with handing_on_signals(group.processes) if stoppable else contextlib.nullcontext():
                group.watch()
            return group.value


@contextlib.contextmanager
def joined(
    place: Place,
    device: str,
    threads: int | None,
    init_method: str | None,
    report: Report,
    timeout: timedelta = INFERENCE_TIMEOUT,
) -> Iterator[Ranks]:
    """This process as one of the ranks that ``place`` speaks of, until the end of the block. A group that it has joined
    before, for several models in turn, is used and stays."""
    set_threads(threads, place.local_size)
    stays = dist.is_initialized()
    ranks = join_group(place, device, timeout=timeout, init_method=init_method)
    yield dataclasses.replace(ranks, report=report) if ranks.is_main else ranks
    if place.size > 1:
        gc.collect()  # what the block has captured of the group: NCCL waits for every CUDA graph that has
    if place.size > 1 and not stays:
        # not after an error: the others would fail of that, and say so before this rank says why
        dist.destroy_process_group()


# ---- starting ranks on this host ----


@contextlib.contextmanager
def started(
    function: Callable[..., Any],
    args: Sequence[tuple[Any, ...]],
    device: str,
    threads: int | None,
    store: Path,
    report: Report,
    timeout: timedelta = INFERENCE_TIMEOUT,
) -> Iterator["StartedRanks"]:
    """Processes of this host that call ``function(ranks, *args[rank])``; they are stopped at the end.

    store: a path for a file in which they find each other.
    """
    inside = functools.partial(_in_group, function, device, threads, f"file://{store}", timeout)
    with started_processes(inside, args, os.environ, report) as group:
        yield group


@contextlib.contextmanager
def started_processes(
    function: Callable[..., Any],
    args: Sequence[tuple[Any, ...]],
    environment: Mapping[str, str],
    report: Report = lambda value: None,
    *,
    first: int = 0,
    size: int | None = None,
) -> Iterator["StartedRanks"]:
    """The same without a group: ``function(place, report, *args[rank])`` is a context whose value is the rank's.

    environment: of the processes, to which the variables are added that a launcher gives to each. first, size: they are
    part of a larger group, whose other ranks are started on other hosts.
    """
    context, own = start_context(), len(args)
    streams = [Connection(os.dup(number), readable=False) for number in (1, 2)]
    pipes, processes = [], []
    try:
        for rank in range(own):
            ours, theirs = context.Pipe(duplex=False)
            place = Place(first + rank, size or own, rank, own)
            # a daemon: a process that leaves early does not wait for ranks that wait for it
            process = context.Process(
                target=_work,
                args=(function, args[rank], place, theirs, streams, dict(environment)),
                name=f"rank {place.rank}",
                daemon=True,
            )
            process.start()
            theirs.close()
            pipes.append(ours)
            processes.append(process)
        yield StartedRanks(pipes, processes, report)
    finally:
        stop_processes(processes)
        remove_segments(os.getpid())
        for connection in (*pipes, *streams):
            connection.close()


class StartedRanks:
    """Processes at work, and what they have said. ``value``: rank 0's, once ``watch`` has returned without a
    condition."""

    def __init__(self, pipes: list[Connection], processes: list[Any], report: Report) -> None:
        self.pipes, self.processes, self.report = pipes, processes, report
        self.values: dict[int, Any] = {}
        self.errors: dict[int, tuple[float, Exception]] = {}
        self.running = set(range(len(processes)))

    @property
    def value(self) -> Any:
        return self.values[0]

    def watch(self, until: Callable[[], bool] = lambda: False) -> None:
        """Listen until every rank is done, or ``until()``; raise UserError as soon as one fails."""
        deadline = None
        while self.running and (deadline is None or time.monotonic() < deadline):
            if until():
                return
            wait(
                [self.processes[rank].sentinel for rank in self.running]
                + [self.pipes[rank] for rank in self.running - self.values.keys() - self.errors.keys()],
                timeout=0.2,
            )
            for rank in sorted(self.running):
                has_ended = self.processes[rank].exitcode is not None  # seen first: then nothing more is sent
                self._receive(rank)
                if has_ended:
                    self.running.discard(rank)
            if deadline is None and (self.errors or any(p.exitcode not in (None, 0) for p in self.processes)):
                deadline = time.monotonic() + CAUSE_SECONDS
        for rank, process in enumerate(self.processes):  # a killed rank is the cause of what the others report
            if process.exitcode not in (None, 0) and rank not in self.errors:
                raise UserError(
                    f"rank {process.name.split()[-1]} {how_it_ended(process.exitcode)}; the whole group was stopped"
                )
        if self.errors:
            raise min(self.errors.values(), key=lambda failure: failure[0])[1]

    def _receive(self, rank: int) -> None:
        """Take all that a rank has sent so far: reports, and at the end its value or its error."""
        while rank not in self.values and rank not in self.errors:
            try:
                if not self.pipes[rank].poll():
                    return
                kind, value = self.pipes[rank].recv()
            except (EOFError, OSError):  # the rank is gone
                return
            if kind == "report":
                self.report(value)
            else:
                (self.values if kind == "value" else self.errors)[rank] = value


def how_it_ended(exitcode: int) -> str:
    """Words for a process that ended without a word of its own."""
    if exitcode >= 0:
        return f"ended with exit code {exitcode}"
    name = signal.Signals(-exitcode).name
    return f"was killed by {name}" + (" (out of memory, perhaps)" if name == "SIGKILL" else "")


def stop_processes(processes: list[Any]) -> None:
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
def _in_group(
    function: Callable[..., Any],
    device: str,
    threads: int | None,
    init_method: str,
    timeout: timedelta,
    place: Place,
    report: Report,
    *args: Any,
) -> Iterator[Any]:
    if device == "cpu":
        threads = take_cores(place.local_rank, place.local_size, threads)
    with joined(place, device, threads, init_method, report, timeout) as ranks:
        yield function(ranks, *args)


def _work(
    function: Callable[..., Any],
    args: tuple[Any, ...],
    place: Place,
    pipe: Connection,
    streams: list[Connection],
    environment: Mapping[str, str],
) -> None:
    """The life of a started rank: it reports a value or one sentence, and ends with whoever started it."""
    multiprocessing.current_process().daemon = False  # a daemon may not start processes, as bench's check does
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C goes to the parent, which stops the ranks
    end_with_parent()
    adopt(streams, environment)
    faulthandler.enable()  # where native code dies, stderr says what Python was doing
    os.environ.update(started_rank_variables(place, os.environ))
    with reporting_errors(pipe, place):
        with function(place, lambda value: pipe.send(("report", value)), *args) as value:
            pipe.send(("value", value if place.rank == 0 else None))


@contextlib.contextmanager
def reporting_errors(
    pipe: Connection, place: Place, words: Callable[[BaseException], str | None] = lambda error: None
) -> Iterator[None]:
    """An error in the block ends this process, a rank, and whoever started it hears of it as one sentence. words: for
    errors of a library that need others than their own."""
    try:
        yield
    except BaseException as error:
        failed_at = time.monotonic()  # one clock for all processes of a host
        if os.environ.get(DEBUG):
            import traceback

            traceback.print_exc()
        if not isinstance(error, LadderizeError | BrokenPipeError):  # the latter: whoever read our stdout went away
            said = words(error)
            error = (None if said else _out_of_memory(error)) or UserError(
                f"rank {place.rank} failed: {type(error).__name__}: {said or sentence(error)}"
            )
        with contextlib.suppress(OSError):
            pipe.send(("error", (failed_at, error)))
        # without leaving through the group's destructors: the others may be gone
        os._exit(1)


def adopt(streams: list[Connection], environment: Mapping[str, str]) -> None:
    """Write where the parent writes now, and see its variables: the server was started with older ones."""
    for number, stream in zip((1, 2), streams, strict=True):
        os.dup2(stream.fileno(), number)
        stream.close()
    os.environ.clear()
    os.environ.update(environment)


def end_with_parent() -> None:
    """Let this process end when the one that started it does, however that ends."""
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
