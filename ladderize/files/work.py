"""Work folders, which hold the finished part of a run, so that a killed one resumes."""

import contextlib
import hashlib
import json
import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, TypeVar

from ladderize.console import SILENT, Console
from ladderize.errors import UserError
from ladderize.files.documents import read_own, write_json
from ladderize.files.regular import resolved
from ladderize.files.temporaries import lock_folder

ABOUT = "run.json"
SUFFIX = ".ladderize-work"  # of the folder beside OUT
RUN = "run_sha256"  # the key of a document with the digest of the run that wrote it
Folder = TypeVar("Folder", bound="WorkFolder")


class WorkFolder:
    """A locked folder of unfinished work, with a record (``ABOUT``) of the run that fills it. Used as a context.

    identity: what must be equal for a run to resume.
    main: of several processes the one that makes, locks and removes the folder.
    Raises UserError if the folder holds other files, work with another ``identity``, or is in use.
    """

    COMMAND: str  # the command of ladderize that makes such work

    def __init__(
        self, folder: Path, identity: Mapping[str, Any], *, main: bool = True, console: Console = SILENT
    ) -> None:
        self.folder, self.console = folder, console
        self.lock: int | None = None
        if main:
            try:
                self._open({**json.loads(json.dumps(identity)), "command": self.COMMAND})
            except BaseException:
                self._unlock()
                raise

    def _open(self, identity: dict[str, Any]) -> None:
        folder = self.folder
        while self.lock is None:
            if folder.exists() and not _is_work(folder):
                raise UserError(f"{folder} is not empty and not a folder of unfinished work; choose another OUT")
            folder.mkdir(parents=True, exist_ok=True)
            try:
                self.lock = lock_folder(folder)
            except BlockingIOError:
                raise UserError(f"another run is using {folder}; wait for it, or choose another OUT") from None
        earlier = read_own(folder / ABOUT)
        if (command := earlier.get("command", self.COMMAND)) != self.COMMAND:
            raise UserError(f"{folder} holds unfinished work of ladderize {command}; delete it, or choose another OUT")
        different = [key for key, value in sorted(identity.items()) if earlier.get(key) != value]
        if earlier and different and self.has_work():
            words = " and ".join(_changed(key, earlier.get(key), identity[key]) for key in different)
            raise UserError(
                f"{folder} holds unfinished work of a run with another {words}; give the old value again, delete it to"
                " start again, or choose another OUT"
            )
        if different:
            write_json(folder / ABOUT, identity)

    def has_work(self) -> bool:
        """Return whether the folder holds anything from which a run could resume."""
        return any(entry.name != ABOUT for entry in self.folder.iterdir())

    def __enter__(self: Folder) -> Folder:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            if self.lock is None or error is None or not self.folder.is_dir():
                return
            if not self.has_work():
                self.remove()  # nothing was done that would be missed
            elif isinstance(error, KeyboardInterrupt):
                self.console.note(f"stopped; {self.folder} keeps what is done, and the same command goes on from there")
        finally:
            self._unlock()

    def _unlock(self) -> None:
        if self.lock is not None:
            os.close(self.lock)
            self.lock = None

    def remove(self) -> None:
        """Delete the folder. The record goes last, so that the next run knows the folder if this one is killed."""
        for path in sorted(self.folder.iterdir(), key=lambda path: path.name == ABOUT):
            shutil.rmtree(path) if path.is_dir() else path.unlink()
        self.folder.rmdir()

    @classmethod
    def tidy(cls, folder: Path, identity: Mapping[str, Any], out: Path, console: Console) -> None:
        """Remove what the run that wrote ``out`` left here. Another run's work stays."""
        if folder.is_dir():
            with contextlib.suppress(UserError), cls(folder, identity) as work:
                work.remove()
        console.note(f"{out} is complete: this command wrote it in an earlier run")


def _changed(key: str, old: object, new: object) -> str:
    """Return the key, with both values where they are numbers, which may be defaults that nobody gave."""
    return f"{key} ({old}, now {new})" if isinstance(old, int | float) and isinstance(new, int | float) else key


def _is_work(folder: Path) -> bool:
    """Return whether a folder is empty or ours: it has our record, or nothing but one that was being written."""
    if "command" in read_own(folder / ABOUT):
        return True
    return folder.is_dir() and all(entry.name.startswith((ABOUT, f".{ABOUT}.")) for entry in folder.iterdir())


def work_folder(out: str) -> Path:
    """Return the folder of unfinished work beside OUT. Raises UserError where there is no place for it."""
    target = resolved(out, "OUT ")
    if not target.name:
        raise UserError(f"OUT {out} has no folder beside it for unfinished work; name a folder inside it")
    return target.with_name(target.name + SUFFIX)


def is_written_by(document: Mapping[str, Any], out: Path, digest: str) -> bool:
    """Return whether a document that lies in ``out`` is of the run with this digest, which wrote that folder: a
    conversion carries documents on into other ones."""
    named = document.get("out")
    return document.get(RUN) == digest and isinstance(named, str) and resolved(named) == out


def run_digest(identity: Mapping[str, Any]) -> str:
    """Return the sha256 of everything that decides a run's result, which must be valid JSON.

    Long work that makes a folder stores it in its document. If the command is killed after the output appeared, the
    same command finds it there.
    """
    return hashlib.sha256(json.dumps(identity, sort_keys=True).encode()).hexdigest()
