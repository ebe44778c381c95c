"""The process of a stage, which calls the functions of its steps."""

import contextlib
import fcntl
import os
import signal
import sys
import traceback
from collections.abc import Mapping
from multiprocessing.connection import Connection
from pathlib import Path

from ladderize.console import Console, say, sentence
from ladderize.errors import LadderizeError
from ladderize.ranks.environment import MASTER_ADDR, MASTER_PORT, Place, environment_with, start_context
from ladderize.runtime.launch import Report, end_with_parent, how_it_ended, run_processes
from ladderize.sweep.stages import LOG, Stage, Step

STOP_SECONDS = 120.0  # after Ctrl-C, to save what can be saved


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
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # which raises KeyboardInterrupt
    end_with_parent()
    os.environ.clear()
    os.environ.update(environment)
    error = None
    try:
        os.chdir(root)
        lock = os.open(stage.output, os.O_RDONLY)
        with contextlib.suppress(OSError):  # a file system without locks
            fcntl.flock(lock, fcntl.LOCK_EX)  # waits for the process of a sweep that was killed a moment ago
        _write_to(Path(stage.output) / LOG)
        print(f"==== {stage.title} ====", flush=True)
        for step in stage.steps:
            print(f"$ {step.typed}", flush=True)
            _run_step(step)
        os.close(lock)
    except KeyboardInterrupt:
        error = "interrupted"
    except (LadderizeError, OSError) as caught:
        error = sentence(caught)[:4000]  # a pipe holds it until the sweep reads
        say(f"Error: {error}")  # in the log, as a terminal would have it
    except BaseException as caught:
        traceback.print_exc()
        kind = type(caught).__name__
        error = f"unexpected error: {kind}: {sentence(caught)[:300]} (the traceback is in {stage.output}/{LOG})"
    sys.stdout.flush()
    with contextlib.suppress(OSError):
        pipe.send(error)


def _run_step(step: Step) -> None:
    """Call a function in this process, or in several with torchrun's variables."""
    if step.processes == 1:
        step.run(step.options, Console())
        return
    from torch.distributed import TCPStore

    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    meeting = {MASTER_ADDR: "127.0.0.1", MASTER_PORT: str(store.port), "TORCHELASTIC_USE_AGENT_STORE": str(True)}
    ranks = [Place(rank, step.processes, rank, step.processes) for rank in range(step.processes)]
    with environment_with({**meeting, **step.variables}):
        run_processes(_run_as_rank, (step, Path.cwd()), ranks, stoppable=True)


def _run_as_rank(rank: Place, report: Report, step: Step, folder: Path) -> None:
    os.chdir(folder)
    step.run(step.options, Console())


def _write_to(path: Path) -> None:
    """Redirect all output of this process, also by C++ and by child processes, to a log."""
    log = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    for number in (1, 2):
        os.dup2(log, number)
    os.close(log)
