"""The command ``sweep``."""

from dataclasses import dataclass
from pathlib import Path

from ladderize.choices import AS_JSON, argument, option
from ladderize.commands.builder import OUTPUT, GivenOptions, command
from ladderize.commands.shared import LOADING
from ladderize.console import Console
from ladderize.errors import UsageError

EXAMPLE = Path(__file__).parent / "example.yaml"


@dataclass(frozen=True)
class SweepArguments:
    file: Path | None = argument("FILE", "What to measure: a YAML file; see --write-example.", None)
    out: Path | None = option(
        "Keep everything here. The same command goes on with what is there.", metavar="DIR", shown="the file's key out"
    )
    dry_run: bool = option("Show what would run. Nothing is written.", False)
    print_commands: bool = option(
        "Print the command of each stage, and what must be done before: for Slurm or make. Nothing is run.", False
    )
    prune: bool = option("Remove outputs that FILE no longer asks for.", False)
    write_example: bool = option("Print an example of FILE.", False)
    as_json: bool = option(AS_JSON, False)


@command(SweepArguments, panels={OUTPUT: "out dry_run print_commands prune write_example json"}, configurable=False)
def sweep_command(given: GivenOptions) -> None:
    """Measure a grid of layouts from conversion to accuracy and speed. What is complete is kept and reused."""
    arguments = given.fill(SweepArguments)
    file, out, console = arguments.file, arguments.out, Console(arguments.as_json)
    if arguments.write_example:
        console.result(EXAMPLE.read_text(encoding="utf-8").rstrip("\n"))
        return
    if file is None:
        raise UsageError("name the sweep's YAML file; --write-example writes one to start from")
    from ladderize.sweep.sweep_file import SWEEP_JSON, find_folder, fit_layouts

    spec, root = find_folder(file, out)  # before hours in which the file may change
    fit_layouts(spec)  # raises before seconds of imports
    with console.stage(LOADING):
        from ladderize.sweep.run import plan_sweep, run_sweep
        from ladderize.sweep.show import check_stages, plan_document, plan_script, show_models, show_stages
    if arguments.dry_run or arguments.print_commands:
        plan, _ = plan_sweep(file, out, console=console)
        document = plan_document(plan, root)
        console.document(document)
        if arguments.print_commands:
            console.result(plan_script(plan, root))
        else:
            show_stages(document, console)
        return
    swept = run_sweep(file, out, prune=arguments.prune, console=console)
    console.document(swept.to_dict())
    show_models(root, console)
    console.result(f"\nwrote {root / SWEEP_JSON}; `ladderize report {root} --out report.html` shows all of it")
    check_stages(swept, root)
