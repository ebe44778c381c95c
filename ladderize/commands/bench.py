"""``bench``."""

import os
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import ladderize
from ladderize.choices import AS_JSON, EngineName, option
from ladderize.commands.builder import ADVANCED, MEASUREMENT, MEMORY, MODELS, OUTPUT, GivenOptions, command, names_of
from ladderize.commands.shared import runtime_device, start_server
from ladderize.console import Console
from ladderize.files.documents import check_writable
from ladderize.runtime.bench.options import (
    VLLM_OPTIONS,
    BenchOptions,
    ModelChoice,
    TrainingBenchOptions,
    check_bench_usage,
    check_training_usage,
    check_vllm_usage,
)


@dataclass(frozen=True)
class BenchArguments:
    """The options that are in no dataclass of the benchmarks."""

    engine: EngineName = option(
        "Whose inference to time: ladderize's runtime, or vLLM with ladderize's layers in it.", "runtime"
    )
    link: str | None = option(
        "With --emulate-tp: ALPHA_US,BETA_GB_S (an all-reduce takes alpha + bytes/beta), a name that plan --list shows,"
        " or a file of calibrate.",
        metavar="LINK",
    )
    train: bool = option("Time training steps (forward and backward, no optimizer) instead of inference.", False)
    out: Path | None = option("Write everything as JSON, raw samples too.", metavar="FILE")
    as_json: bool = option(AS_JSON, False)


INSTEAD_FOR_VLLM = {
    "backend": "; LADDERIZE_VLLM_BACKEND says what carries its messages",
    "emulate_tp": "; LADDERIZE_VLLM_BACKEND=emulated:... stands for ranks that are not there",
    "link": "; LADDERIZE_VLLM_BACKEND=emulated:... stands for ranks that are not there",
    "no_check": ", whose tokens are not compared with a reference",
}
INSTEAD_IN_TRAINING = {"schedule": "; give --schedules", "prompt_len": "; give --seq-len"}


@command(
    ModelChoice,
    BenchOptions,
    TrainingBenchOptions,
    BenchArguments,
    panels={
        MODELS: "random_weights layout num_layers sync_tp_size engine baselines revision",
        MEMORY: "tp_size emulate_tp link backend dtype device threads",
        MEASUREMENT: "train schedules schedule domino_chunks domino_columns batch_size seq_len prompt_len output_len"
        " warmup repeat seed no_check",
        OUTPUT: "out profile json",
        ADVANCED: "replicate_vocab",
    },
)
def bench(given: GivenOptions) -> None:
    """Time layouts and schedules against each other on ladderize's tensor-parallel runtime, and show what they wait
    for."""
    arguments = given.fill(BenchArguments)
    check_way(given, arguments)
    choice, console, out = given.fill(ModelChoice), Console(arguments.as_json), arguments.out
    if out is not None:
        check_writable(out, inputs=[choice.random_weights, arguments.link])
    options: Any = given.fill(TrainingBenchOptions if arguments.train else BenchOptions, device="cpu")
    check: Any = check_training_usage if arguments.train else check_bench_usage
    if arguments.engine == "vllm":
        check_vllm_usage(choice, options)
        os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")  # vLLM binds memory, and torch logs that for each engine
    else:
        check(choice, options, arguments.link)
    with console.stage("loading torch"):  # what argv alone decides was said before these seconds
        start_server(options.tp_size)
        if arguments.engine == "vllm":
            from ladderize.vllm.bench import bench_vllm
        else:
            timed: Any = ladderize.bench_training if arguments.train else ladderize.bench
            device = runtime_device(given.params["device"], options.backend, options.threads, options.ranks)
    if arguments.engine == "vllm":
        bench_vllm(choice, options, out=out, console=console)
    else:
        timed(choice, replace(options, device=device), arguments.link, out=out, console=console)


def check_way(given: GivenOptions, arguments: BenchArguments) -> None:
    """Raise UsageError for options that were given and have no effect on inference, on training, or on vLLM."""
    inference, training = names_of(BenchOptions), names_of(TrainingBenchOptions)
    if arguments.engine == "vllm":
        heeded = VLLM_OPTIONS | names_of(ModelChoice) | {"engine", "out", "json", "config"}
        given.refuse(given.params.keys() - heeded, "with --engine vllm", INSTEAD_FOR_VLLM)
    elif arguments.train:
        given.refuse(inference - training, "with --train", INSTEAD_IN_TRAINING)
    else:
        given.refuse(training - inference, "without --train")
