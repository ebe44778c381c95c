"""What several commands share: where to compute, and checks of it."""

import os

from ladderize.choices import BackendName, DeviceName
from ladderize.errors import UserError
from ladderize.ranks.environment import WORLD_SIZE

LOADING = "loading torch and transformers"  # the first line of a command that computes


def start_server(ranks: int) -> None:
    """Before the imports of a command that starts so many processes: what forks them imports the same meanwhile."""
    if ranks > 1 and not os.environ.get(WORLD_SIZE):
        from ladderize.ranks.server import start_context

        start_context()


def compute_options(device: DeviceName | None, threads: int | None) -> DeviceName:
    """Check where and how to compute; returns the device."""
    from ladderize.ranks.device import check_device, default_device
    from ladderize.ranks.threads import cores

    if device is not None:
        check_device(device)
    if threads is not None and threads > len(cores()):
        raise UserError(f"--threads {threads} is more than the {len(cores())} cores that this process may use")
    return device or default_device()


def runtime_device(device: DeviceName | None, backend: BackendName, threads: int | None, ranks: int) -> DeviceName:
    """The same for what the runtime's ranks compute."""
    from ladderize.runtime.collectives.choose import check_backend

    device = compute_options(device, threads)
    check_backend(backend, ranks, device)
    return device


def start_on(device: DeviceName | None, threads: int | None) -> DeviceName:
    """Check where to compute, and share the cores out among the processes of this machine; returns the device."""
    device = compute_options(device, threads)
    from ladderize.ranks.environment import launched
    from ladderize.ranks.threads import set_threads

    set_threads(threads, launched().local_size)
    return device
