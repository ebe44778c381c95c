"""``ladderize generate --prompt-file``: a model's own answers to instructions, as training data.

Rows that end make room for prompts that wait (runtime/requests/continuous.py), within a group of prompts at a time. A
group is always computed in the same way, and a run that was killed begins with the group that it was at.
"""

import contextlib
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from ladderize.chat_template import DATE_OF_DATA
from ladderize.console import SILENT, Console, human_bytes
from ladderize.data import file_sha256
from ladderize.errors import UsageError, UserError
from ladderize.files.regular import check_regular, read_lines, resolved
from ladderize.modeling import tokenizer_hash
from ladderize.ranks.group import Ranks
from ladderize.rows import Formats, Row, check_row, jsonl_rows, parquet_rows, read_messages
from ladderize.runtime.requests.continuous import ContinuousBatch, Prompt, StopStrings
from ladderize.runtime.requests.options import DEFAULT_SAMPLES_AT_A_TIME, GenerateOptions, RequestOptions
from ladderize.runtime.requests.service import check_request, opened
from ladderize.runtime.sampling import Sampling
from ladderize.runtime.spec import ModelSpec, eos_ids
from ladderize.runtime.texts.prompts import PromptEncoder
from ladderize.runtime.texts.samples import Samples, SamplesDocument, checked_target, make_samples

# Answers are written a group of so many full batches at a time. At its end rows stand empty until the last answer is
# whole: the larger it is, the less time that takes, and the more work a killed run does again.
BATCHES_OF_A_GROUP = 8
SUFFIXES_OF_PROMPTS = (".jsonl", ".parquet", ".txt")
PROMPT_FORMATS = Formats(
    {name: (name,) for name in ("messages", "conversations", "prompt", "text")},
    "messages, conversations, prompt or text",
)


@dataclass(frozen=True)
class FilePrompt:
    """One row. origin: its place, for people. asked: the messages of a conversation, none of them the last answer, or
    a text to continue. was_answered: whether the row had an answer, which was left out."""

    origin: str
    asked: list[dict[str, Any]] | str
    was_answered: bool = False

    def answered(self, text: str, finish_reason: str) -> dict[str, Any]:
        """The row with an answer, as ``adapt --data`` reads it."""
        if isinstance(self.asked, str):
            row: dict[str, Any] = {"prompt": self.asked, "completion": text}
        else:
            row = {"messages": [*self.asked, {"role": "assistant", "content": text}]}
        return {**row, "finish_reason": finish_reason}


def read_prompts(path: Path, *, chat: bool, samples: int | None) -> list[FilePrompt]:
    """The first ``samples`` prompts of a file, or all. chat: a text is what a user says, not one to continue.

    Raises UserError that names the line for a row that cannot be used, and for fewer prompts than are asked for.
    """
    prompts: list[FilePrompt] = []
    for row in _rows(path):
        if samples is not None and len(prompts) == samples:
            break
        prompts.append(_prompt(row, chat))
    if not prompts:
        raise UserError(f"--prompt-file {path} holds no prompts")
    if samples is not None and len(prompts) < samples:
        raise UserError(f"--num-samples {samples} asks for more than the {len(prompts)} prompts of {path}; lower it")
    return prompts


def _rows(path: Path) -> Iterator[Row]:
    if path.suffix == ".txt":
        yield from _lines(path)
    else:
        yield from (jsonl_rows if path.suffix == ".jsonl" else parquet_rows)(path, PROMPT_FORMATS)


def _lines(path: Path) -> Iterator[Row]:
    for number, line in enumerate(read_lines(path), start=1):
        origin = f"{path}, line {number}"
        try:
            text = line.decode().rstrip("\r\n")
        except UnicodeDecodeError:
            raise UserError(f"{origin} is not UTF-8 text") from None
        if text.strip():
            yield Row({"text": text}, origin)


def _prompt(row: Row, chat: bool) -> FilePrompt:
    name = check_row(row, PROMPT_FORMATS)
    if name in ("prompt", "text"):
        text = str(row.values[name])
        asked = [{"role": "user", "content": text}] if chat else text
        return FilePrompt(row.origin, asked, was_answered=row.values.get("completion") is not None)
    messages = read_messages(row, name)
    before = len(messages)
    while messages and messages[-1]["role"] == "assistant":
        messages.pop()
    if not messages:
        raise UserError(f"{row.origin}: its {name} are the assistant's alone, so there is nothing to answer")
    # what parquet may hold and JSON may not (a date, say) is written as text
    plain: list[dict[str, Any]] = json.loads(json.dumps(messages, default=str))
    return FilePrompt(row.origin, plain, was_answered=len(messages) < before)


def encode_prompts(
    spec: ModelSpec,
    prompts: Sequence[FilePrompt],
    max_new_tokens: int,
    advance: Callable[[int], None] = lambda count: None,
) -> list[np.ndarray]:
    """int32 [tokens] of each, which ``max_new_tokens`` more fit behind. A chat template sees the day that it sees when
    the answers are trained on."""
    encoder, found = PromptEncoder(spec, max_new_tokens, date=DATE_OF_DATA), []
    for prompt in prompts:
        found.append(np.asarray(encoder.ids(prompt.asked, prompt.origin), dtype=np.int32))
        advance(1)
    return found


# ---- answers ----


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


@dataclass(frozen=True)
class AnswersDocument(SamplesDocument):
    """cut_off_samples: that ended for their length. output_tokens: of this run."""

    prompt_file: str
    cut_off_samples: int
    output_tokens: int

    def summary(self, max_new_tokens: int) -> str:
        return (
            f"{self.samples} answers{self.speed}, {self.cut_off_samples} cut off at --max-new-tokens {max_new_tokens}:"
            f" {self.out}"
        )


@dataclass(frozen=True)
class AnswerSamples(Samples):
    """Answers to ``prompts``. ids: of each prompt, int32 [tokens]. prompt_sha256: of the file. stops: strings that end
    an answer, too."""

    NOUN, DOCUMENT = "answers", AnswersDocument

    prompt_file: Path
    prompt_sha256: str
    prompts: list[FilePrompt]
    ids: list[np.ndarray]
    stops: tuple[str, ...]

    def identity(self, spec: ModelSpec, options: GenerateOptions, tokenizer: Any) -> dict[str, Any]:
        assert spec.folder is not None
        return {
            "tokenizer": tokenizer_hash(spec.folder),  # with the chat template
            "prompt_file": self.prompt_sha256,
            "chat": options.chat,
            "stop": list(self.stops),
        }

    @contextlib.contextmanager
    def opened(
        self, group: Ranks, spec: ModelSpec, options: GenerateOptions, tokenizer: Any, done: int, console: Console
    ) -> Iterator[tuple[str, Iterator[tuple[Sequence[int], list[list[int]]]]]]:
        longest = max(map(len, self.ids))
        ranks = {name: getattr(options, name) for name in ("tp_size", "backend", "dtype", "device", "threads")}
        request = RequestOptions(rows=self.batch_size, max_length=longest + options.max_new_tokens, **ranks)
        with contextlib.ExitStack() as stack:
            with console.progress("loading", spec.config["num_hidden_layers"]) as loaded:
                worker = stack.enter_context(opened(group, spec, request, loaded))
            batch = ContinuousBatch(
                worker.reader,
                rows=self.batch_size,
                longest_prompt=longest,
                longest_text=longest + options.max_new_tokens,
                eos=self.eos,
                tokenizer=tokenizer,
            )
            if note := worker.reader.model.operations.note:
                console.warn(note)
            console.note(
                f"{spec.layout}; {worker.backend}; {human_bytes(batch.cache.nbytes)} of KV cache for"
                f" {self.batch_size} answers at a time"
            )
            size = BATCHES_OF_A_GROUP * self.batch_size
            begin = done - done % size
            with console.progress("answering", self.total, done=begin) as advance:
                groups = (range(first, min(first + size, self.total)) for first in range(begin, self.total, size))
                yield worker.backend, ((group, batch.run(self._asked(group, options), advance)) for group in groups)

    def _asked(self, numbers: range, options: GenerateOptions) -> list[Prompt]:
        return [
            Prompt(number, self.ids[number].tolist(), options.max_new_tokens, options.sampling, self.stops)
            for number in numbers
        ]

    def row(self, number: int, new: list[int], tokenizer: Any) -> dict[str, Any]:
        ends = AnswerEnds(tokenizer, self.eos, self.stops)
        return self.prompts[number].answered(*ends.text(self.ids[number].tolist(), new))

    def counted(self, row: Mapping[str, Any]) -> dict[str, int]:
        return {"cut_off": row["finish_reason"] == "length"}

    def outcome(self, counts: Mapping[str, int], output_tokens: int) -> dict[str, Any]:
        return {
            "prompt_file": str(self.prompt_file),
            "cut_off_samples": counts["cut_off"],
            "output_tokens": output_tokens,
        }


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
    for name, given in (("compile", options.compile), ("replicate-vocab", options.replicate_vocab)):
        if given:
            raise UsageError(f"--{name} has no effect with --prompt-file; leave it out")
    out = checked_target(Path(out), samples, batch_size, overwrite)
    prompt_file = resolved(Path(prompt_file), "--prompt-file ")
    if prompt_file.suffix not in SUFFIXES_OF_PROMPTS:
        raise UsageError(f"--prompt-file {prompt_file} must end in one of {', '.join(SUFFIXES_OF_PROMPTS)}")
    if not prompt_file.exists():
        raise UserError(f"--prompt-file {prompt_file} does not exist")
    check_regular(prompt_file)
    if out == prompt_file:
        raise UserError(f"--out {out} is the --prompt-file; choose another name")
    spec = check_request(str(model), options)
    with console.stage(f"reading {prompt_file}"):
        digest = file_sha256(str(prompt_file))
        prompts = read_prompts(prompt_file, chat=options.chat, samples=samples)
    with console.progress("tokenising", len(prompts)) as advance:
        ids = encode_prompts(spec, prompts, options.max_new_tokens, advance)
    if answered := sum(prompt.was_answered for prompt in prompts):
        console.note(f"{answered} of {len(prompts)} rows have an answer already, which is left out")
    rows = min(batch_size or DEFAULT_SAMPLES_AT_A_TIME, len(prompts))
    eos = () if options.ignore_eos else eos_ids(spec)
    answers = AnswerSamples(out, len(prompts), rows, overwrite, eos, prompt_file, digest, prompts, ids, options.stop)
    document: AnswersDocument | None = make_samples(spec, answers, options, console)
    if document is not None:
        console.result(document.summary(options.max_new_tokens))
    return document
