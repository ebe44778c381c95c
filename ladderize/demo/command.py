"""The command ``demo``: a sweep of the bundled model, from conversion to accuracy and speed, and its report."""

from dataclasses import dataclass
from pathlib import Path
from shlex import quote
from typing import TYPE_CHECKING

from ladderize.choices import OUTPUT, option
from ladderize.commands.shared import LOADING
from ladderize.console import Console

if TYPE_CHECKING:
    from ladderize.sweep_document import SweepDocument


@dataclass(frozen=True)
class DemoOptions:
    out: Path = option(
        "Keep everything here. The same command goes on with an earlier demo.",
        Path("ladderize-demo"),
        panel=OUTPUT,
        metavar="DIR",
    )
    quick: bool = option("Two layouts and few samples: a minute.", False, panel=OUTPUT)


def demo(options: DemoOptions, console: Console) -> None:
    """Sweep layouts of the bundled tiny Llama, from conversion to speed, and write a report."""
    with console.stage(LOADING):
        from ladderize.demo.inputs import MEASURED, as_typed, demo_folder, write_inputs
        from ladderize.report.page import check_libraries, write_report
        from ladderize.sweep.run import run_sweep
        from ladderize.sweep.show import check_stages, show_models
    check_libraries()  # not after minutes of work
    folder = demo_folder(options.out)
    yaml = write_inputs(folder, quick=options.quick)
    root, page = folder / MEASURED, folder / "report.html"
    console.note(f"$ ladderize sweep {quote(as_typed(yaml))}")
    document = run_sweep(yaml, console=console)
    _link_models(document, folder)
    console.note(f"$ ladderize report {quote(as_typed(root))} --out {quote(as_typed(page))}")
    summary = write_report([root], page, console=console)
    show_models(root, console)
    console.result(f"\nreport: {page}")
    check_stages(document, root)
    console.document({"sweep": document.to_dict(), "report": summary.to_dict()})


def _link_models(document: "SweepDocument", folder: Path) -> None:
    """Link each model of the sweep under the name of its layout and of its retraining, such as ``ladder-all-full``."""
    for point in document.points:
        if point.model is not None and not point.is_dense:
            link = folder / point.name.replace("+", "-")
            if link.is_symlink():
                link.unlink()
            if not link.exists():
                link.symlink_to(Path("sweep") / point.model, target_is_directory=True)
