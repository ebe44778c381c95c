"""Unfinished work: a folder beside OUT with the pieces that a run has finished, so that a killed run goes on."""

import contextlib
import hashlib
import json
import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeVar

from ladderize.console import SILENT, Console
from ladderize.errors import UserError
from ladderize.files.documents import read_own, write_json
from ladderize.files.output import clean_up, lock_folder
from ladderize.files.regular import resolved

RUN_FILE, RUN_SHA256 = "run.json", "run_sha256"  # a run's identity; the key of its digest in a document in OUT
Folder = TypeVar("Folder", bound="Unfinished")


class Unfinished:
    """A locked folder of a run's finished pieces. As a context it is removed when the block, which makes the result
    whole, is done. An error keeps the pieces, and with them the run's ``identity`` in ``run.json``: what another run
    must have in common to go on with them. Where nothing matches ``pieces``, another one begins anew. Of several
    processes the ``main`` one makes, locks and removes the folder."""

    def __init__(
        self,
        folder: Path,
        command: str,
        identity: Mapping[str, Any],
        *,
        pieces: str = "*",
        main: bool = True,
        console: Console = SILENT,
    ) -> None:
        self.folder, self.pieces, self.console = folder, pieces, console
        self.lock: int | None = None
        if main:
            try:
                self._open({**json.loads(json.dumps(identity)), "command": command})
            except BaseException:
                self.unlock()
                raise

    def _open(self, identity: dict[str, Any]) -> None:
        while self.lock is None:
            self.folder.mkdir(parents=True, exist_ok=True)
            try:
                self.lock = lock_folder(self.folder)
            except BlockingIOError:
                raise UserError(f"another run is using {self.folder}; wait for it, or choose another OUT") from None
        earlier = read_own(self.folder / RUN_FILE)
        if not earlier and any(not path.name.startswith(f".{RUN_FILE}.") for path in self.folder.iterdir()):
            raise UserError(f"{self.folder} is not empty and not a folder of unfinished work; choose another OUT")
        different = [key for key in sorted(identity) if earlier.get(key) != identity[key]]
        if "command" in different:
            different = ["command"]
        if earlier and different and (different == ["command"] or self.has_pieces()):
            changes = []
            for key in different:
                old, new = earlier.get(key), identity[key]
                # both where they are numbers, which may be defaults that nobody gave
                is_number = isinstance(old, int | float) and isinstance(new, int | float)
                changes.append(f"{key} ({old}{f', now {new}' * is_number})" if is_number or key == "command" else key)
            raise UserError(
                f"{self.folder} holds unfinished work of a run with another {' and '.join(changes)}; give the old value"
                " again, delete it to start again, or choose another OUT"
            )
        if different:
            write_json(self.folder / RUN_FILE, identity)

    def has_pieces(self) -> bool:
        return any(path.name != RUN_FILE for path in self.folder.glob(self.pieces))

    def __enter__(self: Folder) -> Folder:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        try:
            if self.lock is None or not self.folder.is_dir():
                return
            if error is None or not self.has_pieces():
                self.remove()
            elif isinstance(error, KeyboardInterrupt):
                self.console.note(f"stopped; {self.folder} keeps what is done, and the same command goes on from there")
        finally:
            self.unlock()

    def unlock(self) -> None:
        if self.lock is not None:
            os.close(self.lock)
        self.lock = None

    def remove(self) -> None:
        """Delete the folder. The record goes last, so that the next run knows the folder if this one is killed."""
        for path in sorted(self.folder.iterdir(), key=lambda path: path.name == RUN_FILE):
            shutil.rmtree(path) if path.is_dir() else path.unlink()
        self.folder.rmdir()


def work_folder(out: str | Path) -> Path:
    """Return the folder of unfinished work beside OUT."""
    target = resolved(out, "OUT ")
    if not target.name:
        raise UserError(f"OUT {out} has no folder beside it for unfinished work; name a folder inside it")
    return target.with_name(f"{target.name}.ladderize-work")


def run_digest(identity: Mapping[str, Any]) -> str:
    """Return a hash of all that decides a run's result, which a document in OUT holds as ``RUN_SHA256``."""
    return hashlib.sha256(json.dumps(identity, sort_keys=True).encode()).hexdigest()


def finished_before(
    out: Path,
    file: str,
    digest: str,
    command: str,
    identity: Mapping[str, Any],
    *,
    overwrite: bool = False,
    console: Console = SILENT,
) -> dict[str, Any]:
    """Return the document ``file`` in ``out`` if the run with this digest wrote that folder (a conversion carries
    documents on), and remove what it left of its work; else, and with ``overwrite``, {}. Another run's work stays."""
    clean_up(out)  # a killed swap may have set OUT aside
    document = {} if overwrite else read_own(out / file)
    named, folder = document.get("out"), work_folder(out)
    if document.get(RUN_SHA256) != digest or not isinstance(named, str) or resolved(named) != out:
        return {}
    if folder.is_dir():
        with contextlib.suppress(UserError), Unfinished(folder, command, identity):
            pass  # nothing is left to do
    console.note(f"{out} is complete: this command wrote it in an earlier run")
    return document
