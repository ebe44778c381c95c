"""The command ``demo``: a sweep of the bundled model on texts of its language, and its report."""

import json
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from shlex import quote
from string import Template
from typing import TYPE_CHECKING

from ladderize.choices import OUTPUT, option
from ladderize.commands.shared import LOADING
from ladderize.console import Console
from ladderize.demo.corpus import GENRE_WEIGHTS, REPAIR_WEIGHTS, documents
from ladderize.errors import UserError
from ladderize.files.output import replacement
from ladderize.files.regular import resolved

if TYPE_CHECKING:
    from ladderize.sweep_document import SweepDocument

HERE = Path(__file__).parent
MODEL, TASKS = HERE / "model", HERE / "tasks"
DEMO_YAML, MEASURED = "sweep.yaml", "sweep"
TRAIN_DOCUMENTS, HELDOUT_DOCUMENTS = 12_000, 200  # about 20 tokens each
DEMO_MARK = b"# ladderize demo"  # the begin of a sweep.yaml of the demo


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


def write_documents(
    path: Path, count: int, *, test: bool, seed: int, weights: Mapping[str, int] = GENRE_WEIGHTS
) -> Path:
    with replacement(path) as file:
        texts = documents(count, test=test, seed=seed, weights=weights)
        file.writelines(json.dumps({"text": text}) + "\n" for text in texts)
    return path


def demo_folder(path: Path) -> Path:
    """Return ``path``, which is made if it is not there, and may hold nothing but an earlier demo."""
    folder = resolved(path, "--out ")
    yaml = folder / DEMO_YAML
    is_demo = yaml.is_file() and yaml.read_bytes().startswith(DEMO_MARK)
    if folder.exists() and (not folder.is_dir() or (any(folder.iterdir()) and not is_demo)):
        raise UserError(f"--out {path} is not an empty folder, nor one of an earlier demo; choose another")
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def as_typed(path: Path) -> str:
    """Return a path as a user types it: relative to the current folder if it lies below that."""
    here = Path.cwd()
    return str(path.relative_to(here) if path.is_relative_to(here) else path)


def write_inputs(folder: Path, *, quick: bool) -> Path:
    """Write the sweep.yaml into the folder, and the files that it names if they are missing; return its path."""
    template = (HERE / ("quick.yaml" if quick else DEMO_YAML)).read_text(encoding="utf-8")
    dense, train, heldout = (folder / name for name in ("dense", "train.jsonl", "heldout.jsonl"))
    named = {"dense": dense, "sweep": folder / MEASURED, "train": train, "heldout": heldout}
    values = {name: json.dumps(as_typed(path)) for name, path in named.items()}
    yaml = folder / DEMO_YAML
    with replacement(yaml) as file:  # first, so that the folder of a killed demo is known as a demo's
        file.write(Template(template).substitute(values, tasks=json.dumps(str(TASKS))))
    if not dense.exists():
        copy = folder / ".dense.unfinished"
        shutil.rmtree(copy, ignore_errors=True)
        shutil.copytree(MODEL, copy).rename(dense)
    if not train.exists():
        write_documents(train, TRAIN_DOCUMENTS, test=False, seed=11, weights=REPAIR_WEIGHTS)
    if not heldout.exists():
        write_documents(heldout, HELDOUT_DOCUMENTS, test=True, seed=1)
    return yaml
