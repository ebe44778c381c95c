"""A sensitivity.json that a killed run goes on with."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar

from ladderize.console import SILENT, Console
from ladderize.convert.point_sensitivity import PointSensitivity
from ladderize.convert.sensitivity_file import SensitivityDocument
from ladderize.errors import UserError
from ladderize.eval.options import PointOptions, SensitivityOptions
from ladderize.files.documents import check_writable, read_json, write_json
from ladderize.files.work import WorkFolder, work_folder
from ladderize.ranks.group import already_started
from ladderize.workflows.sensitivity import Save, measure_points, measure_sensitivity


class SensitivityFolder(WorkFolder):
    """The table of a ``ladderize sensitivity`` while it grows, beside the file that it becomes."""

    TABLE = "table.json"
    CONTENT = (*WorkFolder.CONTENT, TABLE)
    OPTION = "--out"

    @property
    def table(self) -> Path:
        return self.folder / self.TABLE


def write_sensitivity(
    model: str | Path,
    out: str | Path,
    options: SensitivityOptions,
    *,
    overwrite: bool = False,
    console: Console = SILENT,
) -> SensitivityDocument:
    """Measure the sensitivity of each block and write the JSON file ``out``, going on where a killed run was.

    model: a dense checkpoint, folder or hub id. overwrite: measure again, whatever ``out`` holds. Raises UserError,
    also for a file that measures something else.
    """

    def measure(previous: Mapping[str, Any] | None, save: Save) -> SensitivityDocument:
        return measure_sensitivity(model, options, console=console, previous=previous, save=save)

    return _written(measure, Path(out), overwrite, "; classes are those of --tau1 and --tau2", console)


def write_points(
    model: str | Path,
    out: str | Path,
    options: PointOptions,
    *,
    overwrite: bool = False,
    console: Console = SILENT,
) -> PointSensitivity:
    """Measure what single sync points cost and write the JSON file ``out``; the rest as in ``write_sensitivity``."""

    def measure(previous: Mapping[str, Any] | None, save: Save) -> PointSensitivity:
        return measure_points(model, options, console=console, previous=previous, save=save)

    return _written(measure, Path(out), overwrite, "", console)


Measured = TypeVar("Measured", SensitivityDocument, PointSensitivity)


def _written(
    measure: Callable[[Mapping[str, Any] | None, Save], Measured],
    out: Path,
    overwrite: bool,
    remark: str,
    console: Console,
) -> Measured:
    """What ``measure`` makes of an earlier content of the file, or of the work beside it. remark: about a file that is
    complete."""
    if already_started():
        raise UserError("sensitivity runs in one process; start it without torchrun or accelerate launch")
    out = out.expanduser()
    check_writable(out)
    with SensitivityFolder(work_folder(str(out), None), {}) as work:
        known = [path for path in (work.table, out) if path.is_file() and not overwrite]
        previous = read_json(known[0], advice="name another file, or pass --overwrite") if known else None
        if previous is not None and known[0] == out and previous.get("complete") is True:
            console.note(f"{out} is complete, so nothing was measured (--overwrite measures again){remark}")
        document = measure(previous, lambda content: write_json(work.table, content))
        write_json(out, document.to_dict())
        work.remove()
    return document
