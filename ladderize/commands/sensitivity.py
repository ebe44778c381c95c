"""``sensitivity``."""

from pathlib import Path
from typing import Annotated, Literal

import typer

from ladderize.commands.config_file import Config, PrintConfig
from ladderize.commands.next_steps import align_command, command, show_next
from ladderize.commands.options import (
    DATA,
    LOADING,
    MAX_SEED,
    MEASUREMENT,
    MEMORY,
    OUTPUT,
    AsJson,
    Data,
    Device,
    DtypeOption,
    Revision,
    SeqLen,
    Tau1,
    Tau2,
    Threads,
    compute_options,
    given_options,
    names_of,
    options_from,
)
from ladderize.console import Console
from ladderize.convert.sensitivity_file import POINTS, Mode, alignment_words, kind_of
from ladderize.errors import UsageError
from ladderize.eval.options import PointOptions, SensitivityOptions
from ladderize.files.regular import resolved
from ladderize.layout import DEFAULT_RANKS


def sensitivity(
    ctx: typer.Context,
    model: Annotated[str, typer.Argument(metavar="MODEL", help="A dense checkpoint: folder or hub id.")],
    data: Data,
    out: Annotated[
        Path,
        typer.Option(
            metavar="FILE",
            help="The JSON file to write. A killed run goes on when the same command is run again.",
            rich_help_panel=OUTPUT,
        ),
    ],
    sync_tp_size: Annotated[
        int | None,
        typer.Option(
            metavar="N",
            min=1,
            help="TP size to drop sync points for (virtual ranks). Mode points: without it nothing is dropped.",
            rich_help_panel=MEASUREMENT,
        ),
    ] = None,
    mode: Annotated[
        Literal[Mode, "points"],
        typer.Option(
            help=(
                "spd, ladder: change blocks from the last one backwards, one more at a time (the paper's sweep). each,"
                " each-ladder: change one block alone. points: change each sync point alone, and the two of a layer"
                " together; costs are in nats per token, for ladderize plan."
            ),
            rich_help_panel=MEASUREMENT,
        ),
    ] = SensitivityOptions.mode,
    pairs: Annotated[
        bool,
        typer.Option(
            "--pairs",
            help="Mode points: also change two neighbouring layers together, in each way. About six times the work.",
            rich_help_panel=MEASUREMENT,
        ),
    ] = False,
    tau1: Tau1 = None,
    tau2: Tau2 = SensitivityOptions.tau2,
    align: Annotated[
        bool,
        typer.Option(
            "--align",
            help=(
                "Measure each changed model as `adapt --method align` leaves it, on further windows of the data. In all"
                " modes; much more work."
            ),
            rich_help_panel=MEASUREMENT,
        ),
    ] = False,
    samples: Annotated[
        int,
        typer.Option(
            metavar="N",
            min=1,
            help="Windows to score, drawn from the data; all if there are fewer.",
            rich_help_panel=DATA,
        ),
    ] = SensitivityOptions.samples,
    align_samples: Annotated[
        int | None,
        typer.Option(
            metavar="N",
            min=1,
            help="With --align: windows to align on, none of which is scored; an eighth as many are held out.",
            show_default="16384 tokens; more for wide models",
            rich_help_panel=DATA,
        ),
    ] = None,
    seq_len: SeqLen = None,
    seed: Annotated[
        int,
        typer.Option(
            metavar="N", min=0, max=MAX_SEED, help="Seed of the windows that are drawn.", rich_help_panel=DATA
        ),
    ] = SensitivityOptions.seed,
    batch_size: Annotated[
        int | None,
        typer.Option(
            metavar="N", min=1, help="Windows per forward pass.", show_default="4096 tokens", rich_help_panel=MEMORY
        ),
    ] = None,
    dtype: DtypeOption = SensitivityOptions.dtype,
    device: Device = None,
    threads: Threads = None,
    plot: Annotated[
        Path | None, typer.Option(metavar="STEM", help="Draw STEM.png and STEM.svg.", rich_help_panel=OUTPUT)
    ] = None,
    overwrite: Annotated[
        bool, typer.Option("--overwrite", help="Measure again, whatever --out holds.", rich_help_panel=OUTPUT)
    ] = False,
    revision: Revision = None,
    as_json: AsJson = False,
    config: Config = None,
    print_config: PrintConfig = False,
) -> None:
    """Measure how much perplexity each block costs when its sync points are dropped or overlapped.

    With --mode points: what each single sync point costs.
    """
    console = Console(as_json)
    with console.stage(LOADING):
        device = compute_options(device, threads)
        import ladderize.workflows.sensitivity_run  # noqa: F401  # which takes seconds
        from ladderize.ranks.threads import set_threads

    _check_effect(ctx, mode)
    set_threads(threads, 1)
    if plot is not None:
        from ladderize.figure import check_plot

        check_plot(plot)
    if mode == POINTS:
        _points(model, out, options_from(PointOptions, ctx.params, device=device), plot, overwrite, console)
    else:
        _blocks(model, out, options_from(SensitivityOptions, ctx.params, device=device), plot, overwrite, console)


def _check_effect(ctx: typer.Context, mode: str) -> None:
    """Raise UsageError for options that say something of another mode only."""
    of_points, of_blocks = names_of(PointOptions), names_of(SensitivityOptions) - {"mode"}
    idle, when = (of_blocks - of_points, "with") if mode == POINTS else (of_points - of_blocks, "without")
    for name in given_options(ctx):
        if name in idle:
            raise UsageError(f"--{name.replace('_', '-')} has no effect {when} --mode {POINTS}")


def _blocks(
    model: str, out: Path, options: SensitivityOptions, plot: Path | None, overwrite: bool, console: Console
) -> None:
    from ladderize.eval.sensitivity import sensitivity_rows
    from ladderize.workflows.sensitivity_run import write_sensitivity

    document = write_sensitivity(model, out, options, overwrite=overwrite, console=console)
    console.document(document.to_dict())
    console.table(list(sensitivity_rows(document)), right=["block", "S", "perplexity"])
    console.result(f"dense perplexity {document.perplexity[-1]:.4f}")
    if document.aligned is not None:
        console.result(alignment_words(document.aligned))
    console.note(f"wrote {out}")
    kind = kind_of(options.mode)
    more = [] if kind == "ladder" else ["--sync-tp-size", str(options.sync_tp_size)]
    target = f"{resolved(model).name}-{kind}"  # beside where the user is, also for "." and hub ids
    auto = command("convert", model, target, f"--{kind}", "auto", "--sensitivity", out, *more)
    if plot is not None:
        from ladderize.eval.sensitivity_plot import draw_sensitivity

        console.note(f"wrote {' and '.join(map(str, draw_sensitivity(document, plot)))}")
    steps = [("convert with it", f"{auto} --{kind}-fraction 0.5")]
    if options.align:
        steps.append(("align the result", align_command(target, model, options.data)))
    show_next(console, *steps)


def _points(model: str, out: Path, options: PointOptions, plot: Path | None, overwrite: bool, console: Console) -> None:
    from ladderize.eval.points_shown import dense_line, draw_points, pair_rows, point_rows
    from ladderize.workflows.sensitivity_run import write_points

    if options.sync_tp_size is None:
        console.note("without --sync-tp-size N nothing is dropped: overlapped sync points are measured only")
    document = write_points(model, out, options, overwrite=overwrite, console=console)
    console.document(document.to_dict())
    console.table(rows := list(point_rows(document)), right=list(rows[0]))
    if pairs := list(pair_rows(document)):
        console.result(
            "\nneighbours changed alike: the cost of both (and how much of it is beyond the sum of each alone)\n"
        )
        console.table(pairs, right=list(pairs[0]))
    console.result("")
    console.result(dense_line(document))
    if document.aligned is not None:
        console.result(alignment_words(document.aligned))
    console.note(f"wrote {out}")
    if plot is not None:
        console.note(f"wrote {' and '.join(map(str, draw_points(document, plot)))}")
    machine = ("--hardware", "h100-sxm", "--link", "nvlink", "--tp-size", options.sync_tp_size or DEFAULT_RANKS)
    words: list[object] = ["--max-ppl-increase", "2%", "--verify", 16, *(["--align"] if options.align else [])]
    chosen = command("plan", model, "--sensitivity", out, *machine, *words)
    show_next(console, ("choose a layout by it", chosen))
