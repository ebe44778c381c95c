"""Measure what the layers of a model cost, and show it."""

from dataclasses import replace

from ladderize.adapt.layers.options import SensitivityOptions
from ladderize.commands.shared import command_line, loading, start_on
from ladderize.console import Console
from ladderize.convert.sensitivity_file import cheapest_half, cost_rows, summary
from ladderize.files.regular import resolved


def sensitivity(options: SensitivityOptions, console: Console) -> None:
    """Measure what each layer of a dense model costs when its sync points are overlapped or dropped."""
    with loading(options, console):
        device = start_on(options.device)
        from ladderize.adapt.layers.sensitivity import write_sensitivity
    document = write_sensitivity(replace(options, device=device), console=console)
    console.document(document.to_dict())
    rows = cost_rows(document)
    console.table(rows, right=[*rows[0]])
    for line in summary(document):
        console.prose(line)
    console.note(f"wrote {options.out}")
    kind, changed = cheapest_half(document)
    made = f"{resolved(options.model).name}-{kind}"  # in the current folder, also for "." and hub ids
    console.result(f"next, the half that costs least: {command_line('convert', options.model, made, *changed)}")
