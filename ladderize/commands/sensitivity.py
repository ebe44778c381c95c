"""``sensitivity``."""

from dataclasses import dataclass
from pathlib import Path

from ladderize.choices import AS_JSON, THREADS, argument, option
from ladderize.commands.builder import DATA, MEASUREMENT, MEMORY, MODELS, OUTPUT, GivenOptions, command
from ladderize.commands.shared import command_line, loading, start_on
from ladderize.console import Console
from ladderize.convert.sensitivity_file import cheapest_half, cost_rows, summary
from ladderize.eval.options import SensitivityOptions
from ladderize.files.regular import resolved


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
        DATA: "data samples seq_len seed",
        OUTPUT: "out overwrite json",
        MEASUREMENT: "sync_tp_size mode align align_samples",
        MEMORY: "dtype device threads",
        MODELS: "revision",
    },
)
def sensitivity(given: GivenOptions) -> None:
    """Measure what each layer of a dense model costs when its sync points are overlapped or dropped."""
    own = given.fill(SensitivityArguments)
    console = Console(own.as_json)
    with loading(given, console):
        device = start_on(given.params["device"], own.threads)
        from ladderize.adapt.layers.sensitivity import write_sensitivity
    options = given.fill(SensitivityOptions, device=device)
    document = write_sensitivity(own.model, own.out, options, overwrite=own.overwrite, console=console)
    console.document(document.to_dict())
    console.table(rows := cost_rows(document), right=[*rows[0]])
    for line in summary(document):
        console.prose(line)
    console.note(f"wrote {own.out}")
    kind, changed = cheapest_half(document)
    made = f"{resolved(own.model).name}-{kind}"  # in the current folder, also for "." and hub ids
    console.result(f"next, the half that costs least: {command_line('convert', own.model, made, *changed)}")
