"""The server that processes of this host are forked from. Imports no torch: a command starts it, and then imports that
itself, at the same time.
"""

import contextlib
import multiprocessing
import multiprocessing.forkserver
import multiprocessing.util
import os
import signal
from pathlib import Path
from typing import Any

from ladderize.files.temporaries import adopt_folder
from ladderize.ranks.environment import environment_with

# What every process imports anyway: seconds, which are spent once, in the server.
PRELOADED = ["torch.distributed", "transformers.models.llama.modeling_llama"]


def start_context() -> Any:
    """How processes are started: forked from a server that has imported torch and transformers and computed nothing.

    The first start takes as long as these imports, every other one a fraction of a second.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOADED)
    # where the server listens: multiprocessing removes it at the end, but not after SIGKILL
    adopt_folder(Path(multiprocessing.util.get_temp_dir()), "pymp-")
    with contextlib.ExitStack() as stack:
        with contextlib.suppress(ValueError):  # not the main thread: its owner handles signals
            # the server inherits it: Ctrl-C, which a terminal sends to it too, would end its imports in a traceback
            stack.callback(signal.signal, signal.SIGINT, signal.signal(signal.SIGINT, signal.SIG_IGN))
        # what is left of a killed process is removed by a process that would also say so, on every terminal
        warnings = ",".join(filter(None, (os.environ.get("PYTHONWARNINGS"), "ignore:resource_tracker")))
        stack.enter_context(environment_with({"PYTHONWARNINGS": warnings}))
        multiprocessing.forkserver.ensure_running()
    return context
