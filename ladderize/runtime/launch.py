"""The start of a function on every rank of a group: in this process, in new ones of this host, or in a launcher's.

New processes are forked from a server that has imported torch and transformers (``ranks.server``).
"""

import contextlib
import dataclasses
import faulthandler
import gc
import logging
import multiprocessing
import os
import signal
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
from torch.multiprocessing.spawn import ProcessContext, ProcessException, start_processes

from ladderize.boundary import DEBUG, is_lost_rank, unplanned
from ladderize.errors import LadderizeError, UsageError, UserError
from ladderize.files.temporaries import temporary_folder
from ladderize.ranks.environment import ALONE, Place, launched, started_rank_variables
from ladderize.ranks.group import INFERENCE_TIMEOUT, Ranks, join_group
from ladderize.ranks.server import start_context
from ladderize.ranks.threads import set_threads, take_cores
from ladderize.runtime.collectives.shm import remove_segments

# The first process that ends is taken for the cause. A rank that only lost another one waits so long before it ends.
CAUSE_SECONDS = 1.0
TERMINATE_SECONDS = 3.0

Report = Callable[[Any], None]


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
        with joined(place, device, threads, report, timeout) as ranks:
            return function(ranks, *args)
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
    report: Report,
    function: Callable[..., Any],
    args: tuple[Any, ...],
    device: str,
    threads: int | None,
    meeting: str,
    timeout: timedelta,
) -> Any:
    if device == "cpu":
        threads = take_cores(place.local_rank, place.local_size, threads)
    with joined(place, device, threads, report, timeout, meeting) as ranks:
        return function(ranks, *args)


# ---- processes of this host ----


def run_processes(
    function: Callable[..., Any],
    args: tuple[Any, ...],
    places: Sequence[Place] = (ALONE,),
    report: Report = ignore,
    *,
    stoppable: bool = False,
) -> Any:
    """Call ``function(place, report, *args)`` in a new process for each place; return the value of the first.

    Raises UserError with the cause if any process fails; by then all are gone.

    stoppable: SIGTERM and Ctrl-C are passed on to the processes, which save and end.
    """
    context = start_context()
    streams = [Connection(os.dup(number), readable=False) for number in (1, 2)]
    pipes = [context.Pipe(duplex=False) for _ in places]
    ours, theirs = [pipe[0] for pipe in pipes], [pipe[1] for pipe in pipes]
    inside = (function, args, places, theirs, streams, dict(os.environ))
    group = None
    logging.getLogger("torch.multiprocessing.spawn").setLevel(logging.ERROR)  # it tells of every rank that is stopped
    try:
        # daemons: those that a Ctrl-C finds begun end with this process
        group = start_processes(_work, inside, len(places), join=False, daemon=True, start_method="forkserver")
        with passing_on_signals(group.processes) if stoppable else contextlib.nullcontext():
            return _watch(group, ours, report)
    finally:
        if group is not None:
            _stop(group.processes)
        remove_segments(os.getpid())
        for connection in (*ours, *theirs, *streams):
            connection.close()


def _watch(group: ProcessContext, pipes: Sequence[Connection], report: Report) -> Any:
    """Listen until every process is done; return the first one's value. Raises UserError as soon as one fails."""
    values: list[Any] = []

    def listen() -> None:
        while pipes[0].poll():
            kind, content = pipes[0].recv()
            if kind == "report":
                report(content)
            elif kind == "value":
                values.append(content)
            else:
                raise content

    try:
        while not group.join(0.0, CAUSE_SECONDS):
            wait([pipes[0], *group.sentinels])
            listen()
    except ProcessException as failure:
        if not failure.error_index:
            listen()
        elif pipes[failure.error_index].poll():
            raise pipes[failure.error_index].recv()[1] from None
        how = how_it_ended(group.processes[failure.error_index].exitcode)
        raise UserError(f"rank {failure.error_index} {how}; the whole group was stopped") from None
    listen()
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

    A second signal kills them. Raises UserError where they ended before they could save.
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
            raise UserError(
                "stopped by a signal; run the same command again to resume from the last saved state"
            ) from None
        raise
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


# ---- in the new process ----


def _work(
    number: int,
    function: Callable[..., Any],
    args: tuple[Any, ...],
    places: Sequence[Place],
    pipes: Sequence[Connection],
    streams: Sequence[Connection],
    environment: Mapping[str, str],
) -> None:
    """Call ``function`` in the new process, and send its value or an error. Ends with the process that started it."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C goes to the parent, which stops the ranks
    end_with_parent()
    multiprocessing.current_process().daemon = False  # a rank may start processes of its own
    for stream, connection in zip((1, 2), streams, strict=True):  # the server was started with other ones
        os.dup2(connection.fileno(), stream)
        connection.close()
    place, pipe = places[number], pipes[number]
    os.environ.clear()
    os.environ.update({**environment, **started_rank_variables(place, environment)})
    faulthandler.enable()  # where native code dies, stderr says what Python was doing
    try:
        value = function(place, lambda value: pipe.send(("report", value)) if number == 0 else None, *args)
        if number == 0:
            pipe.send(("value", value))
    except BaseException as error:
        if os.environ.get(DEBUG):
            traceback.print_exc()
        if is_lost_rank(error):
            time.sleep(CAUSE_SECONDS)
        if not isinstance(error, LadderizeError | BrokenPipeError):  # the latter: whoever read our stdout went away
            error = UserError(f"rank {place.rank} failed: {unplanned(error)}")
        with contextlib.suppress(OSError):
            pipe.send(("error", error))
        # without leaving through the group's destructors: the others may be gone
        os._exit(1)


def end_with_parent() -> None:
    """Make this process end when the one that started it ends, however that happens."""
    if (parent := multiprocessing.parent_process()) is not None:

        def watch() -> None:
            wait([parent.sentinel])
            os._exit(1)

        threading.Thread(target=watch, daemon=True).start()
