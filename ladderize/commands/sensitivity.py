"""``sensitivity``."""

from dataclasses import dataclass
from pathlib import Path

from ladderize.choices import AS_JSON, THREADS, argument, option
from ladderize.commands.builder import DATA, MEASUREMENT, MEMORY, MODELS, OUTPUT, GivenOptions, command
from ladderize.commands.shared import LOADING, start_on
from ladderize.console import Console
from ladderize.convert.sensitivity_file import alignment_words, ascending_lines, cost_rows, dense_line
from ladderize.eval.options import SensitivityOptions


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
    with console.stage(LOADING):
        device = start_on(given.params["device"], own.threads)
        from ladderize.adapt.layers.sensitivity import write_sensitivity
    options = given.fill(SensitivityOptions, device=device)
    document = write_sensitivity(own.model, own.out, options, overwrite=own.overwrite, console=console)
    console.document(document.to_dict())
    console.table(rows := cost_rows(document), right=[*rows[0]])
    console.result(dense_line(document))
    for line in ascending_lines(document):
        console.prose(line)
    if document.aligned is not None:
        console.result(alignment_words(document.aligned))
    console.note(f"wrote {own.out}")
