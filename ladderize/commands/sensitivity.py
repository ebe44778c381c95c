"""``sensitivity``."""

from dataclasses import dataclass
from pathlib import Path

from ladderize.choices import AS_JSON, THREADS, argument, option
from ladderize.commands.builder import DATA, MEASUREMENT, MEMORY, MODELS, OUTPUT, GivenOptions, command
from ladderize.commands.shared import LOADING, align_command, command_line, show_next, start_on
from ladderize.console import Console
from ladderize.convert.sensitivity_file import LADDER, SPD, alignment_words, cost_rows, dense_line
from ladderize.eval.options import SensitivityOptions
from ladderize.files.regular import resolved
from ladderize.layout import DEFAULT_RANKS


@dataclass(frozen=True)
class SensitivityArguments:
    model: str = argument("MODEL", "A dense checkpoint: folder or hub id.")
    out: Path = option("The JSON file to write.", ..., metavar="FILE")
    threads: int | None = option(THREADS)
    overwrite: bool = option("Replace what --out names.", False)
    as_json: bool = option(AS_JSON, False)


@command(
    SensitivityArguments,
    SensitivityOptions,
    panels={
        DATA: "data samples align_samples seq_len seed",
        OUTPUT: "out overwrite json",
        MEASUREMENT: "sync_tp_size mode tau1 tau2 align",
        MEMORY: "batch_size dtype device threads",
        MODELS: "revision",
    },
)
def sensitivity(given: GivenOptions) -> None:
    """Measure what each layer of a dense model costs when its sync points are overlapped or dropped."""
    own = given.fill(SensitivityArguments)
    console = Console(own.as_json)
    with console.stage(LOADING):
        device = start_on(given.params["device"], own.threads)
        from ladderize.adapt.layers.sensitivity import write_sensitivity
    options = given.fill(SensitivityOptions, device=device)
    document = write_sensitivity(own.model, own.out, options, overwrite=own.overwrite, console=console)
    console.document(document.to_dict())
    console.table(rows := cost_rows(document), right=[name for name in rows[0] if name != "class"])
    console.result(dense_line(document))
    if document.aligned is not None:
        console.result(alignment_words(document.aligned))
    console.note(f"wrote {own.out}")
    ranks = options.sync_tp_size
    kind = LADDER if ranks is None else SPD
    target = f"{resolved(own.model).name}-{kind}"  # in the current folder, also for "." and hub ids
    words = ("--sensitivity", own.out, *(() if ranks is None else ("--sync-tp-size", ranks)), f"--{kind}-fraction", 0.5)
    steps = [("convert with it", command_line("convert", own.model, target, f"--{kind}", "auto", *words))]
    if options.mode == "layers":
        machine = ("--hardware", "h100-sxm", "--link", "nvlink", "--tp-size", ranks or DEFAULT_RANKS)
        goal: list[object] = ["--max-ppl-increase", "2%", "--verify", 16, *(["--align"] if options.align else [])]
        plan = command_line("plan", own.model, "--sensitivity", own.out, *machine, *goal)
        steps.insert(0, ("choose a layout by it", plan))
    elif options.align:
        steps.append(("align the result", align_command(target, own.model, options.data)))
    show_next(console, *steps)
