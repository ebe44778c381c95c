"""The process that ``tests/warm.py`` forks from: it has imported torch and transformers, and nothing of ladderize.

Reads a line of JSON for each process to start, ``{"argv", "env", "cwd", "stdout", "stderr"}``, and answers with its
pid; ``{"wait": pid}`` is answered with the exit status once the process has ended, ``{"preload": [modules]}`` once they
are imported too. Ends with its standard input.

A process that starts ranks has a fork server at once (``standby.py``).
"""

import atexit
import contextlib
import gc
import importlib
import json
import os
import runpy
import signal
import sys
import threading
from pathlib import Path


def preload() -> None:
    import torch
    import transformers.dynamic_module_utils
    import transformers.models.auto.modeling_auto
    import transformers.models.llama.modeling_llama  # noqa: F401

    torch.set_num_threads(1)
    gc.collect()
    gc.freeze()  # no collection in a child touches, and so copies, what was imported here


def become(request: dict) -> None:
    """In the forked child: what ``python *argv`` would run, with its streams, folder and environment."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    for descriptor, path in ((1, request["stdout"]), (2, request["stderr"])):
        os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600), descriptor)
    os.chdir(request["cwd"])
    from tests.standby import stand_by, take_environment  # here: its hook of forks comes after those of other modules

    take_environment(request["env"])
    stand_by()
    kind, *rest = request["argv"]
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
