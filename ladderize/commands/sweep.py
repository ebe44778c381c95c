"""``sweep``."""

from pathlib import Path
from typing import Annotated

import typer

import ladderize
from ladderize.commands.next_steps import command, show_next
from ladderize.commands.options import LOADING, OUTPUT, AsJson
from ladderize.console import Console
from ladderize.errors import UsageError, UserError
from ladderize.tradeoff.sweep.example import EXAMPLE


def sweep(
    file: Annotated[
        Path | None, typer.Argument(metavar="FILE", help="What to measure: a YAML file; see --write-example.")
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option(
            metavar="DIR",
            help="Keep everything here. The same command goes on with what is there.",
            show_default="the file's key out",
            rich_help_panel=OUTPUT,
        ),
    ] = None,
    dry_run: Annotated[
        bool,
        typer.Option(
            "--dry-run", help="Show what would run, about how long, and how much disk it takes.", rich_help_panel=OUTPUT
        ),
    ] = False,
    jobs: Annotated[
        int,
        typer.Option(
            metavar="N", min=1, help="Stages that run side by side, with the cores shared out. Never a benchmark."
        ),
    ] = 1,
    prune: Annotated[
        bool,
        typer.Option("--prune", help="Remove outputs that FILE no longer asks for.", rich_help_panel=OUTPUT),
    ] = False,
    write_example: Annotated[
        bool,
        typer.Option("--write-example", help="Write an example to FILE, or print it.", rich_help_panel=OUTPUT),
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Measure a grid of layouts from conversion to accuracy and speed. What is complete is kept and reused."""
    console = Console(as_json)
    if write_example:
        _write_example(file, console)
        return
    if file is None:
        raise UsageError("name the sweep's YAML file; --write-example writes one to start from")
    from ladderize.files.yaml12 import read_yaml

    read_yaml(file)  # what is no YAML is found before seconds of imports
    with console.stage(LOADING):
        from ladderize.tradeoff.sweep.run import plan_sweep, sweep_folder
        from ladderize.tradeoff.sweep.summary import TEXT_COLUMNS, sweep_rows
    if dry_run:
        planned = plan_sweep(file, out, console=console)
        console.document(planned.to_dict())
        for note in planned.notes:
            console.note(f"Note: {note}")
        console.table(planned.rows, right=["time", "disk"])
        console.result(f"\n{planned.total}")
        return
    root = sweep_folder(file, out)  # before hours in which the file may change
    document = ladderize.sweep(file, out, jobs=jobs, prune=prune, console=console)
    console.document(document.to_dict())
    rows = sweep_rows(document, root)
    console.result("")
    console.table(rows, right=[key for key in rows[0] if key not in TEXT_COLUMNS])
    console.result(f"\nwrote {root / 'sweep.json'}")
    show_next(console, ("see the trade-off", command("report", root, "--out", "report.html")))
    if failed := document.failed:
        first = failed[0]
        raise UserError(
            f"{len(failed)} stage{'s' if len(failed) > 1 else ''} failed, the first with: {first.message} (log"
            f" {root / first.output / 'log.txt'}); mend it and run the same command again"
        )


def _write_example(file: Path | None, console: Console) -> None:
    if file is None:
        console.result(EXAMPLE.rstrip("\n"))
        return
    if file.exists():
        raise UserError(f"{file} exists; name another file for the example")
    file.write_text(EXAMPLE, encoding="utf-8")
    console.note(f"wrote {file}")
    show_next(
        console,
        ("make the model that it names", command("demo", "--quick", "--out", "demo")),
        ("see what it takes", command("sweep", file, "--dry-run")),
        ("run it", command("sweep", file)),
    )
