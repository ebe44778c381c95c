"""The stages that run on this host, each in a process of its own."""

import contextlib
import errno
import os
import signal
import sys
import time
import traceback
from collections.abc import Mapping
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

from ladderize.console import sentence
from ladderize.errors import LadderizeError, UserError
from ladderize.files.records import Record
from ladderize.files.temporaries import lock_folder
from ladderize.ranks.device import visible_gpus
from ladderize.ranks.server import start_context
from ladderize.ranks.threads import cores
from ladderize.runtime.launch import end_with_parent, how_it_ended
from ladderize.tradeoff.sweep.launch import HostPart, StageLaunch, Words
from ladderize.tradeoff.sweep.meeting import without_launcher
from ladderize.tradeoff.sweep.stages import LOG

STOP_SECONDS = 120.0  # that a stage has, after Ctrl-C, to save what it can
END_SECONDS = 10.0  # that a process has after its last word
PATIENCE_SECONDS = 30.0  # a killed sweep's process notices within a moment, and then its folder is free
QUIET_SECONDS = 5.0  # between two looks beside what is timed


@dataclass(frozen=True)
class StageOrder(Record):
    """A stage to run. output: its folder in the sweep's, which names it. cores: that it may run on; empty: all. gpus:
    that it sees; None: all. timed: nothing may run beside it. part: where several hosts run it."""

    title: str
    output: str
    runs: tuple[tuple[StageLaunch, Words], ...]
    cores: tuple[int, ...] = ()
    gpus: tuple[str, ...] | None = None
    timed: bool = False
    part: HostPart | None = None


@dataclass(frozen=True)
class Ended:
    """What a stage's process sends at its end. error: one sentence, or None. disk_full: the cause was that."""

    seconds: float
    error: str | None = None
    disk_full: bool = False


# ---- in the stage's process ----


def work(order: StageOrder, root: Path, environment: Mapping[str, str], pipe: Connection) -> None:
    """The life of a stage's process. root: the sweep's folder, where it works. environment: of the sweep's process,
    which may not be that of the server that forks."""
    os.setsid()  # Ctrl-C goes to the sweep, which decides what becomes of its stages
    signal.signal(signal.SIGINT, signal.default_int_handler)
    end_with_parent()
    os.environ.clear()
    os.environ.update(environment)
    begin, part = time.monotonic(), order.part
    log = Path(order.output) / (LOG if part is None or part.host == 0 else f"log-{part.host}.txt")
    try:
        os.chdir(root)
        lock = _lock(Path(order.output)) if part is None or part.host == 0 else None
        _write_to(log)
        print(f"==== {order.title} ====", flush=True)
        if order.cores and hasattr(os, "sched_setaffinity"):
            os.sched_setaffinity(0, order.cores)
        given = os.environ.get("OMP_NUM_THREADS", "")
        for launch, words in order.runs:
            if part is None or part.host < launch.hosts:
                threads = int(given) if given.isdigit() and int(given) > 0 else None
                launch.run(words, threads, part if launch.hosts > 1 else None)
        if lock is not None:
            os.close(lock)
        ended = Ended(time.monotonic() - begin)
    except BaseException as error:
        traceback.print_exc()  # to the log
        ended = Ended(time.monotonic() - begin, _words(error, log), _is_disk_full(error))
    sys.stdout.flush()
    with contextlib.suppress(OSError):
        pipe.send(ended)


def _lock(folder: Path) -> int | None:
    """Hold the stage's folder: the worker of a sweep that was killed a moment ago may still be in it."""
    deadline = time.monotonic() + PATIENCE_SECONDS
    while True:
        try:
            return lock_folder(folder)
        except BlockingIOError:
            if time.monotonic() > deadline:
                raise UserError(
                    f"{folder} is in use by a process of an earlier sweep; end that, and run again"
                ) from None
            time.sleep(0.1)


def _write_to(path: Path) -> None:
    """Let everything that is printed, also by C++ and by child processes, end in a log."""
    log = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    for number in (1, 2):
        os.dup2(log, number)
    os.close(log)


def _words(error: BaseException, log: Path) -> str:
    if isinstance(error, KeyboardInterrupt):
        return "interrupted"
    if isinstance(error, LadderizeError | OSError):
        return sentence(error)
    return f"unexpected error: {type(error).__name__}: {sentence(error)[:300]} (the traceback is in {log})"


def _is_disk_full(error: BaseException | None) -> bool:
    while error is not None:
        if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
            return True
        error = error.__cause__ or error.__context__
    return False


# ---- in the sweep's ----


@dataclass
class Started:
    order: StageOrder
    process: Any
    pipe: Connection
    begun: float


@dataclass
class ThisHost:
    """Runs stages here. root: the sweep's folder. cores, gpus: that there are; a GPU as CUDA_VISIBLE_DEVICES names
    it."""

    root: Path
    gpus: tuple[str, ...] = field(default_factory=lambda: tuple(visible_gpus()))
    cores: frozenset[int] = field(default_factory=lambda: frozenset(cores()))
    started: list[Started] = field(default_factory=list)

    def start(self, order: StageOrder) -> None:
        environment = without_launcher(os.environ)
        if order.gpus is not None:
            environment["CUDA_VISIBLE_DEVICES"] = ",".join(order.gpus)
        context = start_context()
        ours, theirs = context.Pipe(duplex=False)
        process = context.Process(target=work, args=(order, self.root, environment, theirs), name=order.title)
        process.start()
        theirs.close()
        self.started.append(Started(order, process, ours, time.monotonic()))

    def wait(self, seconds: float | None) -> None:
        """Until a process ends, at most so long; None: as long as it takes. Beside what is timed it looks rarely."""
        if any(one.order.timed for one in self.started) and seconds is not None:
            seconds = QUIET_SECONDS
        ends: list[Any] = [end for one in self.started for end in (one.process.sentinel, one.pipe)]
        if ends:
            wait(ends, timeout=seconds)
        elif seconds is not None:
            time.sleep(seconds)

    def ended(self) -> list[tuple[str, Ended]]:
        """What has ended since it was asked last."""
        over = [one for one in self.started if one.process.exitcode is not None or one.pipe.poll()]
        self.started = [one for one in self.started if one not in over]
        return [(one.order.output, _result(one)) for one in over]

    def stop(self, *, gently: bool, output: str | None = None) -> None:
        """End the process of a stage; None: all. gently: let them save what they can, unless Ctrl-C comes again."""
        over = [one for one in self.started if output in (None, one.order.output)]
        try:
            if gently:
                for one in over:
                    if one.process.is_alive():
                        os.kill(one.process.pid, signal.SIGINT)
                deadline = time.monotonic() + STOP_SECONDS
                for one in over:
                    one.process.join(max(0.0, deadline - time.monotonic()))
        except KeyboardInterrupt:
            pass
        for one in over:
            if one.process.is_alive():
                one.process.kill()
            one.process.join()
            one.pipe.close()
        self.started = [one for one in self.started if one not in over]


def _result(one: Started) -> Ended:
    """What a process said at its end, or how it ended without a word. Afterwards it is gone."""
    ended: Ended | None = None
    with contextlib.suppress(EOFError, OSError), one.pipe:
        ended = one.pipe.recv()
    one.process.join(END_SECONDS)
    if one.process.is_alive():  # a thread of some library does not end
        one.process.kill()
        one.process.join()
    if ended is not None:
        return ended
    how, seconds = how_it_ended(one.process.exitcode), time.monotonic() - one.begun
    return Ended(seconds, f"its process {how}; its log is {one.order.output}/{LOG}")
