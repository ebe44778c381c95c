"""``sensitivity``."""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from ladderize.choices import AS_JSON, DRAW, THREADS, argument, option
from ladderize.commands.builder import DATA, MEASUREMENT, MEMORY, MODELS, OUTPUT, GivenOptions, command, names_of
from ladderize.commands.shared import LOADING, align_command, command_line, show_next, start_on
from ladderize.console import Console
from ladderize.convert.sensitivity_file import LADDER, POINTS, SPD, Mode, alignment_words, kind_of
from ladderize.eval.options import PointOptions, SensitivityOptions
from ladderize.files.regular import resolved
from ladderize.layout import DEFAULT_RANKS
from ladderize.ranks.environment import is_main_rank


@dataclass(frozen=True)
class SensitivityArguments:
    model: str = argument("MODEL", "A dense checkpoint: folder or hub id.")
    out: Path = option(
        "The JSON file to write. A killed run goes on when the same command is run again.", ..., metavar="FILE"
    )
    mode: Literal[Mode, "points"] = option(
        "spd, ladder: change blocks from the last one backwards, one more at a time (the paper's sweep). each,"
        " each-ladder: change one block alone. points: change each sync point alone, and the two of a layer together:"
        " what plan chooses by, and all that each and each-ladder measure.",
        SensitivityOptions.mode,
    )
    threads: int | None = option(THREADS)
    plot: Path | None = option(DRAW)
    overwrite: bool = option("Measure again, whatever --out holds.", False)
    as_json: bool = option(AS_JSON, False)


@command(
    SensitivityArguments,
    SensitivityOptions,
    PointOptions,
    panels={
        DATA: "data samples align_samples seq_len seed",
        OUTPUT: "out plot overwrite json",
        MEASUREMENT: "sync_tp_size mode pairs tau1 tau2 align",
        MEMORY: "batch_size dtype device threads",
        MODELS: "revision",
    },
)
def sensitivity(given: GivenOptions) -> None:
    """Measure how much perplexity each block costs when its sync points are dropped or overlapped.

    With --mode points: what each single sync point costs.
    """
    own = given.fill(SensitivityArguments)
    console = Console(own.as_json)
    with console.stage(LOADING):
        device = start_on(given.params["device"], own.threads)
        import ladderize.workflows.sensitivity  # noqa: F401  # which takes seconds

    of_points, of_blocks = names_of(PointOptions), names_of(SensitivityOptions) - {"mode"}
    if own.mode == POINTS:
        given.refuse(of_blocks - of_points, f"with --mode {POINTS}")
    else:
        given.refuse(of_points - of_blocks, f"without --mode {POINTS}")
    if own.plot is not None:
        from ladderize.figure import check_plot

        check_plot(own.plot)
        if not is_main_rank():
            own = replace(own, plot=None)
    if own.mode == POINTS:
        _points(own, given.fill(PointOptions, device=device), console)
    else:
        _blocks(own, given.fill(SensitivityOptions, device=device), console)


def _blocks(own: SensitivityArguments, options: SensitivityOptions, console: Console) -> None:
    from ladderize.eval.sensitivity_plot import draw_sensitivity, sensitivity_rows
    from ladderize.workflows.sensitivity import write_sensitivity

    document = write_sensitivity(own.model, own.out, options, overwrite=own.overwrite, console=console)
    console.document(document.to_dict())
    console.table(list(sensitivity_rows(document)), right=["block", "S", "perplexity"])
    console.result(f"dense perplexity {document.perplexity[-1]:.4f}")
    if document.aligned is not None:
        console.result(alignment_words(document.aligned))
    console.note(f"wrote {own.out}")
    kind = kind_of(options.mode)
    target, step = _conversion(own, kind, options.sync_tp_size)
    if own.plot is not None:
        console.note(f"wrote {' and '.join(map(str, draw_sensitivity(document, own.plot)))}")
    steps = [step]
    if options.align:
        steps.append(("align the result", align_command(target, own.model, options.data)))
    show_next(console, *steps)


def _points(own: SensitivityArguments, options: PointOptions, console: Console) -> None:
    from ladderize.eval.sensitivity_plot import dense_line, draw_points, pair_rows, point_rows
    from ladderize.workflows.sensitivity import write_points

    if options.sync_tp_size is None:
        console.note("without --sync-tp-size N nothing is dropped: overlapped sync points are measured only")
    document = write_points(own.model, own.out, options, overwrite=own.overwrite, console=console)
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
    console.note(f"wrote {own.out}")
    if own.plot is not None:
        console.note(f"wrote {' and '.join(map(str, draw_points(document, own.plot)))}")
    machine = ("--hardware", "h100-sxm", "--link", "nvlink", "--tp-size", options.sync_tp_size or DEFAULT_RANKS)
    words: list[object] = ["--max-ppl-increase", "2%", "--verify", 16, *(["--align"] if options.align else [])]
    chosen = command_line("plan", own.model, "--sensitivity", own.out, *machine, *words)
    step = _conversion(own, LADDER if options.sync_tp_size is None else SPD, options.sync_tp_size)[1]
    show_next(console, ("choose a layout by it", chosen), step)


def _conversion(own: SensitivityArguments, kind: str, ranks: int | None) -> tuple[str, tuple[str, str]]:
    """Where the result goes, and the command that selects layers by the file."""
    target = f"{resolved(own.model).name}-{kind}"  # beside where the user is, also for "." and hub ids
    more = ["--sync-tp-size", ranks] if kind == SPD else []
    words = ("--sensitivity", own.out, *more, f"--{kind}-fraction", 0.5)
    return target, ("convert with it", command_line("convert", own.model, target, f"--{kind}", "auto", *words))
