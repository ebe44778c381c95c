"""A folder that holds what a run has finished so far, so that a killed one goes on."""

import fcntl
import json
import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any

from ladderize.console import UserError
from ladderize.convert.checkpoint import Checkpoint
from ladderize.files.documents import read_own, write_json

ABOUT = "run.json"


class WorkFolder:
    """A locked folder of ``CONTENT``, and what the run that fills it is about.

    Used as a context. Of several processes ``main`` makes, locks and removes the folder. Raises UserError if it holds
    somebody's files, the work of a run on something else (``identity``), or is in use.
    """

    CONTENT: tuple[str, ...] = (ABOUT, ".*.json.*")  # names of what may lie here
    ADVICE = "delete it"

    def __init__(self, folder: Path, identity: Mapping[str, Any], *, main: bool = True) -> None:
        self.folder = folder
        self.lock: int | None = None
        if main:
            try:
                self._open(json.loads(json.dumps(identity)))
            except BaseException:
                self._unlock()
                raise

    def _open(self, identity: Mapping[str, Any]) -> None:
        folder, path = self.folder, self.folder / ABOUT
        if folder.exists() and (not folder.is_dir() or not self._only_ours()):
            raise UserError(f"{folder} is no folder of unfinished work, and not empty; choose another --work-dir")
        made = not folder.exists()
        folder.mkdir(parents=True, exist_ok=True)
        self.lock = os.open(folder, os.O_RDONLY)
        try:
            fcntl.flock(self.lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise UserError(f"another run is at work in {folder}; wait for it, or choose another --work-dir") from None
        found = read_own(path)
        different = " and ".join(sorted(key for key in identity if found.get(key) != identity[key]))
        if found and different:
            raise UserError(
                f"{folder} holds unfinished work of a run with another {different}; {self.ADVICE}, or choose another"
                " --work-dir"
            )
        if not found:
            write_json(path, {**identity, "made_folder": made})

    def has_work(self) -> bool:
        """Whether anything lies here that a run could go on from."""
        return any(entry.name != ABOUT for entry in self.folder.iterdir())

    def _only_ours(self) -> bool:
        """Whether nothing but ``CONTENT`` lies here, beside the record that says so: names alone may be somebody
        else's."""
        entries = list(self.folder.iterdir())
        known = (self.folder / ABOUT).is_file() or all(entry.match(f".{ABOUT}.*") for entry in entries)
        return known and all(any(entry.match(pattern) for pattern in self.CONTENT) for entry in entries)

    def __enter__(self) -> "WorkFolder":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self.lock is not None and error is not None and self.folder.is_dir() and not self.has_work():
            self.remove()  # nothing was done that would be missed
        self._unlock()

    def _unlock(self) -> None:
        if self.lock is not None:
            os.close(self.lock)
            self.lock = None

    def remove(self) -> None:
        """Delete what was written here, and the folder if it was made for it and nothing else is in it."""
        made = read_own(self.folder / ABOUT).get("made_folder")
        for pattern in self.CONTENT:
            for path in self.folder.glob(pattern):
                shutil.rmtree(path) if path.is_dir() else path.unlink()
        if made and not any(self.folder.iterdir()):
            self.folder.rmdir()


def work_folder(out: str, work_dir: Path | None, *sources: Checkpoint) -> Path:
    """Where unfinished work lies: beside OUT, unless it was said. Raises UserError for a place that is somebody's."""
    target = Path(out).expanduser().resolve()
    if work_dir is None:
        return target.with_name(f"{target.name}.ladderize-work")
    folder = work_dir.expanduser().resolve()
    for other in (target, *(source.folder.resolve() for source in sources)):
        if folder == other or folder in other.parents or other in folder.parents:
            raise UserError(f"--work-dir {folder} is, contains or lies inside {other}; choose a folder of its own")
    return folder
