"""Runs the stages of a plan, each in a process of its own: several side by side where nothing is timed. Where one
fails, the others go on."""

import contextlib
import errno
import os
import shutil
import signal
import sys
import time
import traceback
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

from ladderize.console import sentence
from ladderize.errors import LadderizeError, UserError
from ladderize.files.temporaries import lock_folder
from ladderize.ranks.threads import cores
from ladderize.runtime.launch import end_with_parent, how_it_ended, start_context
from ladderize.tradeoff.sweep.builder import Inputs
from ladderize.tradeoff.sweep.launch import Launch, Words
from ladderize.tradeoff.sweep.stages import LOG, TIMED, Stage, finished_stage, mark_finished, prepare
from ladderize.workflows.sweep_document import StageState

LOOK_SECONDS = 1.0  # between two looks at what runs
STOP_SECONDS = 120.0  # that a stage has, after Ctrl-C, to save what it can
END_SECONDS = 10.0  # that a process has after its last word
FULL_BYTES = 1 << 20  # a disk with less free is full
MISSING = ("failed", "skipped")
PATIENCE_SECONDS = 30.0  # a killed sweep's process notices within a moment, and then its folder is free


# ---- in the stage's process ----


@dataclass(frozen=True)
class Ended:
    """What a stage's process sends at its end. error: one sentence, or None. disk_full: the cause was that."""

    seconds: float
    error: str | None = None
    disk_full: bool = False


def work(
    title: str,
    runs: Iterable[tuple[Launch, Words]],
    root: Path,
    output: str,
    own_cores: Iterable[int],
    environment: Mapping[str, str],
    pipe: Connection,
) -> None:
    """The life of a stage's process. root: the sweep's folder, where it works. output: the stage's folder in it.
    own_cores: of this machine; empty: all. environment: of the sweep's process, which may not be that of the server
    that forks."""
    os.setsid()  # Ctrl-C goes to the sweep, which decides what becomes of its stages
    signal.signal(signal.SIGINT, signal.default_int_handler)
    end_with_parent()
    os.environ.clear()
    os.environ.update(environment)
    begin = time.monotonic()
    log = Path(output) / LOG
    try:
        os.chdir(root)
        lock = _lock(Path(output))
        _write_to(log)
        print(f"==== {title} ====", flush=True)
        if own_cores and hasattr(os, "sched_setaffinity"):
            os.sched_setaffinity(0, own_cores)
        given = os.environ.get("OMP_NUM_THREADS", "")
        for launch, words in runs:
            launch.run(words, int(given) if given.isdigit() and int(given) > 0 else None)
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
class Running:
    stage: Stage
    process: Any
    pipe: Connection
    begun: float
    cores: frozenset[int]
    gpus: tuple[str, ...]


@dataclass
class Execution:
    """The states of all stages by key, and the processes that work. gpus: of this machine, as CUDA_VISIBLE_DEVICES
    names them; no two stages share one. changed: is called after every change; looked: now and then while something
    runs, unless that is timed."""

    root: Path
    inputs: Inputs
    jobs: int
    gpus: Sequence[str]
    changed: Callable[[Stage, StageState], None]
    looked: Callable[[], None] = lambda: None
    states: dict[str, StageState] = field(default_factory=dict)
    running: list[Running] = field(default_factory=list)

    def state(self, stage: Stage) -> StageState:
        """What is known of a stage: of one that is new here, whether an earlier run completed it."""
        if stage.key not in self.states:
            marker = finished_stage(stage, self.root)
            known = StageState(stage.kind, stage.key, stage.output, "waiting", command=stage.command)
            if marker is not None:
                known = replace(known, status="done", seconds=marker.seconds, reused=True)
            self.states[stage.key] = known
        return self.states[stage.key]

    def run(self, stages: Sequence[Stage]) -> None:
        """Run all of them that are waiting, each after those that it needs, which come before it.

        A stage that fails is noted, and what needs it skipped. Raises UserError where nothing can go on: an input that
        changed, a full disk. Ctrl-C stops what runs, after it has saved what it can, and is raised again.
        """
        waiting = [stage for stage in stages if self.state(stage).status == "waiting"]
        try:
            while waiting or self.running:
                waiting = self._start(waiting)
                self._wait()
        except BaseException as error:
            self._stop(gently=isinstance(error, KeyboardInterrupt))
            raise

    def is_done(self, stage: Stage) -> bool:
        return self.state(stage).status == "done"

    # ---- starting ----

    def _start(self, waiting: list[Stage]) -> list[Stage]:
        """Start what can run now; returns what cannot. What takes more GPUs comes first: the others would always keep
        some of them."""
        left, is_awaited = [], False
        for stage in sorted(waiting, key=lambda stage: -self._share(stage)):
            needed = [self.states[key].status for key in stage.needs if key in self.states]
            if any(status in MISSING for status in needed):
                lost = next(self.states[key] for key in stage.needs if self.states[key].status in MISSING)
                how = "failed" if lost.status == "failed" else "was skipped"
                self._set(stage, status="skipped", message=f"the stage {lost.stage} that it needs {how}")
                continue
            is_ready = all(status == "done" for status in needed)
            if is_ready and self._has_room(stage) and not (is_awaited and self._share(stage)):
                self._launch(stage)
                continue
            is_awaited |= is_ready and self._share(stage) > 0
            left.append(stage)
        return left

    def _share(self, stage: Stage) -> int:
        """How many GPUs it takes; what is timed has no need to ask."""
        return min(stage.launch.gpus, len(self.gpus))

    @property
    def _free(self) -> list[str]:
        return [gpu for gpu in self.gpus if not any(gpu in one.gpus for one in self.running)]

    def _has_room(self, stage: Stage) -> bool:
        """Nothing runs beside what is timed."""
        if stage.kind == TIMED:
            return not self.running
        is_alone = any(one.stage.kind == TIMED for one in self.running)
        return not is_alone and len(self.running) < self.jobs and self._share(stage) <= len(self._free)

    def _launch(self, stage: Stage) -> None:
        prepare(stage, self.root)
        own, gpus = self._own_cores(stage), tuple(self._free[: self._share(stage)])
        title, environment = stage.title, dict(os.environ)
        if self.gpus and stage.kind != TIMED:  # one without a GPU must take no memory of any
            environment["CUDA_VISIBLE_DEVICES"] = ",".join(gpus)
            title += f" (GPU {', '.join(gpus)})" if gpus else ""
        context = start_context()
        ours, theirs = context.Pipe(duplex=False)
        arguments = (title, stage.runs, self.root, stage.output, sorted(own), environment, theirs)
        process = context.Process(target=work, args=arguments, name=stage.title)
        process.start()
        theirs.close()
        self.running.append(Running(stage, process, ours, time.monotonic(), own, gpus))
        self._set(stage, status="running")

    def _own_cores(self, stage: Stage) -> frozenset[int]:
        """A worker's share of the cores; empty: all."""
        if self.jobs == 1 or stage.kind == TIMED:
            return frozenset()
        every = sorted(cores())
        shares = [frozenset(every[start :: self.jobs]) for start in range(self.jobs)]
        taken = {core for one in self.running for core in one.cores}
        free = [share for share in shares if taken.isdisjoint(share)]
        return frozenset().union(*free[: max(1, self._share(stage))])

    # ---- waiting ----

    def _wait(self) -> None:
        """Until a process ends, or for a moment."""
        if not self.running:
            return
        timed = any(one.stage.kind == TIMED for one in self.running)
        ends: list[Any] = [end for one in self.running for end in (one.process.sentinel, one.pipe)]
        wait(ends, timeout=None if timed else LOOK_SECONDS)
        for one in [one for one in self.running if one.process.exitcode is not None or one.pipe.poll()]:
            self.running.remove(one)
            self._ended(one)
        if not timed:
            self.looked()

    def _ended(self, one: Running) -> None:
        result = _result(one)
        stage = one.stage
        try:
            self.inputs.check_unchanged()
        except UserError as error:  # which is why it failed, if it did
            self._set(stage, status="failed", seconds=result.seconds, message=str(error))
            raise
        if result.error is not None:
            is_full = result.disk_full or shutil.disk_usage(self.root).free < FULL_BYTES
            with contextlib.suppress(*([OSError] if is_full else [])):  # sweep.json finds no room then, either
                self._set(stage, status="failed", seconds=result.seconds, message=result.error)
            if is_full:
                raise UserError(
                    f"the disk of {self.root} is full (stage {stage.title}: {result.error}); free some space and run"
                    " the same command again, which keeps every complete stage"
                )
            return
        mark_finished(stage, self.root, result.seconds)
        self._set(stage, status="done", seconds=result.seconds)

    def _set(self, stage: Stage, **values: Any) -> None:
        self.states[stage.key] = state = replace(self.state(stage), **values)
        self.changed(stage, state)

    # ---- stopping ----

    def _stop(self, *, gently: bool) -> None:
        """End all processes. gently: let them save what they can, unless Ctrl-C comes again."""
        try:
            if gently:
                for one in self.running:
                    if one.process.is_alive():
                        os.kill(one.process.pid, signal.SIGINT)
                deadline = time.monotonic() + STOP_SECONDS
                for one in self.running:
                    one.process.join(max(0.0, deadline - time.monotonic()))
        except KeyboardInterrupt:
            pass
        for one in self.running:
            if one.process.is_alive():
                one.process.kill()
            one.process.join()
            self.states[one.stage.key] = replace(self.states[one.stage.key], status="waiting")
        self.running.clear()


def _result(one: Running) -> Ended:
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
    return Ended(seconds, f"its process {how}; its log is {one.stage.output}/{LOG}")
