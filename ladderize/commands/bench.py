"""``bench``."""

import importlib
import os
from dataclasses import dataclass
from pathlib import Path

import ladderize
from ladderize.choices import AS_JSON, EngineName, option
from ladderize.commands.builder import ADVANCED, MEASUREMENT, MEMORY, MODELS, OUTPUT, GivenOptions, command, names_of
from ladderize.commands.shared import runtime_device, start_server
from ladderize.console import Console
from ladderize.files.documents import check_writable
from ladderize.runtime.bench.options import (
    VLLM_OPTIONS,
    BenchOptions,
    GroupOptions,
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


FOR_VLLM = {"engine", "out", "json", "config"} | VLLM_OPTIONS
INSTEAD_FOR_VLLM = {
    "backend": "; LADDERIZE_VLLM_BACKEND says what carries its messages",
    "emulate_tp": "; LADDERIZE_VLLM_BACKEND=emulated:... stands for ranks that are not there",
    "link": "; LADDERIZE_VLLM_BACKEND=emulated:... stands for ranks that are not there",
    "device": ", which computes on what it was built for",
    "compile": ", which compiles by itself",
    "no_check": ", whose tokens are not compared with a reference",
    "train": ", which does not train",
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
        ADVANCED: "replicate_vocab compile",
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
    options: GroupOptions
    if arguments.engine == "vllm":
        options = given.fill(BenchOptions, device="cpu")
        check_vllm_usage(choice, options)
        os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")  # vLLM binds memory, and torch logs that for each engine
        with console.stage("loading torch"):
            start_server(options.tp_size)
            from ladderize.vllm.bench.bench import bench_vllm
        bench_vllm(choice, options, out=out, console=console)
    elif arguments.train:
        options = given.fill(TrainingBenchOptions, device="cpu")  # the device is known once torch is imported
        check_training_usage(choice, options, arguments.link)
        options = given.fill(TrainingBenchOptions, device=start_bench("training.bench", options, given, console))
        ladderize.bench_training(choice, options, arguments.link, out=out, console=console)
    else:
        options = given.fill(BenchOptions, device="cpu")
        check_bench_usage(choice, options, arguments.link)  # before seconds of imports
        options = given.fill(BenchOptions, device=start_bench("inference", options, given, console))
        ladderize.bench(choice, options, arguments.link, out=out, console=console)


def check_way(given: GivenOptions, arguments: BenchArguments) -> None:
    """Raise UsageError for options that were given and have no effect on inference, on training, or on vLLM."""
    inference, training = names_of(BenchOptions), names_of(TrainingBenchOptions)
    if arguments.engine == "vllm":
        given.refuse(given.params.keys() - FOR_VLLM - names_of(ModelChoice), "with --engine vllm", INSTEAD_FOR_VLLM)
    elif arguments.train:
        given.refuse(inference - training, "with --train", INSTEAD_IN_TRAINING)
    else:
        given.refuse(training - inference, "without --train")


def start_bench(module: str, options: GroupOptions, given: GivenOptions, console: Console) -> str:
    """Import torch and ``module`` of runtime.bench, check the device, and return it. Raises UsageError or UserError."""
    with console.stage("loading torch"):
        start_server(options.tp_size)
        importlib.import_module(f"ladderize.runtime.bench.{module}")
        return runtime_device(given.params["device"], options.backend, options.threads, options.ranks)
