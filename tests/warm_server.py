"""The process that ``tests/warm.py`` forks from: it has imported torch and transformers, and nothing of ladderize.

Reads a line of JSON for each process to start, ``{"argv", "env", "cwd", "stdout", "stderr"}``, and answers with its
pid; ``{"wait": pid}`` is answered with the exit status once the process has ended, ``{"preload": [modules]}`` once they
are imported too. Ends with its standard input.

A process that starts ranks has multiprocessing start a fork server, which would import torch again: here that server is
a child that was forked before anything was computed, and waits for it.
"""

import atexit
import contextlib
import ctypes
import fcntl
import gc
import importlib
import json
import multiprocessing.util
import os
import runpy
import signal
import socket
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

PR_SET_PDEATHSIG = 1


def preload() -> None:
    import torch
    import transformers.dynamic_module_utils
    import transformers.models.auto.modeling_auto
    import transformers.models.llama.modeling_llama  # noqa: F401

    torch.set_num_threads(1)
    gc.collect()
    gc.freeze()  # no collection in a child touches, and so copies, what was imported here


@contextlib.contextmanager
def standby_fork_server() -> Iterator[None]:
    """Within it, the fork server that multiprocessing starts is a child which is there already."""
    ours, theirs = socket.socketpair()
    child = os.fork()
    if child == 0:
        ours.close()
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        serve_forks(theirs)
        os._exit(0)
    theirs.close()
    start = multiprocessing.util.spawnv_passfds

    def start_or_ask(path: bytes, args: list[str], descriptors: list[int]) -> int:
        if "forkserver" not in args[-1] or ours.fileno() < 0:
            return start(path, args, descriptors)
        request = json.dumps({"code": args[-1], "descriptors": descriptors})
        socket.send_fds(ours, [request.encode()], descriptors)
        ours.close()  # it serves once: the next one is a process of its own
        return child

    multiprocessing.util.spawnv_passfds = start_or_ask
    try:
        yield
    finally:
        if ours.fileno() >= 0:
            with contextlib.suppress(KeyboardInterrupt):  # a Ctrl-C that comes after the end changes nothing
                os.kill(child, signal.SIGKILL)
                os.waitpid(child, 0)


def serve_forks(asked: socket.socket) -> None:
    """Wait to be asked, and be multiprocessing's fork server then: run its code, with its descriptors' own numbers."""
    message, descriptors, _, _ = socket.recv_fds(asked, 1 << 16, 2)
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
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, 0)
    exec(request["code"], {"__name__": "__main__"})


def become(request: dict) -> None:
    """In the forked child: what ``python *argv`` would run, with its streams, folder and environment."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    for descriptor, path in ((1, request["stdout"]), (2, request["stderr"])):
        os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600), descriptor)
    os.chdir(request["cwd"])
    os.environ.clear()
    os.environ.update(request["env"])
    if cache := request["env"].get("HF_MODULES_CACHE"):  # transformers read it when it was imported
        for name in ("transformers.dynamic_module_utils", "transformers.utils", "transformers.utils.hub"):
            sys.modules[name].HF_MODULES_CACHE = cache
    kind, *rest = request["argv"]
    with standby_fork_server():
        run(kind, rest)


def run(kind: str, rest: list[str]) -> None:
    """What ``python kind *rest`` runs."""
    if kind == "-c":
        code, *rest = rest
        sys.argv, sys.path[0] = ["-c", *rest], ""
        exec(compile(code, "<string>", "exec"), {"__name__": "__main__"})
    elif kind == "-m":
        name, *rest = rest
        sys.argv, sys.path[0] = [name, *rest], os.getcwd()
        runpy.run_module(name, run_name="__main__", alter_sys=True)
    else:
        sys.argv, sys.path[0] = [kind, *rest], str(Path(kind).parent)
        runpy.run_path(kind, run_name="__main__")


def run_and_end(request: dict) -> None:
    """Never returns. Threads are joined and exit handlers run; modules are not taken apart, which would copy them."""
    code = 0
    try:
        become(request)
    except SystemExit as stop:
        if isinstance(stop.code, str):
            print(stop.code, file=sys.stderr)
        code = stop.code if isinstance(stop.code, int) else int(stop.code is not None)
    except BaseException:
        import traceback

        traceback.print_exc()
        code = 1
    with contextlib.suppress(BaseException):
        threading._shutdown()
        atexit._run_exitfuncs()
        sys.stdout.flush()
        sys.stderr.flush()
    os._exit(code)


def serve() -> None:
    """Answer until standard input ends."""
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    print("ready", file=answers)
    for line in iter(sys.stdin.readline, ""):
        request = json.loads(line)
        if "preload" in request:
            for name in request["preload"]:
                importlib.import_module(name)
            gc.freeze()
            print(0, file=answers)
            continue
        if "wait" in request:
            _, status = os.waitpid(request["wait"], 0)
            print(os.waitstatus_to_exitcode(status), file=answers)
            continue
        pid = os.fork()
        if pid == 0:
            answers.close()
            run_and_end(request)
        print(pid, file=answers)


if __name__ == "__main__":
    sys.path.pop(0)
    sys.path.insert(0, "")
    preload()
    serve()
