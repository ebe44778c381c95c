"""Measure a grid of layouts, or show what would be measured."""

from dataclasses import dataclass
from pathlib import Path

from ladderize.choices import OUTPUT, argument, option
from ladderize.commands.shared import LOADING, command_line
from ladderize.console import Console
from ladderize.errors import UsageError

EXAMPLE = Path(__file__).parent / "example.yaml"


@dataclass(frozen=True)
class SweepOptions:
    file: Path | None = argument("FILE", "What to measure: a YAML file; see --write-example.", None)
    out: Path | None = option(
        "Keep everything here. The same command goes on with what is there.",
        panel=OUTPUT,
        metavar="DIR",
        shown="the file's key out",
    )
    dry_run: bool = option("Show what would run. Nothing is written.", False, panel=OUTPUT)
    print_commands: bool = option(
        "Print the command of each stage, and what must be done before: for Slurm or make. Nothing is run.",
        False,
        panel=OUTPUT,
    )
    prune: bool = option("Remove outputs that FILE no longer asks for.", False, panel=OUTPUT)
    write_example: bool = option("Print an example of FILE.", False, panel=OUTPUT)


def sweep(options: SweepOptions, console: Console) -> None:
    """Measure a grid of layouts from conversion to accuracy and speed. What is complete is kept and reused."""
    file, out = options.file, options.out
    if options.write_example:
        console.result(EXAMPLE.read_text(encoding="utf-8").rstrip("\n"))
        return
    if file is None:
        raise UsageError("name the sweep's YAML file; --write-example writes one to start from")
    from ladderize.sweep.sweep_file import SWEEP_JSON, find_folder, fit_layouts

    spec, root = find_folder(file, out)  # before hours in which the file may change
    fit_layouts(spec)  # raises before seconds of imports
    with console.stage(LOADING):
        from ladderize.sweep.run import SweepRun, measure
        from ladderize.sweep.show import check_stages, plan_document, plan_script, show_models, show_stages
    run = SweepRun(spec, root, console, command_line("sweep", file, *(["--out", out] if out is not None else [])))
    if options.dry_run or options.print_commands:
        document = plan_document(run)
        console.document(document)
        if options.print_commands:
            console.result(plan_script(document))
        else:
            show_stages(document, console)
        return
    swept = measure(run, prune=options.prune)
    console.document(swept.to_dict())
    show_models(root, console)
    console.result(f"\nwrote {root / SWEEP_JSON}; `ladderize report {root} --out report.html` shows all of it")
    check_stages(swept, root)
