"""The server that processes of this host are forked from. Imports no torch, since commands start it before that
import."""

import contextlib
import multiprocessing
import multiprocessing.forkserver
import signal
from typing import Any

# Imports that every process needs. They take seconds, which are spent once, in the server.
PRELOADED = ["torch.distributed", "transformers.models.llama.modeling_llama"]


def start_context() -> Any:
    """Return the context that forks processes from a server, which has imported torch and transformers.

    The first start takes as long as these imports, every other one a fraction of a second.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOADED)
    with contextlib.ExitStack() as stack:
        with contextlib.suppress(ValueError):  # not the main thread: its owner handles signals
            # the server inherits it: Ctrl-C, which a terminal sends to it too, would end its imports in a traceback
            stack.callback(signal.signal, signal.SIGINT, signal.signal(signal.SIGINT, signal.SIG_IGN))
        multiprocessing.forkserver.ensure_running()
    return context
