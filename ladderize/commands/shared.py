"""The parts that several commands share: checks of the device, and the server of processes."""

import os
import shlex
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from glob import has_magic
from typing import Any

from ladderize.checkpoint.opening import open_checkpoint
from ladderize.choices import BackendName, DeviceName, flag
from ladderize.console import Console
from ladderize.data.files import HUB, data_files, split_weight
from ladderize.errors import UserError
from ladderize.families.registry import find_family
from ladderize.files.regular import split_name
from ladderize.layout import check_split
from ladderize.ranks.environment import WORLD_SIZE

MOST_SHOWN = 8  # files of a folder
LOADING = "loading torch and transformers"  # the first line of a command that computes


@contextmanager
def loading(options: Any, console: Console, text: str = LOADING) -> Iterator[None]:
    """Check what the options of a command name, then show that the block imports for seconds."""
    check_named_models(vars(options))
    check_named_data(vars(options), console)
    with console.stage(text):
        yield


def check_named_models(params: Mapping[str, Any]) -> None:
    """Raise UserError or LayoutError for models that are not sound, or that the ranks cannot share. Needs no torch."""
    models = [*(params.get("models") or ()), params.get("model"), params.get("distill_from")]
    for model in filter(None, models):
        config = open_checkpoint(model, sound="any").config
        if find_family(config) is None:
            continue
        for name in ("tp_size", "emulate_tp", "sync_tp_size"):
            check_split(config, params.get(name) or 1, name=flag(name))


def check_named_data(params: Mapping[str, Any], console: Console) -> None:
    """Print which files a folder or a glob stands for. Raises UserError for data that are not there."""
    for name in ("data", "eval_data", "perplexity", "prompt_file"):
        value = params.get(name) or ()
        for source in value if isinstance(value, list | tuple) else [str(value)]:
            path = split_name(split_weight(source)[0])[0]
            if source.startswith(HUB) or path.is_file():
                continue
            if not path.exists() and not has_magic(source):
                raise UserError(f"{flag(name)} {path} does not exist")
            files = data_files(split_weight(source)[0], flag(name))
            rest = f" and {len(files) - MOST_SHOWN} more" if len(files) > MOST_SHOWN else ""
            console.note(f"{flag(name)} {source} is {', '.join(files[:MOST_SHOWN])}{rest}")


def start_server(ranks: int) -> None:
    """Start the server that forks a command's processes. Called before the command's own imports, so that both run at
    once."""
    if ranks > 1 and not os.environ.get(WORLD_SIZE):
        from ladderize.ranks.environment import start_context

        start_context()


def compute_options(device: DeviceName | None, threads: int | None) -> DeviceName:
    """Check device and threads; return the device. Raises UserError."""
    from ladderize.ranks.device import check_device, cores, default_device

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


def start_on(device: DeviceName | None) -> DeviceName:
    """Check the device, make this process ready to compute on it, and return the device.

    One process keeps the threads that OMP_NUM_THREADS gave torch. With several, torchrun may have set the variable to
    1.
    """
    device = compute_options(device, None)
    from ladderize.ranks.device import set_threads, set_up_heap
    from ladderize.ranks.environment import OMP_NUM_THREADS, launched

    processes = launched().local_size
    if processes > 1 or not os.environ.get(OMP_NUM_THREADS):
        set_threads(None, processes)
    if device == "cpu":
        set_up_heap()
    return device


def command_line(*arguments: object) -> str:
    """Return a command line of ``ladderize``, quoted for a shell."""
    return shlex.join(["ladderize", *map(str, arguments)])
