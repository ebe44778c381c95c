"""A file of samples that appears whole or not at all, and that a killed run goes on with."""

import fcntl
import json
import os
from collections.abc import Mapping, Sequence
from io import FileIO
from pathlib import Path
from types import TracebackType
from typing import Any

from ladderize.console import UserError, sentence, to_json
from ladderize.files.documents import read_own
from ladderize.files.output import fsync


def part_of(out: Path) -> Path:
    """The samples so far: whole lines, and after a kill perhaps a piece of one."""
    return out.with_name(out.name + ".part")


def about_of(out: Path) -> Path:
    """What run the samples are of."""
    return out.with_name(out.name + ".part.json")


def check_target(out: Path, overwrite: bool) -> None:
    """Raise UserError if ``out`` is there and must not be replaced; a run that was killed just after its end may still
    tidy up."""
    if out.exists() and not overwrite and not about_of(out).exists():
        raise _is_there(out)


class CorpusFile:
    """OUT while it is made, one JSON line for each sample: ``OUT.part``, and ``OUT.part.json`` that says what run it is
    of.

    Used as a context, by the one process that writes. ``identity``: all that the samples depend on, as JSON holds it.
    ``samples``, ``tokens`` (without BOS) and ``ended`` (by EOS) count what is written. Raises UserError if OUT is there
    already (unless ``overwrite``), if another run is at work, or if the unfinished work is another run's or nobody's.

    What may be killed when: the rename to OUT is the last step but one, and before it OUT.part.json says ``finished``;
    so OUT.part.json without OUT.part tells a run that only had to tidy up.
    """

    def __init__(
        self, out: Path, identity: Mapping[str, Any], samples: int, *, eos: Sequence[int], overwrite: bool
    ) -> None:
        self.out, self.part, self.about = out, part_of(out), about_of(out)
        self.identity: dict[str, Any] = json.loads(json.dumps(identity))
        self.eos = frozenset(eos)
        self.samples = self.tokens = self.ended = 0
        self.file: FileIO | None = None
        try:
            self._open(samples, overwrite)
        except BaseException:
            self._close()
            raise

    def _open(self, samples: int, overwrite: bool) -> None:
        found = read_own(self.about)
        if (
            found.get("finished") == samples
            and self.out.is_file()
            and not self.part.exists()
            and not self._differences(found)
        ):
            self._count(self.out)
            return
        self.file = _locked(self.part)
        if self.out.exists() and not overwrite:
            raise _is_there(self.out)
        found = read_own(self.about)  # anew: under the lock nobody changes it
        if os.fstat(self.file.fileno()).st_size:
            self._check(found)
        if found.get("finished") is not None or self._differences(found):
            self._write_about()
        self.file.truncate(self._count(self.part))
        if self.samples > samples:
            raise UserError(
                f"{self.part} holds {self.samples} samples already; ask for as many with --num-samples, or delete it"
                f" and {self.about.name}"
            )

    def _differences(self, found: Mapping[str, Any]) -> list[str]:
        return [key for key, value in self.identity.items() if key not in found or found[key] != value]

    def _check(self, found: Mapping[str, Any]) -> None:
        if not found:
            raise UserError(
                f"{self.part} is there without {self.about.name}, which says of what run; delete it, or choose another"
                " --out"
            )
        if different := self._differences(found):
            raise UserError(
                f"{self.part} holds samples of a run with another {' and '.join(different)}; delete it and"
                f" {self.about.name}, or choose another --out"
            )

    def _count(self, path: Path) -> int:
        """Count the whole lines; returns where they end."""
        stop = 0
        with path.open("rb") as file:
            for line in file:
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
                f"{self.part} cannot be written: {sentence(error)}; once it can, the same command goes on"
            ) from None
        for ids in rows:
            self._add(ids)

    def finish(self) -> None:
        """Give the file its name."""
        if self.file is not None:
            os.fsync(self.file.fileno())
            self._write_about(finished=self.samples)
            os.replace(self.part, self.out)
            fsync(self.out.parent)
        self.about.unlink(missing_ok=True)

    def _write_about(self, **more: Any) -> None:
        temporary = self.about.with_name(self.about.name + ".new")
        with temporary.open("w", encoding="utf-8") as file:
            file.write(to_json({**self.identity, **more}) + "\n")
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, self.about)

    def _close(self) -> None:
        if self.file is not None:
            if not os.fstat(self.file.fileno()).st_size:  # nothing was done that would be missed
                self.part.unlink(missing_ok=True)
                if "finished" not in read_own(self.about):
                    self.about.unlink(missing_ok=True)
            self.file.close()
            self.file = None

    def __enter__(self) -> "CorpusFile":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._close()


def _locked(path: Path) -> FileIO:
    """The file, made if need be, open to append, and locked as long as it is."""
    while True:
        file = path.open("ab", buffering=0)
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            file.close()
            raise UserError(f"another run is writing {path}; wait for it, or choose another --out") from None
        with_name = path.stat().st_ino if path.exists() else None
        if os.fstat(file.fileno()).st_ino == with_name:
            return file
        file.close()  # that run has just ended: this is its OUT by now


def _ids(line: bytes) -> list[int] | None:
    """The ids of a whole line; None for what a kill or a power failure has left of one."""
    try:
        ids = json.loads(line)["input_ids"] if line.endswith(b"\n") else None
    except (ValueError, KeyError, TypeError):
        return None
    return ids if isinstance(ids, list) and ids else None


def _is_there(out: Path) -> UserError:
    return UserError(f"--out {out} is there already; choose another name, or pass --overwrite")
