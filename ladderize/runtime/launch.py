"""The start of a function on every rank of a group: in this process, in new ones of this host, or in a launcher's."""

import contextlib
import dataclasses
import faulthandler
import gc
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

from ladderize.boundary import DEBUG, handled, is_lost_rank, unplanned
from ladderize.errors import LadderizeError, UsageError, UserError
from ladderize.files.output import temporary_folder
from ladderize.ranks.device import set_threads, set_up_heap, take_cores
from ladderize.ranks.environment import ALONE, Place, launched, start_context, started_rank_variables
from ladderize.ranks.group import INFERENCE_TIMEOUT, ignore, join_group
from ladderize.runtime.collectives.shm import remove_segments

# The first error is taken for the cause. A rank that only lost another one waits so long before it says so.
CAUSE_SECONDS = 1.0
TERMINATE_SECONDS = 3.0

Report = Callable[[Any], None]


def check_group_size(tp_size: int, device: str) -> None:
    """Raise UserError unless ``tp_size`` agrees with the launcher, if any, and with the devices of this host."""
    launch = launched()
    if tp_size > 1 and ":" in device:
        raise UsageError(
            f"--device {device} is one device, but each of {tp_size} ranks takes its own; say --device cuda"
        )
    if launch != ALONE and tp_size != launch.size:
        raise UserError(
            f"--tp-size {tp_size} was asked for, but the launcher started {launch.size} processes; make them equal"
        )
    if launch == ALONE and device == "cuda" and tp_size > torch.cuda.device_count():
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
    report: Report = ignore,
    timeout: timedelta = INFERENCE_TIMEOUT,
    stoppable: bool = False,
    own_heap: bool = True,
) -> Any:
    """Call ``function(ranks, *args)`` on every rank of a group and return what rank 0 returned.

    One rank runs in this process. More are started as processes of this host, unless a launcher has done so. If any
    fails, UserError says the cause; by then all are gone.

    threads: of each rank; None: this host's cores are divided among the ranks.
    report: is called in this process with each value that rank 0 gives to ``ranks.report``, as soon as it comes.
    stoppable: SIGTERM and Ctrl-C are passed on to the ranks, which save and end.
    own_heap: whether CPU ranks set up their heaps, as all that is ladderize's own does.
    """
    check_group_size(tp_size, device)
    launch = launched()
    if launch != ALONE or tp_size == 1:
        return _work_as_rank(launch, report, function, args, device, threads, timeout, own_heap)
    places = [Place(rank, tp_size, rank, tp_size) for rank in range(tp_size)]
    with temporary_folder("group") as folder:
        arguments = (function, args, device, threads, timeout, own_heap, f"file://{folder / 'store'}")
        return run_processes(_work_as_rank, arguments, places, report, stoppable=stoppable)


def _work_as_rank(
    launch: Place,
    report: Report,
    function: Callable[..., Any],
    args: tuple[Any, ...],
    device: str,
    threads: int | None,
    timeout: timedelta,
    own_heap: bool,
    meeting: str | None = None,
) -> Any:
    """Call ``function`` as one rank of a group. One that this process has joined before is used, and stays.
    ``meeting``: torch's init_method; None: that of a launcher, which has also given this process its cores."""
    if meeting is not None and device == "cpu":
        threads = take_cores(launch.local_rank, launch.local_size, threads)
    set_threads(threads, launch.local_size)
    if device == "cpu" and own_heap:
        set_up_heap()
    stays = dist.is_initialized()
    ranks = join_group(launch, device, timeout=timeout, init_method=meeting or "env://")
    value = function(dataclasses.replace(ranks, report=report) if ranks.is_main else ranks, *args)
    if launch.size > 1:
        gc.collect()  # CUDA graphs that hold the group: NCCL waits for each of them
    if launch.size > 1 and not stays:
        # not after an error: the others would fail in turn, and report it before this rank reports the cause
        dist.destroy_process_group()
    return value


# ---- processes of this host ----


def run_processes(
    function: Callable[..., Any],
    args: tuple[Any, ...],
    places: Sequence[Place] = (ALONE,),
    report: Report = ignore,
    *,
    stoppable: bool = False,
) -> Any:
    """Call ``function(place, report, *args)`` in a new process for each place; return the value of the first. If any
    fails, UserError says the cause; by then all are gone. stoppable: as ``run`` has it."""
    context = start_context()
    processes: list[BaseProcess] = []
    pipes: list[Connection] = []
    with contextlib.ExitStack() as stack:
        streams = [stack.enter_context(Connection(os.dup(number), readable=False)) for number in (1, 2)]
        stack.callback(remove_segments, os.getpid())
        stack.callback(_stop, processes)
        for rank in places:
            ours, theirs = context.Pipe(duplex=False)
            pipes.append(stack.enter_context(ours))
            with theirs:  # this end is open in the new process alone: where that ends, we read the end of the pipe
                arguments = (function, args, rank, theirs, streams, dict(os.environ))
                # a daemon: those that a Ctrl-C finds begun end with this process
                processes.append(context.Process(target=_work, args=arguments, daemon=True))
                processes[-1].start()
        if stoppable:
            stack.enter_context(passing_on_signals(processes))
        return _watch(processes, pipes, report)


def _watch(processes: Sequence[BaseProcess], pipes: Sequence[Connection], report: Report) -> Any:
    """Listen until every process is done, or one fails; return the first one's value."""
    values: list[Any] = []
    running = list(pipes)
    while running:
        for pipe in wait(running):
            assert isinstance(pipe, Connection)
            try:
                kind, content = pipe.recv()
            except (EOFError, OSError):  # the process has ended, perhaps in the middle of a message
                running.remove(pipe)
                rank = pipes.index(pipe)
                processes[rank].join()
                if processes[rank].exitcode or (rank == 0 and not values):
                    end = how_it_ended(processes[rank].exitcode)
                    raise UserError(f"rank {rank} {end}; the whole group was stopped") from None
                continue
            if kind == "error":
                raise content
            if kind == "report":
                report(content)
            else:
                values.append(content)
    return values[0]


def how_it_ended(exitcode: int | None) -> str:
    if exitcode is None or exitcode >= 0:
        return f"ended with exit code {exitcode}"
    name = signal.Signals(-exitcode).name
    return f"was killed by {name}" + (" (out of memory, perhaps)" if name == "SIGKILL" else "")


def _stop(processes: Sequence[BaseProcess]) -> None:
    running = [process for process in processes if process.pid is not None and process.is_alive()]
    for process in running:
        process.terminate()
    deadline = time.monotonic() + TERMINATE_SECONDS
    for process in running:
        process.join(max(0.0, deadline - time.monotonic()))
        process.kill()
        process.join()


@contextlib.contextmanager
def passing_on_signals(processes: Sequence[BaseProcess]) -> Iterator[None]:
    """Pass SIGTERM and the first Ctrl-C on to the processes, as SIGTERM, in the block; a second signal kills them."""
    received: list[int] = []

    def pass_on(number: int, frame: FrameType | None) -> None:
        received.append(number)
        for process in processes:
            process.terminate() if len(received) == 1 else process.kill()

    try:
        with handled(pass_on, signal.SIGTERM, signal.SIGINT):
            yield
    except UserError:
        if received and any(process.exitcode in (-signal.SIGTERM, -signal.SIGKILL) for process in processes):
            raise UserError(
                "stopped by a signal; run the same command again to resume from the last saved state"
            ) from None
        raise


# ---- in the new process ----


def _work(
    function: Callable[..., Any],
    args: tuple[Any, ...],
    rank: Place,
    pipe: Connection,
    streams: Sequence[Connection],
    environment: Mapping[str, str],
) -> None:
    """Call ``function``, and send its value or an error. This process ends with the one that started it."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C goes to the parent, which stops the ranks
    end_with_parent()
    # else the pipe would not end with this process, but with the last one that it starts
    os.register_at_fork(after_in_child=pipe.close)
    os.set_inheritable(pipe.fileno(), False)
    multiprocessing.current_process().daemon = False  # a rank may start processes of its own
    for stream, connection in zip((1, 2), streams, strict=True):  # the server was started with other ones
        os.dup2(connection.fileno(), stream)
        connection.close()
    os.environ.clear()
    os.environ.update({**environment, **started_rank_variables(rank, environment)})
    faulthandler.enable()  # where native code dies, stderr says what Python was doing
    try:
        value = function(rank, (lambda value: pipe.send(("report", value))) if rank.rank == 0 else ignore, *args)
        if rank.rank == 0:
            pipe.send(("value", value))
    except BaseException as error:
        if os.environ.get(DEBUG):
            traceback.print_exc()
        if is_lost_rank(error):
            time.sleep(CAUSE_SECONDS)
        if not isinstance(error, LadderizeError | BrokenPipeError):  # the latter: whoever read our stdout went away
            error = UserError(f"rank {rank.rank} failed: {unplanned(error)}")
        with contextlib.suppress(OSError):
            pipe.send(("error", error))
        # without leaving through the group's destructors: the others may be gone
        os._exit(1)


def end_with_parent() -> None:
    """Make this process end when the one that started it ends, however that happens."""
    parent = multiprocessing.parent_process()
    assert parent is not None

    def watch() -> None:
        wait([parent.sentinel])
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()
