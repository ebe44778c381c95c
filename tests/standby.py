"""A fork server that is there before it is asked for.

A process that starts ranks has multiprocessing start a fork server, which imports torch for seconds. A process that
``stand_by`` was called in has one at once: a child that was forked before anything was computed, and waits. So has
everything that is forked where this module is the last import: by such a server, and by that of the tests' own process.
Imports nothing of ladderize.
"""

import ctypes
import fcntl
import json
import multiprocessing.util
import os
import signal
import socket
import sys
from collections.abc import Mapping
from types import SimpleNamespace

PR_SET_PDEATHSIG = 1
this = SimpleNamespace(has_server=False)  # this process; what waits has none itself


def stand_by() -> None:
    """In a process that was just forked. The server ends with it."""
    if this.has_server:
        return
    this.has_server = True
    ours, theirs = socket.socketpair()
    child = os.fork()
    if child == 0:
        try:
            signal.signal(signal.SIGINT, signal.SIG_IGN)
            signal.set_wakeup_fd(-1)
            # like a server that is started anew it keeps nothing of its parent's open, such as the end of a pipe
            os.closerange(3, theirs.fileno())
            os.closerange(theirs.fileno() + 1, os.sysconf("SC_OPEN_MAX"))
            serve_forks(theirs)
        finally:
            os._exit(0)
    theirs.close()
    start = multiprocessing.util.spawnv_passfds

    def start_or_ask(path: bytes, args: list[str], descriptors: list[int]) -> int:
        if "forkserver" not in args[-1] or ours.fileno() < 0:
            return start(path, args, descriptors)
        own = [0, 1, 2, *descriptors]
        request = {"code": args[-1], "descriptors": own, "folder": os.getcwd(), "environment": dict(os.environ)}
        socket.send_fds(ours, [json.dumps(request).encode()], own)
        ours.close()  # it serves once: the next one is a process of its own
        return child

    multiprocessing.util.spawnv_passfds = start_or_ask


def serve_forks(asked: socket.socket) -> None:
    """Wait to be asked, and be multiprocessing's fork server then: run its code, with its descriptors' own numbers."""
    prctl = ctypes.CDLL(None).prctl
    prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    message, descriptors, _, _ = socket.recv_fds(asked, 1 << 17, 5)
    asked.close()
    if not message:
        return
    request = json.loads(message)
    aside = [fcntl.fcntl(descriptor, fcntl.F_DUPFD_CLOEXEC, 512) for descriptor in descriptors]
    for descriptor in descriptors:
        os.close(descriptor)
    for descriptor, number in zip(aside, request["descriptors"], strict=True):
        os.dup2(descriptor, number)
        os.close(descriptor)
    os.chdir(request["folder"])
    take_environment(request["environment"])
    prctl(PR_SET_PDEATHSIG, 0)
    this.has_server = False  # what it forks has one again: a stage of a sweep starts ranks
    exec(request["code"], {"__name__": "__main__"})


def take_environment(environment: Mapping[str, str]) -> None:
    """As if this process had been started with it."""
    os.environ.clear()
    os.environ.update(environment)
    if cache := environment.get("HF_MODULES_CACHE"):  # transformers read it when it was imported
        for name in ("transformers.dynamic_module_utils", "transformers.utils", "transformers.utils.hub"):
            if name in sys.modules:
                sys.modules[name].HF_MODULES_CACHE = cache


os.register_at_fork(after_in_child=stand_by)
