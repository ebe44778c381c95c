"""A file of samples that appears whole or not at all, and that a killed run goes on with."""

import json
import os
from collections.abc import Mapping, Sequence
from io import FileIO
from pathlib import Path
from types import TracebackType
from typing import Any

from ladderize.console import sentence
from ladderize.errors import UserError
from ladderize.files.locks import fsync
from ladderize.files.parsing import parse_json
from ladderize.files.regular import read_lines
from ladderize.files.work import WorkFolder, work_folder

SAMPLES = "samples.jsonl"  # whole lines, and after a kill perhaps a piece of one


def check_corpus_target(out: Path, overwrite: bool) -> None:
    """Raise UserError if ``out`` is there and must not be replaced.

    A run that was killed just after its end may still tidy up.
    """
    if out.exists() and not overwrite and not work_folder(str(out), None).exists():
        raise _is_there(out)


class CorpusFile(WorkFolder):
    """OUT while it is made, one JSON line for each sample, in a folder of unfinished work beside it.

    Used as a context, by the one process that writes. ``identity``: all that the samples depend on. ``samples``,
    ``tokens`` (without BOS) and ``ended`` (by EOS) count what is written. Raises UserError if OUT is there already
    (unless ``overwrite``), if another run is at work, or if the unfinished work is another run's or nobody's.

    What may be killed when: the rename to OUT is the last step but one, and before it the record of the run says
    ``finished``; so a record without samples tells a run that only had to tidy up.
    """

    CONTENT = (*WorkFolder.CONTENT, SAMPLES)
    OPTION = "--out"

    def __init__(
        self, out: Path, identity: Mapping[str, Any], samples: int, *, eos: Sequence[int], overwrite: bool
    ) -> None:
        self.out = out
        self.eos = frozenset(eos)
        self.samples = self.tokens = self.ended = 0
        self.file: FileIO | None = None
        super().__init__(work_folder(str(out), None), identity)
        try:
            self._go_on(samples, overwrite)
        except BaseException as error:
            self.__exit__(type(error), error, None)
            raise

    @property
    def part(self) -> Path:
        return self.folder / SAMPLES

    def has_work(self) -> bool:
        """Whether there are samples: a file without any may be begun anew."""
        return self.part.is_file() and self.part.stat().st_size > 0

    def _go_on(self, samples: int, overwrite: bool) -> None:
        if self.about.get("finished") == samples and self.out.is_file() and not self.part.exists():
            self._count(self.out)
            return
        if self.out.exists() and not overwrite:
            raise _is_there(self.out)
        if "finished" in self.about:
            self.write_about()
        self.file = self.part.open("ab", buffering=0)
        self.file.truncate(self._count(self.part))
        if self.samples > samples:
            raise UserError(
                f"{self.folder} holds {self.samples} samples already; ask for as many with --num-samples, or delete it"
            )

    def _count(self, path: Path) -> int:
        """Count the whole lines; returns where they end."""
        stop = 0
        for line in read_lines(path):
            ids = _ids(line)
            if ids is None:
                break
            self._add(ids)
            stop += len(line)
        return stop

    def _add(self, ids: Sequence[int]) -> None:
        self.samples += 1
        self.tokens += len(ids) - 1
        self.ended += len(ids) > 1 and ids[-1] in self.eos

    def write(self, rows: Sequence[Sequence[int]], texts: Sequence[str] | None) -> None:
        """Append samples: ids with BOS, and their texts where there is a tokenizer."""
        assert self.file is not None
        records: list[dict[str, Any]] = [{"input_ids": list(ids)} for ids in rows]
        if texts is not None:
            records = [{"text": text, **record} for text, record in zip(texts, records, strict=True)]
        try:
            left = "".join(json.dumps(record, ensure_ascii=False) + "\n" for record in records).encode()
            while left:
                left = left[self.file.write(left) :]
        except OSError as error:
            raise UserError(
                f"{self.part} cannot be written: {sentence(error)}; once it can, run the same command again to resume"
            ) from None
        for ids in rows:
            self._add(ids)

    def finish(self) -> None:
        """Give the file its name, and remove the folder."""
        if self.file is not None:
            os.fsync(self.file.fileno())
            self.write_about(finished=self.samples)
            os.replace(self.part, self.out)
            fsync(self.out.parent)
        self.remove()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self.file is not None:
            self.file.close()
            self.file = None
        super().__exit__(kind, error, trace)


def _ids(line: bytes) -> list[int] | None:
    """The ids of a whole line; None for what a kill or a power failure has left of one."""
    try:
        ids = parse_json(line)["input_ids"] if line.endswith(b"\n") else None
    except (ValueError, KeyError, TypeError):
        return None
    return ids if isinstance(ids, list) and ids else None


def _is_there(out: Path) -> UserError:
    return UserError(f"--out {out} already exists; choose another name, or pass --overwrite")
