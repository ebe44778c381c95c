"""``ladderize generate --prompt-file``: a model's own answers to instructions, as training data.

Rows that end make room for prompts that wait (runtime/requests/continuous.py), within a group of prompts at a time. A
group is always computed in the same way, so a run that was killed, and begins with the group that it was at, makes the
same bytes in the end. An answer depends on its number, the seed and the sampling options.
"""

import contextlib
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from ladderize.console import SILENT, Console, human_bytes
from ladderize.data import file_sha256
from ladderize.errors import UsageError, UserError
from ladderize.files.documents import check_writable
from ladderize.files.records import Record
from ladderize.files.regular import resolved
from ladderize.modeling import tokenizer_hash
from ladderize.ranks.environment import is_main_rank
from ladderize.ranks.group import Ranks
from ladderize.runtime.launch import run
from ladderize.runtime.requests.continuous import ContinuousBatch, Prompt, StopStrings
from ladderize.runtime.requests.options import RequestOptions
from ladderize.runtime.requests.worker import Worker, opened
from ladderize.runtime.sampling import Sampling
from ladderize.runtime.spec import ModelSpec, eos_ids
from ladderize.runtime.texts.options import DEFAULT_SAMPLES_AT_A_TIME, GenerateOptions
from ladderize.runtime.texts.prompt_file import FilePrompt, check_prompt_file, encode_prompts, read_prompts
from ladderize.runtime.texts.prompts import open_spec, tokenizer_of
from ladderize.runtime.texts.sample_file import (
    SampleFile,
    SamplesIdentity,
    check_sample_options,
    check_sample_target,
    common_identity,
)


class AnswerEnds:
    """Where an answer ends: before EOS, or before the first stop string in it."""

    def __init__(self, tokenizer: Any, eos: Sequence[int], stops: tuple[str, ...]) -> None:
        self.tokenizer, self.eos, self.stops = tokenizer, frozenset(eos), stops
        self._seen = StopStrings(tokenizer, stops)

    def text(self, prompt: Sequence[int], new: Sequence[int]) -> tuple[str, str]:
        """The text of the ids ``new`` behind those of a prompt, and why it ended: stop or length."""
        ids = list(new)
        # a stop string that is a special token is seen in the ids, and not in the text
        ended = ids[-1] in self.eos or self._seen.end(ids)
        if ids[-1] in self.eos:
            ids.pop()
        text = text_after(self.tokenizer, prompt, ids)
        cut = min((place for stop in self.stops if (place := text.find(stop)) >= 0), default=None)
        return text[:cut], "length" if cut is None and not ended else "stop"


def text_after(tokenizer: Any, before: Sequence[int], ids: Sequence[int]) -> str:
    """The text that ``ids`` add behind the ids ``before``, without special tokens.

    Decoded alone they may lose the space that they begin with (SentencePiece).
    """
    first = str(tokenizer.decode(list(before), skip_special_tokens=True))
    both = str(tokenizer.decode([*before, *ids], skip_special_tokens=True))
    return both[len(first) :] if both.startswith(first) else str(tokenizer.decode(list(ids), skip_special_tokens=True))


# Answers are written a group of so many full batches at a time. At its end rows stand empty until the last answer is
# whole: the larger it is, the less time that takes, and the more work a killed run does again.
BATCHES_OF_A_GROUP = 8


@dataclass(frozen=True)
class Questions:
    """What is to be answered, and where to: each of ``prompts`` in ``out``, ``batch_size`` at a time, until one of
    ``eos``, a stop string or max_new_tokens.

    ids: of each prompt, int32 [tokens]. prompt_file: its hash.
    """

    out: Path
    prompt_file: str
    prompts: list[FilePrompt]
    ids: list[np.ndarray]
    batch_size: int
    overwrite: bool
    eos: tuple[int, ...]

    @property
    def longest_prompt(self) -> int:
        """In tokens."""
        return max(map(len, self.ids))

    def groups(self, done: int) -> list[range]:
        """The numbers of prompts that are computed together, from the group on whose beginning ``done`` may hold."""
        size, total = BATCHES_OF_A_GROUP * self.batch_size, len(self.prompts)
        return [range(first, min(first + size, total)) for first in range(done - done % size, total, size)]


@dataclass(frozen=True)
class AnswersIdentity(SamplesIdentity):
    """tokenizer, prompt_file: hashes, the former with the chat template. chat: whether texts are formatted with it."""

    tokenizer: str
    prompt_file: str
    chat: bool
    stop: list[str]


class AnswersFile(SampleFile):
    """Prompts with their answers. ``cut_off`` counts those that ended for their length."""

    def __init__(self, out: Path, identity: Mapping[str, Any], samples: int, *, overwrite: bool) -> None:
        self.cut_off = 0
        super().__init__(out, identity, samples, overwrite=overwrite)

    def tally(self, record: Mapping[str, Any]) -> None:
        self.cut_off += record["finish_reason"] == "length"


@dataclass(frozen=True)
class AnswersDocument(Record):
    """``ladderize generate --prompt-file --json``. cut_off_samples: that ended for their length. Of this run:
    resumed_samples, seconds, output_tokens and output_tokens_per_s; backend and the latter are None if nothing was left
    to do."""

    model: str
    layout: str
    tp_size: int
    backend: str | None
    dtype: str
    prompt_file: str
    out: str
    samples: int
    cut_off_samples: int
    resumed_samples: int
    seconds: float
    output_tokens: int
    output_tokens_per_s: float | None

    def summary(self, max_new_tokens: int) -> str:
        rate = self.output_tokens_per_s
        speed = f", {rate:.0f} tokens/s" if rate is not None else ""
        return (
            f"{self.samples} answers{speed}, {self.cut_off_samples} cut off at --max-new-tokens {max_new_tokens}:"
            f" {self.out}"
        )


def answer_prompts(
    model: str | Path,
    prompt_file: str | Path,
    out: str | Path,
    options: GenerateOptions | None = None,
    *,
    samples: int | None = None,
    batch_size: int | None = None,
    overwrite: bool = False,
    console: Console = SILENT,
) -> AnswersDocument | None:
    """Write a line to ``out`` for each row of ``prompt_file``, its prompt and the model's answer, in their order; goes
    on where a killed run of the same command was. See docs/files.md.

    model: a folder or a hub id. prompt_file: .jsonl, .parquet or .txt. options: by default sampled at temperature 1.
    samples: only the first rows; None: all. batch_size: answers at a time; the KV cache grows with it. None on other
    ranks than 0. Raises UserError for what cannot be answered or written.
    """
    options = options or GenerateOptions(sampling=Sampling(temperature=1.0))
    check_answer_options(Path(out), samples, batch_size, options)
    prompt_file, out = resolved(Path(prompt_file), "--prompt-file "), resolved(Path(out), "--out ")
    check_prompt_file(prompt_file)
    if out == prompt_file:
        raise UserError(f"--out {out} is the --prompt-file; choose another name")
    if is_main_rank():
        check_writable(out)
        check_sample_target(out, overwrite)
    spec = open_spec(model, options)
    with console.stage(f"reading {prompt_file}"):
        digest = file_sha256(str(prompt_file))
        prompts = read_prompts(prompt_file, chat=options.chat, samples=samples)
    with console.progress("tokenising", len(prompts)) as advance:
        ids = encode_prompts(spec, prompts, options.max_new_tokens, advance)
    if answered := sum(prompt.was_answered for prompt in prompts):
        console.note(f"{answered} of {len(prompts)} rows have an answer already, which is left out")
    if not spec.layout.is_dense:
        console.note(f"{spec.name} is converted ({spec.layout}): these are its answers, not those of the dense model")
    eos = () if options.ignore_eos else eos_ids(spec)
    rows = min(batch_size or DEFAULT_SAMPLES_AT_A_TIME, len(prompts))
    document: AnswersDocument | None = run(
        _answer,
        spec,
        Questions(out, digest, prompts, ids, rows, overwrite, eos),
        str(prompt_file),
        options,
        console,
        tp_size=options.tp_size,
        device=options.device,
        threads=options.threads,
    )
    if document is not None:
        console.result(document.summary(options.max_new_tokens))
    return document


def check_answer_options(out: Path, samples: int | None, batch_size: int | None, options: GenerateOptions) -> None:
    """Raise UsageError for options that make no answers, or that take no effect on them."""
    check_sample_options(out, samples, batch_size)
    for name, given in (("compile", options.compile), ("replicate-vocab", options.replicate_vocab)):
        if given:
            raise UsageError(f"--{name} has no effect with --prompt-file; leave it out")


def _answer(
    group: Ranks, spec: ModelSpec, questions: Questions, prompt_file: str, options: GenerateOptions, console: Console
) -> AnswersDocument | None:
    """One rank's part; rank 0 alone holds the file."""
    assert spec.folder is not None
    total, tokenizer = len(questions.prompts), tokenizer_of(spec)
    with contextlib.ExitStack() as stack:
        file = None
        if group.is_main:
            identity = AnswersIdentity(
                **common_identity(spec, options),
                tokenizer=tokenizer_hash(spec.folder),
                prompt_file=questions.prompt_file,
                chat=options.chat,
                stop=list(options.stop),
            )
            file = stack.enter_context(
                AnswersFile(questions.out, identity.to_dict(), total, overwrite=questions.overwrite)
            )
        before = group.broadcast(file.samples if file is not None else 0)
        if before:
            console.note(f"{before} answers are already there")
        backend, seconds, made = None, 0.0, 0
        if before < total:
            ends = AnswerEnds(tokenizer, questions.eos, options.stop)
            with _opened(group, spec, questions, options, console) as worker:
                backend, begin = worker.backend, time.perf_counter()
                for numbers, new in _computed(worker, questions, options, tokenizer, before, console):
                    made += sum(map(len, new))
                    if file is not None:
                        file.append(
                            [
                                questions.prompts[number].answered(*ends.text(questions.ids[number].tolist(), ids))
                                for number, ids in zip(numbers, new, strict=True)
                                if number >= before
                            ]
                        )
                seconds = time.perf_counter() - begin
        if file is None:
            return None
        file.finish()
        return AnswersDocument(
            model=spec.name,
            layout=str(spec.layout),
            tp_size=group.size,
            backend=backend,
            dtype=spec.dtype,
            prompt_file=prompt_file,
            out=str(questions.out),
            samples=file.samples,
            cut_off_samples=file.cut_off,
            resumed_samples=before,
            seconds=seconds,
            output_tokens=made,
            output_tokens_per_s=made / seconds if made else None,
        )


@contextlib.contextmanager
def _opened(
    group: Ranks, spec: ModelSpec, questions: Questions, options: GenerateOptions, console: Console
) -> Iterator[Worker]:
    """The model on this rank."""
    request = RequestOptions(
        tp_size=options.tp_size,
        rows=questions.batch_size,
        max_length=questions.longest_prompt + options.max_new_tokens,
        backend=options.backend,
        dtype=options.dtype,
        device=options.device,
        threads=options.threads,
    )
    with contextlib.ExitStack() as stack:
        with console.progress("loading", spec.config["num_hidden_layers"]) as advance:
            worker = stack.enter_context(opened(group, spec, request, advance))
        yield worker


def _computed(
    worker: Worker, questions: Questions, options: GenerateOptions, tokenizer: Any, done: int, console: Console
) -> Iterator[tuple[range, list[list[int]]]]:
    """The numbers of prompts and their new ids, a group at a time. All ranks yield the same."""
    batch = ContinuousBatch.allocate(
        worker.reader,
        rows=questions.batch_size,
        longest_prompt=questions.longest_prompt,
        longest_text=questions.longest_prompt + options.max_new_tokens,
        eos=questions.eos,
        tokenizer=tokenizer,
    )
    console.note(
        f"{worker.spec.layout}; {worker.backend}; {human_bytes(batch.cache.nbytes)} of KV cache for"
        f" {questions.batch_size} answers at a time"
    )
    groups = questions.groups(done)
    with console.progress("answering", len(questions.prompts), done=groups[0].start) as advance:
        for numbers in groups:
            prompts = [
                Prompt(number, questions.ids[number].tolist(), options.max_new_tokens, options.sampling, options.stop)
                for number in numbers
            ]
            with torch.inference_mode():
                new = batch.run(prompts, advance)
            yield numbers, new
