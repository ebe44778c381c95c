"""The process that ``tests/warm.py`` forks from: it has imported torch and transformers, and nothing of ladderize.

Reads a line of JSON for each process to start, ``{"argv", "env", "cwd", "stdout", "stderr"}``, and answers with its
pid; ``{"wait": pid}`` is answered with the exit status once the process has ended, ``{"preload": [modules]}`` once they
are imported too. Ends with its standard input.
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
import traceback
from pathlib import Path

MODULES = ("torch", "dynamic_module_utils", "models.auto.modeling_auto", "models.llama.modeling_llama")


def preload(*modules: str) -> None:
    for name in modules:
        importlib.import_module(name)
    gc.collect()
    gc.freeze()  # no collection in a child touches, and so copies, what was imported here


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
    if kind == "-c":
        sys.argv, sys.path[0] = ["-c", *rest[1:]], ""
        exec(compile(rest[0], "<string>", "exec"), {"__name__": "__main__"})
    elif kind == "-m":
        sys.argv, sys.path[0] = rest, os.getcwd()
        runpy.run_module(rest[0], run_name="__main__", alter_sys=True)
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
        traceback.print_exc()
        code = 1
    with contextlib.suppress(BaseException):
        threading._shutdown()
        atexit._run_exitfuncs()
        sys.stdout.flush()
        sys.stderr.flush()
    os._exit(code)


def serve() -> None:
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    print("ready", file=answers)
    for line in iter(sys.stdin.readline, ""):
        request, answer = json.loads(line), 0
        if "preload" in request:
            preload(*request["preload"])
        elif "wait" in request:
            answer = os.waitstatus_to_exitcode(os.waitpid(request["wait"], 0)[1])
        elif (answer := os.fork()) == 0:
            answers.close()
            run_and_end(request)
        print(answer, file=answers)


if __name__ == "__main__":
    sys.path[0] = ""
    preload(MODULES[0], *(f"transformers.{name}" for name in MODULES[1:]))
    sys.modules["torch"].set_num_threads(1)
    serve()
