"""A stage in a process of its own: it calls the public function of the stage's command, and says how that ended."""

import contextlib
import errno
import os
import signal
import sys
import time
import traceback
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from ladderize.console import Console, sentence
from ladderize.errors import LadderizeError, UserError
from ladderize.files.temporaries import lock_folder
from ladderize.ranks.threads import set_threads
from ladderize.runtime.launch import end_with_parent
from ladderize.tradeoff.sweep import settings
from ladderize.tradeoff.sweep.stages import (
    ADAPTER_FOLDER,
    BENCH_JSON,
    LOG,
    MODEL_FOLDER,
    PREDICTIONS,
    RESULTS,
    SENSITIVITY_JSON,
    StageKind,
)

PATIENCE_SECONDS = 30.0  # a killed sweep's worker notices within a moment, and then its folder is free


@dataclass(frozen=True)
class Ended:
    """What a worker sends at its end. error: one sentence, or None. disk_full: the cause was that."""

    seconds: float
    error: str | None = None
    disk_full: bool = False


def work(
    kind: StageKind,
    title: str,
    job: Mapping[str, Any],
    root: str,
    output: str,
    cores: Iterable[int],
    environment: Mapping[str, str],
    pipe: Connection,
) -> None:
    """The life of a worker. root: the sweep's folder, where it works. output: the stage's folder in it. cores: its own
    of this machine; empty: all. environment: of the sweep's process, which may not be that of the server that forks."""
    os.setsid()  # Ctrl-C goes to the sweep, which decides what becomes of its workers
    signal.signal(signal.SIGINT, signal.default_int_handler)
    end_with_parent()
    os.environ.clear()
    os.environ.update(environment)
    begin = time.monotonic()
    try:
        os.chdir(root)
        folder = Path(output)
        lock = _lock(folder)
        _write_to(folder / LOG)
        print(f"==== {title} ====", flush=True)
        if cores and hasattr(os, "sched_setaffinity"):
            os.sched_setaffinity(0, cores)
        run_stage(kind, job, folder)
        if lock is not None:
            os.close(lock)
        ended = Ended(time.monotonic() - begin)
    except BaseException as error:
        traceback.print_exc()  # to the log
        seconds = time.monotonic() - begin
        ended = Ended(seconds, _words(error, Path(output) / LOG), _is_disk_full(error))
    sys.stdout.flush()
    with contextlib.suppress(OSError):
        pipe.send(ended)


def run_stage(kind: StageKind, job: Mapping[str, Any], folder: Path) -> None:
    """Call the function of a stage. folder: for its output."""
    console = Console()
    if kind != "convert":
        _own_cores()
    {"sensitivity": _sensitivity, "convert": _convert, "adapt": _adapt, "eval": _evaluate, "bench": _bench}[kind](
        job, folder, console
    )


def _sensitivity(job: Mapping[str, Any], folder: Path, console: Console) -> None:
    from ladderize.workflows.sensitivity import write_sensitivity

    options = settings.sensitivity_settings(job["options"], job["mode"], job["sync_tp_size"], "sensitivity")
    write_sensitivity(job["model"], folder / SENSITIVITY_JSON, options, console=console)


def _convert(job: Mapping[str, Any], folder: Path, console: Console) -> None:
    from ladderize.convert.pipeline import convert_checkpoint
    from ladderize.convert.recipe import Recipe

    given: dict[str, Any] = {
        key: tuple(value) if isinstance(value, list) else value for key, value in job["recipe"].items()
    }
    recipe = Recipe(**given)
    convert_checkpoint(
        job["model"], folder / MODEL_FOLDER, recipe, revision=job["revision"], verify=job["verify"], console=console
    )


def _adapt(job: Mapping[str, Any], folder: Path, console: Console) -> None:
    from ladderize.adapt.align.options import AlignOptions
    from ladderize.adapt.blockwise.options import BlockwiseOptions
    from ladderize.adapt.methods import LORA

    method, model, teacher, out = job["method"], job["model"], job["teacher"], folder / MODEL_FOLDER
    options = settings.adapt_settings(method, job["options"], teacher, "adapt")
    if isinstance(options, AlignOptions):
        from ladderize.adapt.align.align import align_checkpoint

        align_checkpoint(model, out, teacher, options, verify=job["verify"], console=console)
        return
    if isinstance(options, BlockwiseOptions):
        from ladderize.adapt.blockwise.distill import adapt_blocks

        adapt_blocks(model, out, teacher, options, verify=job["verify"], console=console)
        return
    from ladderize.adapt.retrain.run import adapt_checkpoint

    written = folder / ADAPTER_FOLDER if method == LORA else out
    adapt_checkpoint(model, written, options, verify=job["verify"], console=console)
    if method == LORA:
        from ladderize.workflows.merge import merge

        merge(written, out, verify=job["verify"], console=console)


def _evaluate(job: Mapping[str, Any], folder: Path, console: Console) -> None:
    from ladderize.eval.evaluation.run import evaluate

    options = settings.eval_settings(job["options"], None, "eval")
    keep = folder / PREDICTIONS if job["keep_predictions"] else None
    reference = Path(job["reference"]) if job["reference"] is not None else None
    evaluate(
        [job["model"]],
        options,
        out=folder / RESULTS,
        keep_predictions=keep,
        reference=reference,
        resume=True,  # the stage's key vouches for the model and the data
        console=console,
    )


def _bench(job: Mapping[str, Any], folder: Path, console: Console) -> None:
    from ladderize.runtime.bench.inference import bench

    given = job["options"]
    choice = settings.bench_choice(given, job["models"], None, "bench")
    options = settings.bench_settings(given, "bench")
    bench(choice, options, settings.bench_link(given, "bench"), out=folder / BENCH_JSON, console=console)


def _own_cores() -> None:
    """As many threads as this process has cores, unless OMP_NUM_THREADS says how many."""
    given = os.environ.get("OMP_NUM_THREADS", "")
    set_threads(int(given) if given.isdigit() and int(given) > 0 else None, 1)


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
