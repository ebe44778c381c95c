"""``bench``."""

import dataclasses
from pathlib import Path
from typing import Annotated

import typer

import ladderize
from ladderize.choices import Dtype, EngineName
from ladderize.commands.benchmarking import (
    bench_options,
    check_way,
    start_bench,
    training_bench_options,
    vllm_bench_options,
)
from ladderize.commands.config_file import Config, PrintConfig
from ladderize.commands.options import (
    MAX_SEED,
    MEASUREMENT,
    MEMORY,
    MODELS,
    OUTPUT,
    AsJson,
    Backend,
    Compile,
    Device,
    ReplicateVocab,
    Revision,
    Threads,
    TpSize,
    given_options,
    options_from,
)
from ladderize.console import Console
from ladderize.runtime.bench.options import (
    LAYOUT_NAMES,
    BenchOptions,
    ModelChoice,
    check_bench_usage,
)
from ladderize.runtime.bench.training.options import TrainingBenchOptions, check_training_usage
from ladderize.runtime.schedule import Schedule, ScheduleName
from ladderize.serving.vllm.bench.options import check_vllm_usage


def bench(
    ctx: typer.Context,
    models: Annotated[
        list[str] | None,
        typer.Argument(metavar="[MODEL]...", help="Checkpoints. The first is the reference."),
    ] = None,
    random_weights: Annotated[
        str | None,
        typer.Option(
            metavar="CONFIG",
            help="Time a shape instead of checkpoints: 1b, 3b, 8b, 70b, 405b or a config.json.",
            rich_help_panel=MODELS,
        ),
    ] = None,
    layout: Annotated[
        str | None,
        typer.Option(
            metavar="A,B",
            help="With --random-weights: layouts, each a name or name=RANGE of layers.",
            show_default=",".join(LAYOUT_NAMES),
            rich_help_panel=MODELS,
        ),
    ] = None,
    num_layers: Annotated[
        int | None,
        typer.Option(
            metavar="N",
            min=1,
            help="With --random-weights: number of layers.",
            show_default="the config's",
            rich_help_panel=MODELS,
        ),
    ] = None,
    sync_tp_size: Annotated[
        int | None,
        typer.Option(
            metavar="N",
            min=1,
            help="With --random-weights: virtual ranks of spd.",
            show_default="as many as ranks",
            rich_help_panel=MODELS,
        ),
    ] = None,
    engine: Annotated[
        EngineName,
        typer.Option(
            help="Whose inference to time: ladderize's runtime, or vLLM with ladderize's layers in it.",
            rich_help_panel=MODELS,
        ),
    ] = "runtime",
    baselines: Annotated[
        str,
        typer.Option(
            metavar="A,B",
            help=(
                "Time these too, of the first model: parallel (one all-reduce per layer), no-comm (none), sequential"
                " (with --schedule domino); with --engine vllm: plugin (in the class that runs layouts)."
            ),
            rich_help_panel=MODELS,
        ),
    ] = ",".join(BenchOptions.baselines),
    revision: Revision = None,
    tp_size: TpSize = BenchOptions.tp_size,
    emulate_tp: Annotated[
        int | None,
        typer.Option(
            metavar="N",
            min=2,
            help="Emulate TP size N in one process: it computes rank 0's part, and --link gives the delays.",
            rich_help_panel=MEMORY,
        ),
    ] = None,
    link: Annotated[
        str | None,
        typer.Option(
            metavar="LINK",
            help=(
                "With --emulate-tp: ALPHA_US,BETA_GB_S (an all-reduce takes alpha + bytes/beta), a name that plan"
                " --list shows, or a file of calibrate."
            ),
            rich_help_panel=MEMORY,
        ),
    ] = None,
    train: Annotated[
        bool,
        typer.Option(
            "--train",
            help="Time training steps (forward and backward, no optimizer) instead of inference.",
            rich_help_panel=MEASUREMENT,
        ),
    ] = False,
    schedules: Annotated[
        str | None,
        typer.Option(
            metavar="A,B",
            help="With --train: schedules to time, of sequential and domino.",
            show_default="both",
            rich_help_panel=MEASUREMENT,
        ),
    ] = None,
    schedule: Annotated[
        ScheduleName,
        typer.Option(
            metavar="NAME",
            help="Of prefill: sequential, or domino, which computes one part of the batch while another's sum is sent.",
            rich_help_panel=MEASUREMENT,
        ),
    ] = BenchOptions.schedule,
    domino_chunks: Annotated[
        int | None,
        typer.Option(
            metavar="N",
            min=2,
            help="Domino: parts that the batch is cut into. One row is cut along its tokens.",
            show_default=str(Schedule.chunks),
            rich_help_panel=MEASUREMENT,
        ),
    ] = None,
    domino_columns: Annotated[
        int | None,
        typer.Option(
            metavar="N",
            min=1,
            help="Domino: parts in which a sub-module's sum is computed and sent.",
            show_default=str(Schedule.columns),
            rich_help_panel=MEASUREMENT,
        ),
    ] = None,
    batch_size: Annotated[
        str | None,
        typer.Option(
            metavar="A,B",
            help="Batch sizes.",
            show_default="1; 2 with --train; 1,8,64 with --engine vllm",
            rich_help_panel=MEASUREMENT,
        ),
    ] = None,
    seq_len: Annotated[
        int | None,
        typer.Option(
            metavar="N",
            min=2,
            help="With --train: tokens per row.",
            show_default=str(TrainingBenchOptions.seq_len),
            rich_help_panel=MEASUREMENT,
        ),
    ] = None,
    prompt_len: Annotated[
        int, typer.Option(metavar="N", min=1, help="Tokens per prompt.", rich_help_panel=MEASUREMENT)
    ] = BenchOptions.prompt_len,
    output_len: Annotated[
        int,
        typer.Option(
            metavar="N", min=2, help="Tokens to generate. The prefill makes the first one.", rich_help_panel=MEASUREMENT
        ),
    ] = BenchOptions.output_len,
    warmup: Annotated[
        int, typer.Option(metavar="N", min=1, help="Rounds that are not counted.", rich_help_panel=MEASUREMENT)
    ] = BenchOptions.warmup,
    repeat: Annotated[
        int,
        typer.Option(
            metavar="N", min=1, help="Rounds that are counted. Medians are reported.", rich_help_panel=MEASUREMENT
        ),
    ] = BenchOptions.repeat,
    seed: Annotated[
        int,
        typer.Option(
            metavar="N",
            min=0,
            max=MAX_SEED,
            help="Seed of prompts and of the order in each round.",
            rich_help_panel=MEASUREMENT,
        ),
    ] = BenchOptions.seed,
    no_check: Annotated[
        bool,
        typer.Option(
            "--no-check",
            help=(
                "Skip comparing checkpoints with transformers in float32 before timing; with --train, the schedules'"
                " gradients with each other."
            ),
            rich_help_panel=MEASUREMENT,
        ),
    ] = False,
    backend: Backend = BenchOptions.backend,
    dtype: Annotated[
        Dtype,
        typer.Option(
            metavar="DTYPE",
            help="float32, bfloat16, float16, or auto: as stored, bfloat16 for random weights.",
            rich_help_panel=MEMORY,
        ),
    ] = ModelChoice.dtype,
    device: Device = None,
    threads: Threads = None,
    out: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Write everything as JSON, raw samples too.", rich_help_panel=OUTPUT),
    ] = None,
    plot: Annotated[
        Path | None, typer.Option(metavar="STEM", help="Draw STEM.png and STEM.svg.", rich_help_panel=OUTPUT)
    ] = None,
    profile: Annotated[
        Path | None,
        typer.Option(
            metavar="DIR",
            help="Write Chrome traces here. Fails if a layout that should overlap shows no overlap.",
            rich_help_panel=OUTPUT,
        ),
    ] = None,
    as_json: AsJson = False,
    replicate_vocab: ReplicateVocab = False,
    compile_: Compile = False,
    config: Config = None,
    print_config: PrintConfig = False,
) -> None:
    """Time layouts and schedules against each other on ladderize's tensor-parallel runtime, and show what they wait
    for."""
    check_way(given_options(ctx), train=train, engine=engine)
    choice = options_from(ModelChoice, ctx.params, models=tuple(models or ()))
    console = Console(as_json)
    if engine == "vllm":
        in_vllm = vllm_bench_options(ctx.params)
        check_vllm_usage(choice, in_vllm)
        with console.stage("loading torch"):
            from ladderize.serving.vllm.bench.run import bench_vllm
        bench_vllm(choice, in_vllm, console=console, out=out, plot=plot)
    elif train:
        steps = training_bench_options(ctx.params)
        check_training_usage(choice, steps, link)
        device = start_bench("ladderize.runtime.bench.training.run", steps, console, device)
        steps = dataclasses.replace(steps, device=device)
        ladderize.bench_training(choice, steps, link, console=console, out=out)
    else:
        options = bench_options(ctx.params)
        check_bench_usage(choice, options, link)  # before seconds of imports
        device = start_bench("ladderize.runtime.bench.run", options, console, device)
        options = dataclasses.replace(options, device=device)
        ladderize.bench(choice, options, link, console=console, out=out, plot=plot)
