"""The command ``ladderize demo``: a sweep of the bundled model, from conversion to accuracy and speed, and its
report."""

import webbrowser
from dataclasses import replace
from pathlib import Path
from shlex import quote
from typing import Any

from ladderize.console import Console
from ladderize.demo.inputs import MEASURED, as_typed, demo_folder, write_inputs
from ladderize.errors import UserError
from ladderize.files.documents import read_document
from ladderize.report.page import check_libraries, write_report
from ladderize.runtime.bench.document import BenchDocument
from ladderize.runtime.bench.report import show_bench
from ladderize.sweep.run import run_sweep
from ladderize.sweep.show import show_models
from ladderize.sweep_document import SweepDocument

REPORT = "report.html"


def run_demo(out: Path, *, quick: bool, open_page: bool, console: Console) -> dict[str, Any]:
    """Measure the demo's layouts, write the report and print both; return the sweep's document and the report's.

    out: the folder for everything; an earlier demo in it goes on.
    open_page: show the report in a browser.

    Raises UserError if a stage of the sweep failed; the report is written before.
    """
    check_libraries()  # not after minutes of work
    folder = demo_folder(out)
    yaml = write_inputs(folder, quick=quick)
    root, page = folder / MEASURED, folder / REPORT
    console.note(f"$ ladderize sweep {quote(as_typed(yaml))}")
    document = run_sweep(yaml, console=console)
    _link_models(document, folder)
    for name in document.benches:
        bench = BenchDocument.from_dict(read_document(root / name, "benchmark"), root / name)
        console.result("")
        show_bench(_with_names(bench, document), console)
    console.note(f"$ ladderize report {quote(as_typed(root))} --out {quote(as_typed(page))}")
    summary = write_report([root], page, console=console)
    show_models(root, console)
    console.result(f"\nreport: {page}")
    if open_page and not webbrowser.open(page.as_uri()):
        console.note(f"no browser could be started; open {page} yourself")
    if document.failed:
        first = document.failed[0]
        log = f"; its log is in {root / first.output}" if first.output else ""
        raise UserError(
            f"{len(document.failed)} stages of the demo failed, the first with: {first.message}{log}; the same command"
            " tries again"
        )
    return {"sweep": document.to_dict(), "report": summary.to_dict()}


def _with_names(bench: BenchDocument, document: SweepDocument) -> BenchDocument:
    """Return the benchmark with the layouts' names instead of the folders of their models."""
    names = {point.timed: point.name.partition(",")[0] for point in reversed(document.points)}
    rows = [replace(row, model=names.get(row.model, row.model)) for row in bench.rows]
    return replace(bench, rows=rows, checks={names.get(model, model): check for model, check in bench.checks.items()})


def _link_models(document: SweepDocument, folder: Path) -> None:
    """Link each model of the sweep under the name of its layout and of its retraining, such as ``ladder-all-full``."""
    for point in document.points:
        if point.model is None or point.is_dense:
            continue
        link = folder / "-".join([point.name.partition(",")[0], *point.methods])
        if link.is_symlink():
            link.unlink()
        if not link.exists():
            link.symlink_to(Path(MEASURED) / point.model, target_is_directory=True)
