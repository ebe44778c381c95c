"""Files of samples that ``ladderize generate`` writes as training data, a JSON line for each: they appear whole or not
at all, and a killed run goes on to the same bytes.

What a sample is, and how it is generated, a subclass of ``Samples`` says: ``corpus`` (texts from BOS alone) and
``answers`` (to the prompts of a file). A sample depends on its number, the seed and the sampling options.
"""

import contextlib
import json
import os
import time
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from io import FileIO
from pathlib import Path
from types import TracebackType
from typing import Any, ClassVar

import torch

from ladderize.checkpoint.opening import read_checkpoint
from ladderize.checkpoint.tensors import fingerprint
from ladderize.console import Console, sentence
from ladderize.data import file_sha256
from ladderize.errors import UsageError, UserError
from ladderize.files.documents import check_writable, read_own, write_json
from ladderize.files.parsing import parse_json
from ladderize.files.records import Record
from ladderize.files.regular import read_lines, resolved
from ladderize.files.temporaries import fsync
from ladderize.files.work import FINISHED, RUN, WorkFolder, run_digest, work_folder
from ladderize.modeling import load_tokenizer
from ladderize.ranks.environment import is_main_rank
from ladderize.ranks.group import Ranks
from ladderize.runtime.launch import run
from ladderize.runtime.requests.options import GenerateOptions
from ladderize.runtime.spec import ModelSpec, eos_ids

PART = "samples.jsonl"  # whole lines, and after a kill perhaps a piece of one


@dataclass(frozen=True)
class SamplesDocument(Record):
    """``ladderize generate --json``. Of this run: resumed_samples, seconds, output_tokens_per_s. backend and the latter
    are None if nothing was left to do."""

    model: str
    layout: str
    tp_size: int
    backend: str | None
    dtype: str
    out: str
    samples: int
    resumed_samples: int
    seconds: float
    output_tokens_per_s: float | None

    @property
    def speed(self) -> str:
        """For a sentence."""
        return "" if self.output_tokens_per_s is None else f", {self.output_tokens_per_s:.0f} tokens/s"


@dataclass(frozen=True)
class Samples(ABC):
    """What is to be made: ``total`` samples in ``out``, ``batch_size`` at a time, each until one of ``eos`` or
    max_new_tokens."""

    NOUN: ClassVar[str]
    DOCUMENT: ClassVar[type[SamplesDocument]]

    out: Path
    total: int
    batch_size: int
    overwrite: bool
    eos: tuple[int, ...]

    @abstractmethod
    def identity(self, spec: ModelSpec, options: GenerateOptions, tokenizer: Any) -> dict[str, Any]:
        """What decides a sample beside the model and the options of sampling: unfinished work has to agree with it."""

    @abstractmethod
    def opened(
        self, group: Ranks, spec: ModelSpec, options: GenerateOptions, tokenizer: Any, done: int, console: Console
    ) -> contextlib.AbstractContextManager[tuple[str, Iterator[tuple[Sequence[int], list[list[int]]]]]]:
        """A context with the model on this rank: how its ranks communicate; and the numbers of samples with their new
        ids, some at a time, from ``done`` on or from before it. All ranks yield the same."""

    @abstractmethod
    def row(self, number: int, new: list[int], tokenizer: Any) -> dict[str, Any]:
        """The line of a sample."""

    @abstractmethod
    def counted(self, row: Mapping[str, Any]) -> dict[str, int]:
        """What is counted of a line. Raises KeyError, TypeError or ValueError for what is none."""

    @abstractmethod
    def outcome(self, counts: Mapping[str, int], output_tokens: int) -> dict[str, Any]:
        """The fields of ``DOCUMENT`` beside those of ``SamplesDocument``. output_tokens: of this run."""


def checked_target(out: Path, samples: int | None, batch_size: int | None, overwrite: bool) -> Path:
    """``out`` as it is. Raises UsageError for a file that nothing would read as rows, and for no samples at all;
    UserError where it cannot be written, or is there and must not be replaced."""
    if out.suffix != ".jsonl":
        raise UsageError(f"--out {out} must end in .jsonl, which tells --data and --perplexity how to read it")
    for option, count in (("--num-samples", samples), ("--batch-size", batch_size)):
        if count is not None and count < 1:
            raise UsageError(f"{option} must be at least 1, not {count}")
    out = resolved(out, "--out ")
    if is_main_rank():
        check_writable(out)
        if out.exists() and not overwrite and not (_record_of(out).exists() or work_folder(str(out), None).exists()):
            raise _is_there(out)
    return out


def make_samples(spec: ModelSpec, samples: Samples, options: GenerateOptions, console: Console) -> Any:
    """Make the samples that are not there yet; the document on rank 0, None on others."""
    if not spec.layout.is_dense:
        console.note(
            f"{spec.name} is converted ({spec.layout}): these are its {samples.NOUN}, not those of the dense model"
        )
    return run(
        _write,
        spec,
        samples,
        options,
        console,
        tp_size=options.tp_size,
        device=options.device,
        threads=options.threads,
    )


def _write(
    group: Ranks, spec: ModelSpec, samples: Samples, options: GenerateOptions, console: Console
) -> SamplesDocument | None:
    """One rank's part; rank 0 alone holds the file."""
    assert spec.folder is not None
    tokenizer = load_tokenizer(spec.folder)
    with contextlib.ExitStack() as stack:
        file = stack.enter_context(SampleFile(samples, spec, options, tokenizer)) if group.is_main else None
        before = group.broadcast(file.samples if file is not None else 0)
        if before:
            console.note(f"{before} {samples.NOUN} are already there")
        backend, seconds, made = None, 0.0, 0
        if before < samples.total:
            with (
                samples.opened(group, spec, options, tokenizer, before, console) as (backend, generated),
                torch.inference_mode(),
            ):
                begin = time.perf_counter()
                for numbers, new in generated:
                    made += sum(map(len, new))
                    if file is not None:
                        pairs = zip(numbers, new, strict=True)
                        file.append([samples.row(number, ids, tokenizer) for number, ids in pairs if number >= before])
                seconds = time.perf_counter() - begin
        if file is None:
            return None
        file.finish()
        return samples.DOCUMENT(
            model=spec.name,
            layout=str(spec.layout),
            tp_size=group.size,
            backend=backend,
            dtype=spec.dtype,
            out=str(samples.out),
            samples=file.samples,
            resumed_samples=before,
            seconds=seconds,
            output_tokens_per_s=made / seconds if made else None,
            **samples.outcome(file.counts, made),
        )


class SampleFile(WorkFolder):
    """OUT while it is made, in a folder of unfinished work beside it. A context of the one process that writes.

    ``samples`` counts what is written, ``counts`` what ``Samples.counted`` does. Raises UserError if OUT is there
    already (unless ``overwrite``), if another run is at work, or if the unfinished work is another run's or unknown.

    Before the rename to OUT a record beside it says what run is about to make it, and the hash of what it makes: the
    same command, after it was killed at the very end, finds that it is done. Of --overwrite, which is to work anew, the
    work folder's record says ``finished``: without samples it tells a run that only had to tidy up.
    """

    COMMAND = "generate"
    CONTENT = (*WorkFolder.CONTENT, PART)
    OPTION = "--out"

    def __init__(self, what: Samples, spec: ModelSpec, options: GenerateOptions, tokenizer: Any) -> None:
        self.what, self.samples, self.counts = what, 0, Counter[str]()
        self.file: FileIO | None = None
        assert spec.folder is not None
        # not tp_size and the like, which change rounding only
        identity = {
            "model": fingerprint(read_checkpoint(spec.folder)),
            "layout": spec.layout.to_config(),
            "dtype": spec.dtype,
            **vars(options.sampling),
            "max_new_tokens": options.max_new_tokens,
            "ignore_eos": options.ignore_eos,
            "eos": list(eos_ids(spec)),
            **what.identity(spec, options, tokenizer),
        }
        super().__init__(work_folder(str(what.out), None), identity)
        try:
            self._go_on()
        except BaseException as error:
            self.__exit__(type(error), error, None)
            raise

    @property
    def part(self) -> Path:
        return self.folder / PART

    def has_work(self) -> bool:
        """Whether there are samples: a file without any may be begun anew."""
        return self.part.is_file() and self.part.stat().st_size > 0

    def _go_on(self) -> None:
        out, total = self.what.out, self.what.total
        if out.is_file() and not self.part.exists() and self._made_before():
            self._count(out)
            return
        if out.exists() and not self.what.overwrite:
            raise _is_there(out)
        if FINISHED in self.about:
            self.write_about()
        self.file = self.part.open("ab", buffering=0)
        self.file.truncate(self._count(self.part))
        if self.samples > total:
            raise UserError(
                f"{self.folder} holds {self.samples} samples already; ask for as many with --num-samples, or delete it"
            )

    def _made_before(self) -> bool:
        """Whether an earlier run of this command, which could not end, has made OUT as it is."""
        if self.what.overwrite:
            return self.about.get(FINISHED) == self.what.total
        record = read_own(_record_of(self.what.out))
        return record.get(RUN) == self._digest and record.get("sha256") == file_sha256(str(self.what.out))

    @property
    def _digest(self) -> str:
        return run_digest({**self.identity, "samples": self.what.total})

    def _count(self, path: Path) -> int:
        """Count the whole lines; returns where they end: before what a kill or a power failure has left of one."""
        stop = 0
        for line in read_lines(path):
            try:
                if not line.endswith(b"\n"):
                    break
                self.counts.update(self.what.counted(parse_json(line)))
            except (ValueError, KeyError, TypeError):
                break
            self.samples += 1
            stop += len(line)
        return stop

    def append(self, rows: Sequence[Mapping[str, Any]]) -> None:
        """Write samples behind those that are there."""
        assert self.file is not None
        try:
            left = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows).encode()
            while left:
                left = left[self.file.write(left) :]
        except OSError as error:
            raise UserError(
                f"{self.part} cannot be written: {sentence(error)}; once it can, run the same command again to resume"
            ) from None
        for row in rows:
            self.counts.update(self.what.counted(row))
        self.samples += len(rows)

    def finish(self) -> None:
        """Give the file its name, and remove the folder."""
        if self.file is not None:
            os.fsync(self.file.fileno())
            made = {**self.identity, "samples": self.samples, "sha256": file_sha256(str(self.part)), RUN: self._digest}
            write_json(_record_of(self.what.out), made)
            self.write_about(**{FINISHED: self.samples})
            os.replace(self.part, self.what.out)
            fsync(self.what.out.parent)
        self.remove()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self.file is not None:
            self.file.close()
            self.file = None
        super().__exit__(kind, error, trace)


def _record_of(out: Path) -> Path:
    """What made OUT, beside it."""
    return out.with_name(out.name + ".run.json")


def _is_there(out: Path) -> UserError:
    return UserError(f"--out {out} already exists; choose another name, or pass --overwrite")
