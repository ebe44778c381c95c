"""``bench``."""

import os
from dataclasses import dataclass, replace
from pathlib import Path

import ladderize
from ladderize.choices import AS_JSON, EngineName, option
from ladderize.commands.builder import ADVANCED, MEASUREMENT, MEMORY, MODELS, OUTPUT, GivenOptions, command, names_of
from ladderize.commands.shared import loading, runtime_device, start_server
from ladderize.console import Console
from ladderize.files.documents import check_writable
from ladderize.runtime.bench.options import (
    OF_INFERENCE,
    PLUGIN,
    VLLM_OPTIONS,
    BenchOptions,
    ModelChoice,
    check_bench_usage,
)
from ladderize.runtime.collectives.links import read_interconnect


@dataclass(frozen=True)
class BenchArguments:
    """The options that are in no dataclass of the benchmarks."""

    engine: EngineName = option(
        "Whose inference to time: ladderize's runtime, or vLLM with ladderize's layers in it.", "runtime"
    )
    link: str | None = option(
        "With --emulate-tp: ALPHA_US,BETA_GB_S (an all-reduce takes alpha + bytes/beta), a name such as nccl_pcie,"
        " or a file of calibrate.",
        metavar="LINK",
    )
    out: Path | None = option("Write everything as JSON, raw samples too.", metavar="FILE")
    as_json: bool = option(AS_JSON, False)


INSTEAD_FOR_VLLM = "; LADDERIZE_VLLM_BACKEND says what carries its messages, or stands for ranks that are not there"


@command(
    ModelChoice,
    BenchOptions,
    BenchArguments,
    panels={
        MODELS: "random_weights layout num_layers sync_tp_size engine baselines revision",
        MEMORY: "tp_size emulate_tp link outer_link backend dtype device threads",
        MEASUREMENT: "train schedules batch_size prompt_len output_len warmup repeat seed no_check",
        OUTPUT: "out profile json",
        ADVANCED: "replicate_vocab",
    },
)
def bench(given: GivenOptions) -> None:
    """Time layouts and schedules against each other on ladderize's tensor-parallel runtime, and show what they wait
    for."""
    arguments = given.fill(BenchArguments)
    in_vllm = arguments.engine == "vllm"
    if in_vllm:
        heeded = VLLM_OPTIONS | names_of(ModelChoice) | {"engine", "out", "json", "config"}
        instead = dict.fromkeys(("backend", "emulate_tp", "link", "outer_link"), INSTEAD_FOR_VLLM)
        given.refuse(given.params.keys() - heeded, "with --engine vllm", instead)
    options = given.fill(BenchOptions, device="cpu")
    if options.train:
        given.refuse(OF_INFERENCE, "with --train")
    choice, console, out = given.fill(ModelChoice), Console(arguments.as_json), arguments.out
    if out is not None:
        check_writable(out, inputs=[choice.random_weights, arguments.link])
    if in_vllm:
        check_bench_usage(choice, options, None, baselines=(PLUGIN,))
        os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")  # vLLM binds memory, and torch logs that for each engine
    else:
        check_bench_usage(choice, options, arguments.link)
        if arguments.link is not None:
            read_interconnect(arguments.link)
    with loading(given, console, "loading torch"):  # what argv alone decides was said before these seconds
        start_server(options.tp_size)
        if in_vllm:
            from ladderize.vllm.bench import bench_vllm
        else:
            timed = ladderize.bench
            device = runtime_device(given.params["device"], options.backend, options.threads, options.ranks)
    if in_vllm:
        bench_vllm(choice, options, out=out, console=console)
    else:
        timed(choice, replace(options, device=device), arguments.link, out=out, console=console)
