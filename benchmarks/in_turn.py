"""One engine of against_vllm.py: ``ladderize bench``, which waits before each sample until it is told to go on.

    python benchmarks/in_turn.py ADDRESS ENGINE MODEL OPTIONS_JSON

Rank 0 asks at the socket ADDRESS. While the engine waits, all its processes sleep.
"""

import json
import os
import sys
from collections.abc import Iterator
from dataclasses import replace
from multiprocessing.connection import Client
from pathlib import Path

from against_vllm import SAME_HEAP

from ladderize.ranks.device import set_up_heap
from ladderize.runtime.bench import inference, rounds
from ladderize.runtime.bench.options import BenchOptions
from ladderize.vllm import bench as vllm

ADDRESS, ENGINE = "AGAINST_VLLM_ADDRESS", "AGAINST_VLLM_ENGINE"
OURS, VLLMS = inference.measure_models, vllm.measure_vllm


def measure_models(*arguments):
    take_turns()
    return OURS(*arguments)


def measure_vllm(*arguments):
    if os.environ.get(SAME_HEAP):
        set_up_heap()
    take_turns()
    return VLLMS(*arguments)


def take_turns() -> None:
    """In a rank: make each sample wait for its turn, and leave out what vLLM has not, samples without communication."""
    time_models = rounds.time_models
    turns = None

    def in_turn(benchmark, variants, batch) -> None:
        nonlocal turns
        if benchmark.group.is_main and turns is None:
            turns = Client(os.environ[ADDRESS])
            turns.send(os.environ[ENGINE])

        def waiting(run):
            def run_in_turn(steps: int) -> Iterator[None]:
                if turns is not None:
                    turns.send("ready")
                    turns.recv()
                benchmark.group.barrier()
                yield from run(steps)

            return run_in_turn

        variants = [replace(variant, run=waiting(variant.run), silent=None) for variant in variants]
        time_models(benchmark, variants, batch)

    rounds.time_models = in_turn


def main() -> None:
    os.environ[ADDRESS], os.environ[ENGINE], model, options = sys.argv[1:]
    # the ranks find these by name, in this module
    from in_turn import measure_models, measure_vllm

    inference.measure_models, vllm.measure_vllm = measure_models, measure_vllm
    given = json.loads(options)
    given |= {"models": (model,), "batch_sizes": tuple(given["batch_sizes"]), "out": Path(given["out"])}
    (vllm.bench_vllm if os.environ[ENGINE] == "vllm" else inference.bench)(BenchOptions(**given))


if __name__ == "__main__":
    main()
