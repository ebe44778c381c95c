"""Time layouts and schedules against each other."""

import os
from dataclasses import replace

import ladderize
from ladderize.commands.shared import loading, runtime_device, start_server
from ladderize.console import Console
from ladderize.files.documents import check_writable
from ladderize.runtime.bench.options import BenchOptions
from ladderize.runtime.collectives.links import read_interconnect


def bench(options: BenchOptions, console: Console) -> None:
    """Time layouts and schedules against each other on ladderize's tensor-parallel runtime, and show what they wait
    for."""
    options.check_named()
    if options.out is not None:
        check_writable(options.out, inputs=[options.random_weights, options.link])
    if options.link is not None:
        read_interconnect(options.link)
    if options.engine == "vllm":
        os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")  # vLLM binds memory, and torch logs that for each engine
    with loading(options, console, "loading torch"):  # what argv alone decides was said before these seconds
        start_server(options.tp_size)
        if options.engine == "vllm":
            from ladderize.vllm.bench import bench_vllm as timed
        else:
            timed = ladderize.bench
            device = runtime_device(options.device, options.backend, options.threads, options.ranks)
            options = replace(options, device=device)
    timed(options, console=console)
