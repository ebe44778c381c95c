"""The process of a stage, in which its commands run as function calls."""

import contextlib
import os
import signal
import sys
import time
import traceback
from collections.abc import Mapping
from multiprocessing.connection import Connection
from pathlib import Path
from types import FrameType

from ladderize.commands.builder import run_words
from ladderize.console import sentence
from ladderize.errors import LadderizeError, UserError
from ladderize.files.temporaries import lock_folder
from ladderize.ranks.environment import MASTER_ADDR, MASTER_PORT, Place, environment_with
from ladderize.ranks.server import start_context
from ladderize.runtime.launch import Report, end_with_parent, how_it_ended, run_processes
from ladderize.sweep.stages import COMMANDS, LOG, Stage, StageLaunch, Words

STOP_SECONDS = 120.0  # after Ctrl-C, to save what can be saved
LOCK_SECONDS = 30.0  # for the process of a killed sweep to leave the folder, which it does within a moment


def run_stage(stage: Stage, root: Path) -> str | None:
    """Run a stage's commands in the sweep's folder; return the reason of a failure, or None.

    After Ctrl-C the stage can save; then KeyboardInterrupt is raised again.
    """
    context = start_context()
    ours, theirs = context.Pipe(duplex=False)
    process = context.Process(target=_work, args=(stage, root, dict(os.environ), theirs), name=stage.title)
    process.start()
    theirs.close()
    with ours:
        try:
            process.join()
        except BaseException:
            process.terminate()
            try:
                process.join(STOP_SECONDS)
            finally:  # also where Ctrl-C comes again
                process.kill()
                process.join()
            raise
        with contextlib.suppress(EOFError, OSError):
            error: str | None = ours.recv()
            return error
    return f"its process {how_it_ended(process.exitcode)}; its log is {stage.output}/{LOG}"


# ---- in the new process ----


def _work(stage: Stage, root: Path, environment: Mapping[str, str], pipe: Connection) -> None:
    """Run a stage's commands, and send an error or None.

    environment: of the sweep. The server that forks may have another.
    """
    os.setsid()  # Ctrl-C goes to the sweep, which stops this process by SIGTERM
    signal.signal(signal.SIGTERM, _interrupt)
    end_with_parent()
    os.environ.clear()
    os.environ.update(environment)
    error = None
    try:
        os.chdir(root)
        lock = _lock(Path(stage.output))
        _write_to(Path(stage.output) / LOG)
        print(f"==== {stage.title} ====", flush=True)
        for launch, words in stage.runs:
            print(f"$ {launch.command(words)}", flush=True)
            run_command(launch, words)
        if lock is not None:
            os.close(lock)
    except BaseException as caught:
        traceback.print_exc()  # to the log
        error = _words(caught, stage)
    sys.stdout.flush()
    with contextlib.suppress(OSError):
        pipe.send(error)


def _interrupt(number: int, frame: FrameType | None) -> None:
    raise KeyboardInterrupt


def run_command(launch: StageLaunch, words: Words) -> None:
    """Run a command of ladderize in this process, or in several with torchrun's variables."""
    if launch.processes == 1:
        run_words(COMMANDS[words[0]], words)
        return
    from torch.distributed import TCPStore

    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    meeting = {MASTER_ADDR: "127.0.0.1", MASTER_PORT: str(store.port), "TORCHELASTIC_USE_AGENT_STORE": str(True)}
    places = [Place(rank, launch.processes, rank, launch.processes) for rank in range(launch.processes)]
    with environment_with({**meeting, **launch.variables}):
        run_processes(_run_as_rank, (words, Path.cwd()), places, stoppable=True)


def _run_as_rank(place: Place, report: Report, words: Words, folder: Path) -> None:
    os.chdir(folder)
    run_words(COMMANDS[words[0]], words)


def _lock(folder: Path) -> int | None:
    """Lock the stage's folder, which the process of a sweep that was killed a moment ago may still use.

    Raises UserError if it does not leave within LOCK_SECONDS.
    """
    deadline = time.monotonic() + LOCK_SECONDS
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
    """Redirect all output of this process, also by C++ and by child processes, to a log."""
    log = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    for number in (1, 2):
        os.dup2(log, number)
    os.close(log)


def _words(error: BaseException, stage: Stage) -> str:
    if isinstance(error, KeyboardInterrupt):
        return "interrupted"
    if isinstance(error, LadderizeError | OSError):
        return sentence(error)[:4000]  # a pipe holds it until the sweep reads
    log = f"{stage.output}/{LOG}"
    return f"unexpected error: {type(error).__name__}: {sentence(error)[:300]} (the traceback is in {log})"
