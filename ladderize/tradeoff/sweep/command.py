"""The command ``sweep``."""

import os
import shutil
from dataclasses import dataclass
from pathlib import Path

import ladderize
from ladderize.choices import AS_JSON, argument, option
from ladderize.commands.builder import OUTPUT, PLAIN_OPTIONS, GivenOptions, command
from ladderize.commands.shared import LOADING, command_line, show_next
from ladderize.console import Console
from ladderize.errors import UsageError, UserError
from ladderize.ranks.environment import is_main_rank

EXAMPLE = Path(__file__).parent / "example.yaml"


@dataclass(frozen=True)
class SweepArguments:
    file: Path | None = argument("FILE", "What to measure: a YAML file; see --write-example.", None)
    out: Path | None = option(
        "Keep everything here. The same command goes on with what is there.", metavar="DIR", shown="the file's key out"
    )
    dry_run: bool = option("Show what would run, about how long, and how much disk it takes.", False)
    print_commands: bool = option(
        "Print the command of each stage, and what must be done before: for who schedules them. Nothing is run.", False
    )
    jobs: int | None = option(
        "Stages that run side by side, with GPUs and cores of their own. Never a benchmark.",
        min=1,
        shown="the GPUs of this machine, else 1",
    )
    prune: bool = option("Remove outputs that FILE no longer asks for.", False)
    write_example: bool = option("Write an example to FILE, or print it.", False)
    as_json: bool = option(AS_JSON, False)


@command(
    SweepArguments,
    panels={PLAIN_OPTIONS: "jobs", OUTPUT: "out dry_run print_commands prune write_example json"},
    configurable=False,
)
def sweep_command(given: GivenOptions) -> None:
    """Measure a grid of layouts from conversion to accuracy and speed. What is complete is kept and reused."""
    from ladderize.tradeoff.sweep.meeting import set_by_srun

    own = given.fill(SweepArguments)
    os.environ.update(set_by_srun())  # who prints is known before anything is said
    if not is_main_rank():  # of a process 0 that is gone torch's C++ would say much before we do
        os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    file, out, console = own.file, own.out, Console(own.as_json)
    if own.write_example:
        _write_example(file, console)
        return
    if file is None:
        raise UsageError("name the sweep's YAML file; --write-example writes one to start from")
    from ladderize.files.parsing import read_yaml

    read_yaml(file)  # what is no YAML is found before seconds of imports
    with console.stage(LOADING):
        from ladderize.report.answer import answer_of
        from ladderize.tradeoff.sweep.run import plan_sweep, sweep_folder
        from ladderize.tradeoff.sweep.shown import show_points
    if own.dry_run or own.print_commands:
        if not is_main_rank():
            return
        planned = plan_sweep(file, out, console=console)
        console.document(planned.to_dict())
        if own.print_commands:
            console.result(planned.script)
            return
        for note in planned.notes:
            console.note(f"Note: {note}")
        console.table(planned.rows, right=["time", "disk"])
        console.result(f"\n{planned.total}")
        return
    root = sweep_folder(file, out)  # before hours in which the file may change
    document = ladderize.sweep(file, out, jobs=own.jobs, prune=own.prune, console=console)
    if not is_main_rank():
        return
    console.document(document.to_dict())
    show_points(document, root, console)
    console.result("")
    console.prose(answer_of(root).headline)
    console.result(f"\nwrote {root / 'sweep.json'}")
    show_next(console, ("see the trade-off", command_line("report", root, "--out", "report.html")))
    if failed := document.failed:
        first = failed[0]
        raise UserError(
            f"{len(failed)} stage{'s' if len(failed) > 1 else ''} failed, the first with: {first.message} (log"
            f" {root / first.output / 'log.txt'}); mend it and run the same command again"
        )


def _write_example(file: Path | None, console: Console) -> None:
    if file is None:
        console.result(EXAMPLE.read_text(encoding="utf-8").rstrip("\n"))
        return
    if file.exists():
        raise UserError(f"{file} exists; name another file for the example")
    shutil.copyfile(EXAMPLE, file)
    console.note(f"wrote {file}")
    show_next(
        console,
        ("make the model that it names", command_line("demo", "--quick", "--out", "demo")),
        ("see what it takes", command_line("sweep", file, "--dry-run")),
        ("run it", command_line("sweep", file)),
    )
