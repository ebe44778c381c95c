"""A sensitivity.json that a killed run goes on with."""

from pathlib import Path

from ladderize.console import SILENT, Console
from ladderize.convert.sensitivity_file import SensitivityDocument
from ladderize.errors import UserError
from ladderize.eval.options import SensitivityOptions
from ladderize.eval.sensitivity import measure_sensitivity
from ladderize.files.documents import check_writable, read_json, write_json
from ladderize.files.work import WorkFolder, work_folder
from ladderize.ranks.group import already_started


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
    if already_started():
        raise UserError("sensitivity runs in one process; start it without torchrun or accelerate launch")
    out = Path(out).expanduser()
    check_writable(out)
    with SensitivityFolder(work_folder(str(out), None), {}) as work:
        known = [path for path in (work.table, out) if path.is_file() and not overwrite]
        previous = read_json(known[0], advice="name another file, or pass --overwrite") if known else None
        if previous is not None and known[0] == out and previous.get("complete") is True:
            console.note(
                f"{out} is complete, so nothing was measured (--overwrite measures again); classes are those of"
                " --tau1 and --tau2"
            )
        document = measure_sensitivity(
            model, options, console=console, previous=previous, save=lambda content: write_json(work.table, content)
        )
        write_json(out, document.to_dict())
        work.remove()
    return document
