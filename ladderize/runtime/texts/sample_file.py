"""A file of samples that appears whole or not at all, and that a killed run goes on with."""

import json
import os
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from io import FileIO
from pathlib import Path
from types import TracebackType
from typing import Any

from ladderize.checkpoint.reading import read_checkpoint
from ladderize.checkpoint.tensors import fingerprint
from ladderize.console import sentence
from ladderize.errors import UsageError, UserError
from ladderize.files.parsing import parse_json
from ladderize.files.records import Record
from ladderize.files.regular import read_lines
from ladderize.files.temporaries import fsync
from ladderize.files.work import WorkFolder, work_folder
from ladderize.runtime.spec import ModelSpec, eos_ids
from ladderize.runtime.texts.options import GenerateOptions

SAMPLES = "samples.jsonl"  # whole lines, and after a kill perhaps a piece of one


@dataclass(frozen=True)
class SamplesIdentity(Record):
    """What decides a line: what unfinished work has to agree with. Not tp_size and the like, which change rounding
    only.

    model: its fingerprint. layout: as config.json has it.
    """

    model: str
    layout: dict[str, Any]
    dtype: str
    seed: int
    temperature: float
    top_k: int
    top_p: float
    max_new_tokens: int
    ignore_eos: bool
    eos: list[int]


def common_identity(spec: ModelSpec, options: GenerateOptions) -> dict[str, Any]:
    """The fields of ``SamplesIdentity``."""
    assert spec.folder is not None
    sampling = options.sampling
    return {
        "model": fingerprint(read_checkpoint(spec.folder)),
        "layout": spec.layout.to_config(),
        "dtype": spec.dtype,
        "seed": sampling.seed,
        "temperature": sampling.temperature,
        "top_k": sampling.top_k,
        "top_p": sampling.top_p,
        "max_new_tokens": options.max_new_tokens,
        "ignore_eos": options.ignore_eos,
        "eos": list(eos_ids(spec)),
    }


def check_sample_options(out: Path, samples: int | None, batch_size: int | None) -> None:
    """Raise UsageError for a file that nothing would read as rows, and for no samples at all."""
    if out.suffix != ".jsonl":
        raise UsageError(f"--out {out} must end in .jsonl, which tells --data and --perplexity how to read it")
    for option, count in (("--num-samples", samples), ("--batch-size", batch_size)):
        if count is not None and count < 1:
            raise UsageError(f"{option} must be at least 1, not {count}")


def check_sample_target(out: Path, overwrite: bool) -> None:
    """Raise UserError if ``out`` is there and must not be replaced.

    A run that was killed just after its end may still tidy up.
    """
    if out.exists() and not overwrite and not work_folder(str(out), None).exists():
        raise _is_there(out)


class SampleFile(WorkFolder):
    """OUT while it is made, one JSON line for each sample, in a folder of unfinished work beside it.

    Used as a context, by the one process that writes. ``identity``: all that the samples depend on. ``samples`` counts
    what is written, and ``tally`` of a subclass more. Raises UserError if OUT is there already (unless ``overwrite``),
    if another run is at work, or if the unfinished work is another run's or unknown.

    What may be killed when: the rename to OUT is the last step but one, and before it the record of the run says
    ``finished``; so a record without samples tells a run that only had to tidy up.
    """

    CONTENT = (*WorkFolder.CONTENT, SAMPLES)
    OPTION = "--out"

    def __init__(self, out: Path, identity: Mapping[str, Any], samples: int, *, overwrite: bool) -> None:
        self.out = out
        self.samples = 0
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

    @abstractmethod
    def tally(self, record: Mapping[str, Any]) -> None:
        """Count one sample. Raises KeyError, TypeError or ValueError for what is none."""

    def _count(self, path: Path) -> int:
        """Count the whole lines; returns where they end: before what a kill or a power failure has left of one."""
        stop = 0
        for line in read_lines(path):
            try:
                if not line.endswith(b"\n"):
                    break
                self.tally(parse_json(line))
            except (ValueError, KeyError, TypeError):
                break
            self.samples += 1
            stop += len(line)
        return stop

    def append(self, records: Sequence[Mapping[str, Any]]) -> None:
        """Write samples behind those that are there."""
        assert self.file is not None
        try:
            left = "".join(json.dumps(record, ensure_ascii=False) + "\n" for record in records).encode()
            while left:
                left = left[self.file.write(left) :]
        except OSError as error:
            raise UserError(
                f"{self.part} cannot be written: {sentence(error)}; once it can, run the same command again to resume"
            ) from None
        for record in records:
            self.tally(record)
        self.samples += len(records)

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


def _is_there(out: Path) -> UserError:
    return UserError(f"--out {out} already exists; choose another name, or pass --overwrite")
