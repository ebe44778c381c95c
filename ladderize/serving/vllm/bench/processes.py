"""One process for each rank of this host, with vLLM in it: its engines run in the rank itself, those of all layouts
side by side. Changing from one to the next costs nothing, and no idle processes disturb the engine that is timed.

The processes' environment is the one that vLLM gives its own workers on a CPU: OpenMP bound to the rank's cores before
the process begins.
"""

import dataclasses
import glob
import importlib.util
import multiprocessing
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from ladderize.errors import UserError
from ladderize.ranks.environment import ALONE, Place, environment_with, launched, started_rank_variables
from ladderize.ranks.group import INFERENCE_TIMEOUT, join_group
from ladderize.ranks.threads import cores, set_threads
from ladderize.runtime.collectives.shm import remove_segments
from ladderize.runtime.launch import Report, StartedRanks, end_with_parent, reporting_errors, stop_processes
from ladderize.serving.vllm.environment import BOUND_CORES, configuration_refusal

QUIET = {"VLLM_LOGGING_LEVEL": "ERROR", "TORCH_CPP_LOG_LEVEL": "ERROR", "PYTHONWARNINGS": "ignore"}


def run_ranks(
    function: Callable[..., Any], *args: Any, tp_size: int, device: str, threads: int | None, work: Path, report: Report
) -> Any:
    """Call ``function(ranks, *args)`` in a process of each rank, and return the first of what rank 0 returned: a value,
    and what has to live as long as the process.

    Under a launcher this process starts its own rank alone, and gets None unless that is rank 0. work: a folder, in
    which ranks of this host find each other. Raises UserError with the cause if any rank fails.
    """
    place = launched()
    if place != ALONE:
        places, store = [place], None
    else:
        places, store = [Place(rank, tp_size, rank, tp_size) for rank in range(tp_size)], f"file://{work / 'store'}"
    context = multiprocessing.get_context("spawn")
    pipes, processes = [], []
    try:
        for place in places:
            ours, theirs = context.Pipe(duplex=False)
            arguments = (function, args, place, device, store, theirs)
            process = context.Process(target=_work, args=arguments, name=f"rank {place.rank}", daemon=True)
            with environment_with(rank_environment(place, device, threads, os.environ)):
                process.start()
            theirs.close()
            pipes.append(ours)
            processes.append(process)
        group = StartedRanks(pipes, processes, report)
        group.watch()
        return group.value
    finally:
        stop_processes(processes)
        remove_segments(os.getpid())  # vLLM's, which has their names from identify()
        for pipe in pipes:
            pipe.close()


def rank_environment(place: Place, device: str, threads: int | None, environment: Mapping[str, str]) -> dict[str, str]:
    """The variables of a rank's process on top of ``environment``, those of this one. Raises UserError for cores that
    are not there."""
    variables = {
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # the engine runs in the rank itself
        **{name: environment.get(name, value) for name, value in QUIET.items()},
        **started_rank_variables(place, environment),
    }
    if device != "cpu":
        return variables
    own = _cores_of(place, threads, environment.get(BOUND_CORES, "auto"))
    preloaded = environment.get("LD_PRELOAD", "")
    if not any(name in preloaded for name in ("libgomp", "libiomp", "libomp")):
        preloaded = ":".join(filter(None, (preloaded, _openmp())))
    return variables | {
        "OMP_NUM_THREADS": str(len(own)),
        "OMP_PLACES": "{" + ",".join(map(str, own)) + "}",
        "OMP_PROC_BIND": "true",
        "LD_PRELOAD": preloaded,
        "TORCHINDUCTOR_COMPILE_THREADS": "1",
    }


def _cores_of(place: Place, threads: int | None, binding: str) -> list[int]:
    """What vLLM's variable says, or this rank's share of the cores. binding: such as ``0-3|4-7``, a part for each rank
    of this host."""
    free = sorted(cores())
    if binding in ("", "auto", "nobind"):
        share = threads or max(1, len(free) // place.local_size)
        found = free[place.local_rank * share : (place.local_rank + 1) * share]
        if len(found) < share:
            raise UserError(f"{place.local_size} ranks of {share} threads need more than the {len(free)} cores here")
        return found
    parts = binding.split("|")
    if len(parts) != place.local_size:
        raise UserError(
            f"{BOUND_CORES}={binding} names the cores of {len(parts)} ranks, and {place.local_size} run here"
        )
    found = _core_list(parts[place.local_rank], binding)
    if missing := sorted(set(found) - set(free)):
        raise UserError(f"{BOUND_CORES}={binding} names core {missing[0]}, which this process may not use")
    if threads is not None and threads != len(found):
        raise UserError(f"--threads {threads} contradicts {BOUND_CORES}={binding}; leave one of them out")
    return found


def _core_list(text: str, binding: str) -> list[int]:
    """``0,2-4`` as numbers."""
    found: list[int] = []
    try:
        for part in text.split(","):
            first, _, last = part.partition("-")
            found += range(int(first), int(last or first) + 1)
    except ValueError:
        found = []
    if not found:
        raise UserError(f"{BOUND_CORES}={binding} is no list of cores such as 0-3|4-7")
    return found


def _openmp() -> str:
    """The OpenMP library that torch brought along; loaded first, so that there is one in the process."""
    spec = importlib.util.find_spec("torch")
    if spec is None or spec.origin is None:
        return ""
    folder = Path(spec.origin).parent
    for place in (folder.parent / "torch.libs", folder / "lib"):
        if found := sorted(glob.glob(str(place / "libgomp*.so*"))):
            return found[0]
    return ""


def _work(
    function: Callable[..., Any], args: tuple[Any, ...], place: Place, device: str, store: str | None, pipe: Any
) -> None:
    """The life of a rank's process: it reports a value or one sentence, and ends with whoever started it."""
    multiprocessing.current_process().daemon = False  # vLLM starts processes of its own
    end_with_parent()
    with reporting_errors(pipe, place, configuration_refusal):
        if device == "cpu":
            set_threads(int(os.environ["OMP_NUM_THREADS"]), place.local_size)
        ranks = join_group(place, device, timeout=INFERENCE_TIMEOUT, init_method=store)
        ranks = dataclasses.replace(ranks, report=lambda value: pipe.send(("report", value)))
        value, _kept = function(ranks, *args)
        ranks.barrier()
        pipe.send(("value", value if ranks.is_main else None))
    # without leaving through vLLM's destructors: what they destroy is the process's, and other ranks may be gone
    os._exit(0)
