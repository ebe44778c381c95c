"""The parts that several commands share: checks of the device, and the next commands, with which an output ends."""

import os
import shlex
from collections.abc import Sequence

from ladderize.choices import BackendName, DeviceName
from ladderize.console import Console
from ladderize.errors import UserError
from ladderize.ranks.environment import WORLD_SIZE

LOADING = "loading torch and transformers"  # the first line of a command that computes
FILE = "FILE"  # in a next command: stands for a file that was not named yet


# ---- the device ----


def start_server(ranks: int) -> None:
    """Start the server that forks a command's processes. Called before the command's own imports, so that both run at
    once."""
    if ranks > 1 and not os.environ.get(WORLD_SIZE):
        from ladderize.ranks.server import start_context

        start_context()


def compute_options(device: DeviceName | None, threads: int | None) -> DeviceName:
    """Check device and threads; return the device. Raises UserError."""
    from ladderize.ranks.device import check_device, default_device
    from ladderize.ranks.threads import cores

    if device is not None:
        check_device(device)
    if threads is not None and threads > len(cores()):
        raise UserError(f"--threads {threads} is more than the {len(cores())} cores that this process may use")
    return device or default_device()


def runtime_device(device: DeviceName | None, backend: BackendName, threads: int | None, ranks: int) -> DeviceName:
    """Check device, threads and backend of the runtime's ranks; return the device. Raises UsageError or UserError."""
    from ladderize.runtime.collectives.choose import check_backend

    device = compute_options(device, threads)
    check_backend(backend, ranks, device)
    return device


def start_on(device: DeviceName | None, threads: int | None) -> DeviceName:
    """Check the device, divide the cores among the processes of this machine, and return the device.

    One process keeps the threads that OMP_NUM_THREADS gave torch. With several, torchrun may have set the variable to
    1.
    """
    device = compute_options(device, threads)
    from ladderize.ranks.environment import OMP_NUM_THREADS, launched
    from ladderize.ranks.threads import set_threads

    processes = launched().local_size
    if threads is not None or processes > 1 or not os.environ.get(OMP_NUM_THREADS):
        set_threads(threads, processes)
    return device


# ---- the next command ----


def command_line(*words: object) -> str:
    """Return a command line of ``ladderize``, quoted for a shell."""
    return shlex.join(["ladderize", *map(str, words)])


def align_command(converted: str, dense: str, data: str = FILE) -> str:
    """Return the command that aligns a converted checkpoint."""
    aligned = f"{converted.rstrip('/')}-aligned"
    return command_line("adapt", converted, aligned, "--method", "align", "--distill-from", dense, "--data", data)


def retrain_command(converted: str, out: str, dense: str, data: str = FILE, *, align: bool) -> str:
    """Return the command that retrains a converted checkpoint as docs/results.md found best for short runs.

    align: align first, for checkpoints that were neither aligned nor retrained.
    """
    first = ["--align"] if align else []
    what = ["--distill-from", dense, *first, "--hidden-weight", 1, "--data", data, "--max-tokens", "20M"]
    return command_line("adapt", converted, out, *what)


def show_next(console: Console, *steps: tuple[str, str]) -> None:
    """Print the next commands.

    steps: the purpose and the command of each.
    """
    if not steps:
        return
    wide = max(len(purpose) for purpose, _ in steps)
    console.result("\nnext:")
    for purpose, line in steps:
        console.result(f"  {purpose:{wide}}  {line}")


def scoring_file(*files: Sequence[str]) -> str:
    """Return the first of the files that ``eval --perplexity`` can read, or a placeholder."""
    from ladderize.data import SUFFIXES
    from ladderize.files.regular import split_name

    for name in (name for names in files for name in names):
        path, _ = split_name(name)
        if path.suffix in SUFFIXES and path.is_file():
            return name
    return FILE
