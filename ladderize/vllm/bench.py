"""The command ``ladderize bench --engine vllm``: from its options to its document. Only the ranks import vLLM."""

import os
import warnings
from dataclasses import replace

from ladderize.console import SILENT, Console
from ladderize.errors import UserError
from ladderize.files.output import temporary_folder
from ladderize.ranks.device import default_device
from ladderize.ranks.group import Ranks
from ladderize.runtime.bench.document import BenchDocument
from ladderize.runtime.bench.options import BenchOptions
from ladderize.runtime.bench.plan import chosen_models
from ladderize.runtime.bench.report import run_and_show
from ladderize.runtime.collectives.shm import remove_segments
from ladderize.runtime.shards import check_runnable
from ladderize.vllm.environment import MessageBackend, check_vllm, configuration_refusal, is_newer, not_known
from ladderize.vllm.served import VllmPlan, served_models
from ladderize.vllm.touched import newer_problem

# variables of a rank: the engine runs in the rank itself, which reports errors
VARIABLES = {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_LOGGING_LEVEL": "ERROR", "TORCHINDUCTOR_COMPILE_THREADS": "1"}


def bench_vllm(options: BenchOptions, *, console: Console = SILENT) -> BenchDocument:
    """Time the models in vLLM against each other, and return the result; a console that speaks shows it.

    A dense model runs in vLLM's own class, unless messages are emulated; others in ladderize's. Raises UsageError or
    UserError for what cannot be measured.
    """
    check_vllm()
    if is_newer():
        console.warn(f"{not_known()}: it was not tried")
    try:
        emulated = MessageBackend.from_environment(os.environ).link is not None
    except ValueError as error:
        raise UserError(str(error)) from None
    options = replace(options, engine="vllm")
    device = default_device()
    specs = chosen_models(options, device)
    for spec in specs:
        check_runnable(spec.config, spec.layout, options.tp_size)
        if spec.config["vocab_size"] != specs[0].config["vocab_size"]:
            raise UserError(f"{spec.name} has another vocabulary than {specs[0].name}; compare them apart")
    with temporary_folder("vllm") as work:
        plan = VllmPlan(served_models(specs, options, work, emulated=emulated), options, os.getpid())
        try:
            return run_and_show(measure_vllm, plan, console)
        finally:  # also where a launcher started the ranks: vLLM's, whose names bench_engine.py gives
            remove_segments(os.getpid())


def measure_vllm(ranks: Ranks, plan: VllmPlan, console: Console) -> BenchDocument:
    """Start the engines of all rows and time them. All ranks call it. Raises UserError for what vLLM refuses."""
    for name, value in VARIABLES.items():
        os.environ.setdefault(name, value)
    warnings.simplefilter("ignore")  # of vLLM and its imports
    if problem := newer_problem():
        raise UserError(problem)
    try:
        from ladderize.vllm.bench_engine import measure_engines

        return measure_engines(ranks, plan, console)
    except Exception as error:
        if refusal := configuration_refusal(error):
            raise UserError(refusal) from None
        raise
