"""Work folders, which hold the finished part of a run, so that a killed one resumes."""

import contextlib
import hashlib
import json
import os
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, TypeVar

from ladderize.console import Console
from ladderize.errors import UserError
from ladderize.files.documents import read_own, write_json
from ladderize.files.regular import resolved
from ladderize.files.temporaries import lock_folder

ABOUT = "run.json"
SUFFIX = ".ladderize-work"  # of the folder beside OUT
Folder = TypeVar("Folder", bound="WorkFolder")


def differences(about: Mapping[str, Any], identity: Mapping[str, Any]) -> str:
    """Return the keys of ``identity`` that have other values in ``about``, in words; empty where a run may resume."""
    plain = json.loads(json.dumps(identity))
    return " and ".join(sorted(key for key in plain if key not in about or about[key] != plain[key]))


class WorkFolder:
    """A locked folder of unfinished work, with a record (``ABOUT``) of the run that fills it. Used as a context.

    identity: what must be equal for a run to resume.
    main: of several processes the one that makes, locks and removes the folder.
    Raises UserError if the folder holds other files, work with another ``identity``, or is in use.
    """

    COMMAND: str  # the command of ladderize that makes such work
    CONTENT: tuple[str, ...] = (ABOUT, ".*.json.*")  # patterns of the names that may lie here, the record's first
    ADVICE = "delete it"
    OPTION = "OUT"  # the argument that names another place

    def __init__(self, folder: Path, identity: Mapping[str, Any], *, main: bool = True) -> None:
        self.folder, self.identity = folder, dict(identity)
        self.about: dict[str, Any] = {}
        self.begun = False  # by this process
        self.lock: int | None = None
        if main:
            try:
                self._open()
            except BaseException:
                self._unlock()
                raise

    def _open(self) -> None:
        folder = self.folder
        while self.lock is None:
            if folder.exists() and (not folder.is_dir() or not self._only_ours()):
                raise UserError(self._whose())
            folder.mkdir(parents=True, exist_ok=True)
            try:
                self.lock = lock_folder(folder)
            except BlockingIOError:
                raise UserError(
                    f"another run is using {folder}; wait for it, or choose another {self.OPTION}"
                ) from None
        self.about = read_own(folder / ABOUT)
        self.begun = not self.about
        different = differences(self.about, self.identity)
        if self.about and different and self.has_work():
            raise UserError(
                f"{folder} holds unfinished work of a run with another {different}; {self.ADVICE}, or choose another"
                f" {self.OPTION}"
            )
        if not self.about or different:
            self.write_about()

    def _whose(self) -> str:
        """Return the error for a folder that is not this command's."""
        about = read_own(self.folder / ABOUT)
        if about.get("command", self.COMMAND) == self.COMMAND:
            return f"{self.folder} is not empty and not a folder of unfinished work; choose another {self.OPTION}"
        return (
            f"{self.folder} holds unfinished work of ladderize {about['command']}; go on with it by the same command as"
            f" before, or delete it, or choose another {self.OPTION}"
        )

    def write_about(self, **more: Any) -> None:
        """Write the record of this run atomically, with ``more`` keys."""
        write_json(self.folder / ABOUT, {**self.identity, "command": self.COMMAND, **more})
        self.about = read_own(self.folder / ABOUT)

    def has_work(self) -> bool:
        """Return whether the folder holds anything from which a run could resume."""
        return any(entry.name != ABOUT for entry in self.folder.iterdir())

    def _only_ours(self) -> bool:
        """Return whether the folder is empty or ours: only names of ``CONTENT``, and among them the record or its
        temporaries.

        Names alone may be somebody else's.
        """
        entries = list(self.folder.iterdir())
        known = (self.folder / ABOUT).is_file() or all(entry.match(f".{ABOUT}.*") for entry in entries)
        return known and all(any(entry.match(pattern) for pattern in self.CONTENT) for entry in entries)

    def __enter__(self: Folder) -> Folder:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            if self.begun and error is not None and self.folder.is_dir() and not self.has_work():
                self.remove()  # nothing was done that would be missed
        finally:
            self._unlock()

    def _unlock(self) -> None:
        if self.lock is not None:
            os.close(self.lock)
            self.lock = None

    def remove(self) -> None:
        """Delete what was written here, and the folder if nothing else is in it.

        The record goes last, so the next run recognises the folder if this one is killed meanwhile.
        """
        for pattern in (*self.CONTENT[1:], ABOUT):
            for path in self.folder.glob(pattern):
                shutil.rmtree(path) if path.is_dir() else path.unlink()
        if not any(self.folder.iterdir()):
            self.folder.rmdir()

    @classmethod
    def tidy(cls, folder: Path, identity: Mapping[str, Any]) -> None:
        """Remove what a run with this ``identity`` left here, since its output is complete. Another run's work
        stays."""
        if folder.is_dir():
            with contextlib.suppress(UserError), cls(folder, identity) as work:
                work.remove()


def work_folder(out: str, work_dir: Path | None, *sources: Path) -> Path:
    """Return the folder of unfinished work: beside OUT, or ``work_dir``. Raises UserError for one that overlaps OUT or
    a source."""
    target = resolved(out)
    if not target.name:
        raise UserError(f"OUT {out} has no folder beside it for unfinished work; name a folder inside it")
    if work_dir is None:
        return target.with_name(target.name + SUFFIX)
    folder = resolved(work_dir, "--work-dir ")
    for other in (target, *(source.resolve() for source in sources)):
        if folder == other or folder in other.parents or other in folder.parents:
            raise UserError(f"--work-dir {folder} is, contains or lies inside {other}; choose a folder of its own")
    return folder


# Long work that makes a folder stores in its document a digest of everything that decided the result. If the command
# was killed after the output appeared, the same command finds the digest there.
RUN = "run_sha256"  # the key of a document with the digest of the run that wrote it
FINISHED = "finished"  # the key of a work folder's record with the digest of the run that is about to finish


def run_digest(identity: Mapping[str, Any]) -> str:
    """Return the sha256 of everything that decides a run's result, which must be valid JSON."""
    return hashlib.sha256(json.dumps(identity, sort_keys=True).encode()).hexdigest()


@dataclass(frozen=True)
class EarlierRun:
    """The output and the work folder that an earlier run of the same command may have left.

    Only the main process may ask and remove; it broadcasts the answer.
    """

    out: Path
    document: str
    work: Path
    overwrite: bool

    def may_have_finished(self) -> bool:
        """Return whether an earlier run may have written ``out``, so that its digest is worth computing."""
        return RUN in self.read() and (not self.overwrite or FINISHED in read_own(self.work / ABOUT))

    def finished(self, digest: str) -> bool:
        """Return whether the run of this digest wrote ``out``.

        With ``overwrite`` the work folder must say so too; otherwise the command is meant to run anew.
        """
        if self.overwrite and read_own(self.work / ABOUT).get(FINISHED) != digest:
            return False
        return self.read().get(RUN) == digest

    def read(self) -> dict[str, Any]:
        """Return the document in ``out``; empty where there is none."""
        return read_own(self.out / self.document)

    def tidy(self, kind: type[WorkFolder], identity: Mapping[str, Any], console: Console) -> dict[str, Any]:
        """Remove what the run left, note that it is complete, and return its document."""
        kind.tidy(self.work, identity)
        console.note(f"{self.out} is complete: this command wrote it in an earlier run")
        return self.read()
