"""``calibrate``."""

from pathlib import Path
from typing import Annotated, Any

import typer

import ladderize
from ladderize.choices import Dtype
from ladderize.commands.config_file import Config, PrintConfig
from ladderize.commands.next_steps import command, show_next
from ladderize.commands.options import (
    ADVANCED,
    DATA,
    LOADING,
    MAX_SEED,
    MEASUREMENT,
    MEMORY,
    MODELS,
    OUTPUT,
    AsJson,
    Backend,
    Device,
    Threads,
    _runtime_options,
    given_options,
    options_from,
)
from ladderize.console import Console
from ladderize.errors import UsageError
from ladderize.planning.calibration.options import CalibrateOptions, TimingsOptions
from ladderize.runtime.bench.options import parse_counts

ONLY_TIMINGS = ("link", "engine", "fit")
FOR_BOTH = ("timings", "hardware", "shape", "name", "out", "as_json", "config", "print_config")


def calibrate(
    ctx: typer.Context,
    out: Annotated[
        Path,
        typer.Option(
            metavar="FILE",
            help=(
                "The JSON file to write; --hardware and --link take it. A killed run goes on when it is run again (not"
                " under torchrun)."
            ),
            rich_help_panel=OUTPUT,
        ),
    ],
    tp_size: Annotated[
        str | None,
        typer.Option(
            metavar="A,B",
            help="Numbers of ranks to time, one after the other. Under torchrun: as many as it started.",
            show_default="1",
            rich_help_panel=MEMORY,
        ),
    ] = None,
    shape: Annotated[
        list[str] | None,
        typer.Option(
            metavar="CONFIG",
            help="Time this shape: 1b, 3b, 8b, 70b, 405b or a config.json. Repeatable; two widths tell most. With"
            " --timings: the shape of rows that name none.",
            show_default="two made ones",
            rich_help_panel=MODELS,
        ),
    ] = None,
    batch_size: Annotated[
        str | None,
        typer.Option(metavar="A,B", help="Batch sizes.", show_default="1,4,64", rich_help_panel=MEASUREMENT),
    ] = None,
    prefill_tokens: Annotated[
        int | None,
        typer.Option(
            metavar="N",
            min=1,
            help="Tokens of all prompts of a batch together.",
            show_default="256; 8192 on a GPU",
            rich_help_panel=MEASUREMENT,
        ),
    ] = None,
    output_len: Annotated[
        int, typer.Option(metavar="N", min=2, help="Tokens to generate.", rich_help_panel=MEASUREMENT)
    ] = CalibrateOptions.output_len,
    warmup: Annotated[
        int, typer.Option(metavar="N", min=1, help="Rounds that are not counted.", rich_help_panel=MEASUREMENT)
    ] = CalibrateOptions.warmup,
    repeat: Annotated[
        int,
        typer.Option(
            metavar="N", min=1, help="Rounds that are counted. Medians are fitted.", rich_help_panel=MEASUREMENT
        ),
    ] = CalibrateOptions.repeat,
    seed: Annotated[
        int,
        typer.Option(
            metavar="N",
            min=0,
            max=MAX_SEED,
            help="Seed of prompts and of the order in each round.",
            rich_help_panel=MEASUREMENT,
        ),
    ] = CalibrateOptions.seed,
    timings: Annotated[
        list[Path] | None,
        typer.Option(
            metavar="FILE",
            help="Time nothing: fit to a bench.json, or to a .csv of any engine's timings. Repeatable.",
            rich_help_panel=DATA,
        ),
    ] = None,
    hardware: Annotated[
        str | None,
        typer.Option(
            metavar="DEVICE",
            help="A known device or a file: its peaks are kept. Required with --timings.",
            rich_help_panel=DATA,
        ),
    ] = None,
    link: Annotated[
        str | None,
        typer.Option(
            metavar="LINK",
            help="With --timings: a link whose figures are kept.",
            show_default="it is fitted",
            rich_help_panel=DATA,
        ),
    ] = None,
    engine: Annotated[
        str | None,
        typer.Option(
            metavar="NAME",
            help="With --timings of a .csv: whose they are: published, runtime or runtime-cpu.",
            show_default="the device's",
            rich_help_panel=DATA,
        ),
    ] = None,
    fit: Annotated[
        str | None,
        typer.Option(
            metavar="A,B",
            help="With --timings: the figures to fit, such as alpha_us,bus_gb_s,contention,matmul_share.",
            show_default="what the timings show",
            rich_help_panel=ADVANCED,
        ),
    ] = None,
    name: Annotated[
        str | None,
        typer.Option(
            metavar="TEXT",
            help="What the device and the link are called.",
            show_default="this machine; this link with --timings",
            rich_help_panel=OUTPUT,
        ),
    ] = None,
    backend: Backend = CalibrateOptions.backend,
    dtype: Annotated[
        Dtype,
        typer.Option(metavar="DTYPE", help="float32, bfloat16, float16, or auto: bfloat16.", rich_help_panel=MEMORY),
    ] = CalibrateOptions.dtype,
    device: Device = None,
    threads: Threads = None,
    as_json: AsJson = False,
    config: Config = None,
    print_config: PrintConfig = False,
) -> None:
    """Measure a device and a link in minutes, for plan and for bench --emulate-tp, or fit them to timings."""
    console = Console(as_json)
    given = given_options(ctx)
    if timings:
        _check_given(given, [*ONLY_TIMINGS, *FOR_BOTH], "with --timings, which times nothing")
        if hardware is None:
            raise UsageError("--timings needs --hardware: the device that the timings were made on, or a file with it")
        if shape is not None and len(shape) > 1:
            raise UsageError("--timings take one --shape: that of rows which name none")
        free = tuple(part.strip() for part in (fit or "").split(",") if part.strip())
        fitted = options_from(
            TimingsOptions,
            ctx.params,
            timings=tuple(timings),
            shape=shape[0] if shape else None,
            free=free,
        )
        with console.stage("fitting"):
            document = ladderize.calibrate(fitted, out=out)
    else:
        _check_given(given, [option for option in given if option not in ONLY_TIMINGS], "without --timings")
        lists: dict[str, Any] = {
            field: parse_counts(text, option)
            for field, option, text in (
                ("tp_sizes", "--tp-size", tp_size),
                ("batch_sizes", "--batch-size", batch_size),
            )
            if text is not None
        }
        options = options_from(CalibrateOptions, ctx.params, **lists, shapes=tuple(shape or ()), device=device or "cpu")
        options.check()
        with console.stage(LOADING):
            device = _runtime_options(device, backend, threads, max(options.tp_sizes))
        options = options_from(CalibrateOptions, ctx.params, **lists, shapes=tuple(shape or ()), device=device)
        document = ladderize.calibrate(options, out=out, console=console)
    from ladderize.planning.calibration.show import show_calibration

    console.document(document.to_dict())
    show_calibration(document, console)
    console.note(f"wrote {out}")
    if document.link is not None:
        ranks = document.link.rows[-1].ranks
        predict = command("plan", "--hardware", out, "--link", out, "--tp-size", ranks, "--shape", "8b")
        show_next(console, ("predict with it", predict))


def _check_given(given: list[str], known: list[str], when: str) -> None:
    """Raise UsageError for options that take no effect."""
    for option in given:
        if option not in known:
            raise UsageError(f"--{option.replace('_', '-')} has no effect {when}; leave it out")
