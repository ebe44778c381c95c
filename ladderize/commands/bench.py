"""``bench``."""

import dataclasses
from pathlib import Path
from typing import Annotated

import typer

from ladderize.choices import Dtype
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
    _runtime_options,
    options_from,
)
from ladderize.console import Console
from ladderize.runtime.bench.options import (
    LAYOUT_NAMES,
    BenchOptions,
    ModelChoice,
    check_bench_usage,
    parse_baselines,
    parse_batch_sizes,
)


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
    baselines: Annotated[
        str,
        typer.Option(
            metavar="A,B",
            help="Time these too, of the first model: parallel (one all-reduce per layer), no-comm (none).",
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
                "With --emulate-tp: ALPHA_US,BETA_GB_S (an all-reduce takes alpha + bytes/beta), or the name of a"
                " published link."
            ),
            rich_help_panel=MEMORY,
        ),
    ] = None,
    batch_size: Annotated[
        str, typer.Option(metavar="A,B", help="Batch sizes.", rich_help_panel=MEASUREMENT)
    ] = ",".join(map(str, BenchOptions.batch_sizes)),
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
            help="Skip comparing checkpoints with transformers in float32 before timing.",
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
    """Time layouts against each other on ladderize's tensor-parallel runtime, and show what they wait for."""
    choice = options_from(ModelChoice, ctx.params, models=tuple(models or ()))
    options = options_from(
        BenchOptions,
        ctx.params,
        batch_sizes=parse_batch_sizes(batch_size),
        baselines=parse_baselines(baselines),
        check=not no_check,
        compile=compile_,
        device=device or "cpu",  # which GPUs there are, torch says below
    )
    check_bench_usage(choice, options, link)  # before seconds of imports
    console = Console(as_json)
    with console.stage("loading torch"):
        import ladderize.runtime.bench.run

        device = _runtime_options(device, backend, threads, options.ranks)
    ladderize.bench(choice, dataclasses.replace(options, device=device), link, console=console, out=out, plot=plot)
