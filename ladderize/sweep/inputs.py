"""The files that a sweep reads and did not make, identified by their content."""

import os
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ladderize.checkpoint.opening import open_checkpoint
from ladderize.checkpoint.tensors import fingerprint
from ladderize.console import SILENT
from ladderize.data.files import HUB, data_files, file_sha256, split_weight
from ladderize.errors import UserError
from ladderize.eval.options import EvalOptions
from ladderize.eval.tasks import open_tasks, tasks_digest
from ladderize.families.registry import family_of
from ladderize.files.regular import split_name
from ladderize.files.unfinished import run_digest

MODEL_SUFFIXES = (".json", ".model", ".jinja", ".txt")  # of a checkpoint's files besides the weights


@dataclass
class Inputs:
    """The files that were read. When one changes, its stages run anew.

    seen: size, time and place of each file when it was read.
    hashes: of the files that were read as a whole.
    questions: of lm-eval's tasks, by the options of eval: the hash of their settings, functions and rows.
    """

    seen: dict[Path, list[int] | None] = field(default_factory=dict)
    hashes: dict[Path, str] = field(default_factory=dict)
    questions: dict[EvalOptions, str] = field(default_factory=dict)

    def model(self, name: str) -> str:
        """Return the hash of a checkpoint: its weights, config and tokenizer. Raises UserError unless it is sound."""
        checkpoint = open_checkpoint(name, sound="any")
        family_of(checkpoint.config)  # raises for one that cannot be converted
        folder = checkpoint.folder
        self.seen |= {folder / weights: _signature(folder / weights) for weights in checkpoint.weight_files}
        files = self._files(folder, (path for path in folder.iterdir() if path.suffix in MODEL_SUFFIXES))
        return run_digest({"weights": fingerprint(checkpoint), "files": files})

    def _files(self, folder: Path, paths: Iterable[Path]) -> str:
        """Return the hash of the content of files, and of their places in a folder."""
        return run_digest({str(path.relative_to(folder)): self.file(path) for path in paths if path.is_file()})

    def data(self, name: str) -> tuple[str, str | None]:
        """Return the hash of a file or folder, and the array in it that is meant. Raises UserError if it is not
        there."""
        path, array = split_name(name)
        if not path.exists():
            raise UserError(f"{path} does not exist")
        if path.is_dir():
            return self._files(path, (entry for entry in path.rglob("*") if entry.suffix != ".pyc")), None
        return self.file(path), array

    def sources(self, names: tuple[str, ...]) -> list[Any]:
        """Return what identifies sources of training data: their weights, and the content of files or the name on the
        hub."""
        sources: list[Any] = []
        for name, weight in map(split_weight, names):
            content = name if name.startswith(HUB) else [self.data(file) for file in data_files(name)]
            sources.append((weight, content))
        return sources

    def file(self, path: Path) -> str:
        """Return the sha256 of a file's content, which is read again only where size or time have changed."""
        path = path.resolve()
        if path not in self.hashes or self.seen[path] != _signature(path):
            self.seen[path] = _signature(path)
            self.hashes[path] = file_sha256(str(path))
        return self.hashes[path]

    def tasks(self, options: EvalOptions) -> str:
        """Return the hash of what lm-eval's tasks ask, which is read once. Raises UserError where they cannot be
        read."""
        if options not in self.questions:
            with SILENT.contained():
                self.questions[options] = tasks_digest(open_tasks(options), self.file)
        return self.questions[options]

    def check_unchanged(self, *, asked: bool) -> None:
        """Raise UserError for a file that has changed since it was read.

        asked: lm-eval has read its tasks, so they are read again: only that shows what their files hold.
        """
        changed = [str(path) for path, before in self.seen.items() if self._has_changed(path, before)]
        if asked and not changed:
            again = Inputs()
            changed = [
                ", ".join(options.tasks) for options, digest in self.questions.items() if again.tasks(options) != digest
            ]
        if changed:
            raise UserError(
                f"{changed[0]} changed while the sweep ran, so what was measured meanwhile may be of either; run the"
                " same command again: it keeps the stages that were complete before, and that do not depend on it"
            )

    def _has_changed(self, path: Path, before: list[int] | None) -> bool:
        if _signature(path) == before:
            return False
        return not path.is_file() or self.hashes.get(path) != file_sha256(str(path))


def _signature(path: Path) -> list[int] | None:
    """Return size, time and place of a file; None where it is not there."""
    if not path.exists():
        return None
    status = os.stat(path)
    return [status.st_size, status.st_mtime_ns, status.st_ino, status.st_dev]
