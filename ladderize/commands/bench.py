"""``bench``."""

from pathlib import Path
from typing import Annotated

import typer

from ladderize.commands.options import (
    MAX_SEED,
    AsJson,
    Backend,
    Compile,
    Device,
    ReplicateVocab,
    Revision,
    Threads,
    _runtime_options,
    options_from,
)
from ladderize.console import Console, UserError
from ladderize.ranks.launcher import is_main_rank
from ladderize.runtime.bench.options import LAYOUT_NAMES, BenchOptions, ModelChoice, parse_baselines, parse_batch_sizes


def bench(
    ctx: typer.Context,
    models: Annotated[
        list[str] | None,
        typer.Argument(metavar="[MODEL]...", help="Checkpoints; the first is what others are compared with."),
    ] = None,
    random_weights: Annotated[
        str | None,
        typer.Option(metavar="CONFIG", help="A shape instead of checkpoints: 1b, 3b, 8b, 70b, 405b or a config.json."),
    ] = None,
    layout: Annotated[
        str | None,
        typer.Option(
            metavar="A,B",
            help=f"With --random-weights: names, or name=RANGE of layers.  [default: {','.join(LAYOUT_NAMES)}]",
        ),
    ] = None,
    num_layers: Annotated[
        int | None, typer.Option(min=1, help="With --random-weights: so many layers instead of the config's.")
    ] = None,
    sync_tp_size: Annotated[
        int | None,
        typer.Option(min=1, help="With --random-weights: virtual ranks of spd.  [default: as many as ranks]"),
    ] = None,
    tp_size: Annotated[
        int, typer.Option(min=1, help="Processes to split the model over; under torchrun, as many as it started.")
    ] = BenchOptions.tp_size,
    emulate_tp: Annotated[
        int | None,
        typer.Option(
            metavar="N", min=2, help="One process computes rank 0's part of N, and --link stands for the others."
        ),
    ] = None,
    link: Annotated[
        str | None,
        typer.Option(
            metavar="LINK",
            help="ALPHA_US,BETA_GB_S: an all-reduce takes alpha + bytes/beta; or a published link's name.",
        ),
    ] = None,
    batch_size: Annotated[str, typer.Option(metavar="A,B", help="Batch sizes, comma-separated.")] = ",".join(
        map(str, BenchOptions.batch_sizes)
    ),
    prompt_len: Annotated[int, typer.Option(min=1, help="Tokens of each prompt.")] = BenchOptions.prompt_len,
    output_len: Annotated[
        int, typer.Option(min=2, help="Tokens to make; the first belongs to the prefill.")
    ] = BenchOptions.output_len,
    dtype: Annotated[
        str, typer.Option(help="auto (as stored; bfloat16 for random weights), float32, bfloat16 or float16.")
    ] = ModelChoice.dtype,
    backend: Backend = BenchOptions.backend,
    warmup: Annotated[int, typer.Option(min=1, help="Rounds that are not counted.")] = BenchOptions.warmup,
    repeat: Annotated[int, typer.Option(min=1, help="Rounds that are; medians are reported.")] = BenchOptions.repeat,
    baselines: Annotated[
        str, typer.Option(metavar="A,B", help="Of the first model: parallel (one all-reduce a layer), no-comm.")
    ] = ",".join(BenchOptions.baselines),
    profile: Annotated[
        Path | None,
        typer.Option(
            metavar="DIR", help="Write Chrome traces here, and fail if a layout that overlaps shows no overlap."
        ),
    ] = None,
    no_check: Annotated[
        bool, typer.Option("--no-check", help="Time checkpoints unchecked, without the fp32 reference.")
    ] = False,
    replicate_vocab: ReplicateVocab = False,
    compile_: Compile = False,
    device: Device = None,
    threads: Threads = None,
    seed: Annotated[
        int, typer.Option(min=0, max=MAX_SEED, help="Of prompts and of the order of variants.")
    ] = BenchOptions.seed,
    plot: Annotated[Path | None, typer.Option(metavar="STEM", help="Draw STEM.png and STEM.svg.")] = None,
    out: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Write everything, raw samples too, as JSON.")
    ] = None,
    revision: Revision = None,
    as_json: AsJson = False,
) -> None:
    """Time layouts against each other on ladderize's own tensor-parallel runtime, and show what they wait for."""
    from ladderize.figure import check_plot
    from ladderize.files.documents import check_writable, write_json
    from ladderize.runtime.bench.plan import plan_bench
    from ladderize.runtime.bench.report import bench_summary
    from ladderize.runtime.bench.run import run_bench

    device = _runtime_options(device, backend, dtype, threads, emulate_tp or tp_size)
    choice = options_from(ModelChoice, ctx.params, models=tuple(models or ()))
    options = options_from(
        BenchOptions,
        ctx.params,
        batch_sizes=parse_batch_sizes(batch_size),
        baselines=parse_baselines(baselines),
        check=not no_check,
        compile=compile_,
        device=device,
    )
    if out is not None:
        check_writable(out)
    if plot is not None:
        check_plot(plot)
    console = Console(as_json)
    document = run_bench(plan_bench(choice, options, link), console)
    console.document(document.to_dict())
    console.result(bench_summary(document))
    if is_main_rank():
        if out is not None:
            write_json(out, document.to_dict())
            console.note(f"wrote {out}")
        if plot is not None:
            from ladderize.runtime.bench.plot import plot_bench

            console.note(f"drew {' and '.join(map(str, plot_bench(document, plot)))}")
    if document.disproved:
        raise UserError(
            f"nothing overlapped in the trace of {' and '.join(document.disproved)}, although the layout overlaps: its"
            " row is no result"
        )
