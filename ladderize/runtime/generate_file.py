"""The command ``ladderize generate --out``: answers to the rows of a file, or texts from BOS alone, as training data.

A line depends on its number, the seed and the options of sampling. Lines are written in order, a batch at a time, into
a file beside OUT, which gets OUT's name when it is complete. The same command goes on with that file. Batches are cut
at multiples of their size, so a line is computed in the same row of the same products wherever a run begins.
"""

import contextlib
import hashlib
import itertools
import json
import os
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

import torch

from ladderize.chat_template import DATE_OF_DATA
from ladderize.checkpoint.opening import read_checkpoint
from ladderize.checkpoint.tensors import fingerprint
from ladderize.console import SILENT, Console, human_bytes, sentence
from ladderize.data import file_sha256
from ladderize.errors import UsageError, UserError
from ladderize.files.documents import check_writable
from ladderize.files.parsing import parse_json
from ladderize.files.records import Record
from ladderize.files.regular import read_lines, resolved
from ladderize.files.temporaries import fsync, try_lock
from ladderize.modeling import load_tokenizer, tokenizer_hash
from ladderize.ranks.environment import already_started, is_main_rank
from ladderize.ranks.group import Ranks, ignore
from ladderize.rows import Formats, Row, check_row, jsonl_rows, parquet_rows, read_messages
from ladderize.runtime.decode import generate_tokens
from ladderize.runtime.generate import PromptEncoder, check_generate, open_batch
from ladderize.runtime.launch import Report, run
from ladderize.runtime.sampling import DEFAULT_TEXTS_AT_A_TIME, GenerateOptions, Sampling
from ladderize.runtime.spec import ModelSpec, eos_ids

PROMPT_FORMATS = Formats(
    {name: (name,) for name in ("messages", "conversations", "prompt", "text")},
    "messages, conversations, prompt or text",
)
Asked = str | list[dict[str, Any]]  # a text to continue, or the messages of a conversation without its last answer


@dataclass(frozen=True)
class FileTask:
    """All prompts, and the options for continuing them.

    prompts: token ids of each.
    batch_size: texts at a time.
    """

    spec: ModelSpec
    options: GenerateOptions
    eos: tuple[int, ...]
    prompts: list[list[int]]
    batch_size: int

    @property
    def longest(self) -> int:
        """The number of tokens of the longest prompt."""
        return max(map(len, self.prompts))

    def parts(self, done: int, size: int) -> Iterator[range]:
        """Yield the numbers of ``size`` texts at a time, from the part that holds the first unfinished text.

        done: the number of finished texts.
        """
        for first in range(done - done % size, len(self.prompts), size):
            yield range(first, min(first + size, len(self.prompts)))


# A function that answers the prompts of a task that are not ``done``. It reports words for its backend (str), and then
# the new ids of each whole batch: (number of the first text, list of ids).
Engine = Callable[[FileTask, int, Report, Console], object]


@dataclass(frozen=True)
class GenerateFileDocument(Record):
    """The output of ``ladderize generate --out --json``.

    backend, output_tokens_per_s: None where nothing was left to do.
    ended_samples: texts that EOS ended, not their length.
    output_tokens, output_tokens_per_s: of this run.
    """

    model: str
    layout: str
    backend: str | None
    out: str
    samples: int
    ended_samples: int
    output_tokens: int
    output_tokens_per_s: float | None


def generate_file(
    model: str | Path,
    out: str | Path,
    prompt_file: str | Path | None = None,
    options: GenerateOptions | None = None,
    *,
    samples: int | None = None,
    batch_size: int = DEFAULT_TEXTS_AT_A_TIME,
    engine: Engine | None = None,
    console: Console = SILENT,
) -> GenerateFileDocument | None:
    """Write a line to ``out`` for each row of ``prompt_file``, or ``samples`` texts from BOS; see docs/files.md.

    A killed run goes on when it is called again. Returns None on other ranks than 0. Raises UserError for prompts that
    cannot be answered, or an OUT that cannot be written.

    model: a folder or a hub id.
    prompt_file: .jsonl, .parquet or .txt; None: texts begin with BOS alone.
    options: by default sampled at temperature 1.
    samples: the number of texts; of a file, the number of its first rows; None: all.
    batch_size: texts at a time; the KV cache grows with it.
    engine: the engine that answers; None: the runtime.
    """
    options = options or GenerateOptions(sampling=Sampling(temperature=1.0))
    if batch_size < 1:
        raise UsageError(f"--batch-size must be at least 1, not {batch_size}")
    if prompt_file is None:
        _check_from_bos(options, samples)
    out = Path(out)
    if out.suffix != ".jsonl":
        raise UsageError(f"--out {out} must end in .jsonl, which tells --data and --perplexity how to read it")
    out = resolved(out, "--out ")
    if is_main_rank():
        check_writable(out)
        if out.exists():
            raise UserError(f"--out {out} already exists; choose another name, or delete it")
    if engine is not None and already_started():
        raise UserError("vLLM starts its own ranks; leave the launcher out")
    spec = check_generate(str(model), options)
    assert spec.folder is not None
    asked: list[Asked] = []
    if prompt_file is None:
        tokenizer = load_tokenizer(spec.folder)
        prompts = [[bos_id(spec, tokenizer, options.max_new_tokens)]] * int(samples or 0)
    else:
        # a chat template sees the day that it sees when the answers are trained on
        encoder = PromptEncoder(spec, options.max_new_tokens, date=DATE_OF_DATA)
        tokenizer = encoder.tokenizer
        with console.stage(f"reading {prompt_file}"):
            rows = read_prompts(Path(prompt_file), chat=options.chat, samples=samples)
        asked, prompts = [text for _, text in rows], []
        with console.progress("tokenising", len(rows)) as advance:
            for origin, text in rows:
                prompts.append(encoder.ids(text, origin))
                advance(1)
    if not spec.layout.is_dense:
        console.note(f"{spec.name} is converted ({spec.layout}): this is its text, not the dense model's")
    eos = () if options.ignore_eos else eos_ids(spec)
    task = FileTask(spec, options, eos, prompts, min(batch_size, len(prompts)))
    identity = _identity(task, prompt_file, "runtime" if engine is None else "vllm")
    with LineWriter(task, asked, tokenizer, out, identity, console) if is_main_rank() else nullcontext() as lines:
        done = lines.lines if lines is not None else 0
        if done:
            console.note(f"{done} texts are already there")
        if done < len(prompts) or already_started():  # with a launcher, other ranks wait for ``done``
            report = ignore if lines is None else lines.report
            (engine or answer_on_runtime)(task, done, report, console)
        return None if lines is None else lines.finish()


# ---- prompts ----


def _check_from_bos(options: GenerateOptions, samples: int | None) -> None:
    if samples is None or samples < 1:
        raise UsageError("--from-bos needs --num-samples N: how many texts")
    if options.chat:
        raise UsageError("--from-bos begins with the BOS token alone; leave --chat out")
    if options.sampling.temperature == 0:
        raise UsageError(
            "--temperature 0 with --from-bos would give the same text every time; give a temperature above 0"
        )


def bos_id(spec: ModelSpec, tokenizer: Any, max_new_tokens: int) -> int:
    """Return the id of the BOS token, of config.json or else the tokenizer. Raises UserError where there is none, or no
    room for a text."""
    bos = spec.config.get("bos_token_id")
    bos = getattr(tokenizer, "bos_token_id", None) if bos is None else bos
    if type(bos) is not int or not 0 <= bos < spec.config["vocab_size"]:
        raise UserError(
            f"{spec.name} has no BOS token among its {spec.config['vocab_size']} tokens (bos_token_id of config.json is"
            f" {bos!r}), so --from-bos has nothing to begin with"
        )
    if max_new_tokens + 1 > spec.positions:
        raise UserError(
            f"--max-new-tokens {max_new_tokens} and the BOS token exceed the model's {spec.positions} positions"
        )
    return bos


def read_prompts(path: Path, *, chat: bool, samples: int | None) -> list[tuple[str, Asked]]:
    """Return the first ``samples`` prompts of a file (None: all), each with its place for people.

    chat: a text is a user's message, not one to continue.
    Raises UserError that names the line for a row that cannot be used, and for fewer prompts than are asked for.
    """
    path = resolved(path, "--prompt-file ")
    readers = {".jsonl": jsonl_rows, ".parquet": parquet_rows, ".txt": _text_rows}
    if path.suffix not in readers:
        raise UsageError(f"--prompt-file {path} must end in one of {', '.join(readers)}")
    if not path.exists():
        raise UserError(f"--prompt-file {path} does not exist")
    rows = itertools.islice(readers[path.suffix](path, PROMPT_FORMATS), samples)
    prompts = [(row.origin, _asked(row, chat)) for row in rows]
    if len(prompts) < (samples or 1):
        raise UserError(f"--prompt-file {path} holds {len(prompts)} prompts, and {samples or 1} are asked for")
    return prompts


def _text_rows(path: Path, formats: Formats) -> Iterator[Row]:
    for number, line in enumerate(read_lines(path), start=1):
        origin = f"{path}, line {number}"
        try:
            text = line.decode().rstrip("\r\n")
        except UnicodeDecodeError:
            raise UserError(f"{origin} is not UTF-8 text") from None
        if text.strip():
            yield Row({"text": text}, origin)


def _asked(row: Row, chat: bool) -> Asked:
    name = check_row(row, PROMPT_FORMATS)
    if name in ("prompt", "text"):
        text = str(row.values[name])
        return [{"role": "user", "content": text}] if chat else text
    messages = read_messages(row, name)
    while messages and messages[-1]["role"] == "assistant":
        messages.pop()
    if not messages:
        raise UserError(f"{row.origin}: its {name} are the assistant's alone, so there is nothing to answer")
    # what parquet may hold and JSON may not (a date, say) is written as text
    plain: list[dict[str, Any]] = json.loads(json.dumps(messages, default=str))
    return plain


# ---- the file ----


def _identity(task: FileTask, prompt_file: str | Path | None, engine: str) -> dict[str, Any]:
    """Return all that decides a line. The number of ranks and the size of a batch change rounding only."""
    spec, options = task.spec, task.options
    assert spec.folder is not None
    return {
        "model": fingerprint(read_checkpoint(spec.folder)),
        "tokenizer": tokenizer_hash(spec.folder),  # with the chat template
        "layout": spec.layout.to_config(),
        "dtype": spec.dtype,
        "engine": engine,
        "prompts": task.prompts[0] if prompt_file is None else file_sha256(str(prompt_file)),
        "chat": options.chat,
        "eos": list(task.eos),
        "max_new_tokens": options.max_new_tokens,
        **vars(options.sampling),
    }


class LineWriter:
    """The writer of the unfinished OUT: a locked file beside it, whose name holds a hash of all that decides its lines.

    So only the same command goes on with it. It is a context of the one process that writes, and receives an engine's
    reports. Raises UserError while another run of the same command writes OUT.

    asked: what each line answers; empty: texts begin with BOS.
    lines: the number of complete lines.
    """

    def __init__(
        self,
        task: FileTask,
        asked: list[Asked],
        tokenizer: Any,
        out: Path,
        identity: dict[str, Any],
        console: Console,
    ) -> None:
        digest = hashlib.sha256(json.dumps(identity, sort_keys=True).encode()).hexdigest()[:12]
        self.task, self.asked, self.tokenizer, self.out, self.console = task, asked, tokenizer, out, console
        self.path, self.lines = out.with_name(f"{out.name}.{digest}.part"), 0
        self.reasons = Counter[str]()
        self.backend: str | None = None
        self.tokens, self.begin, self.seconds = 0, 0.0, 0.0
        self.bar = contextlib.ExitStack()
        self.advance: Callable[[int], None] = lambda count: None
        self.file = self.path.open("ab", buffering=0)
        if not try_lock(self.file.fileno()):
            self.file.close()
            raise UserError(f"another run writes {out}; wait for it, or choose another --out")
        end = 0
        for line in itertools.islice(read_lines(self.path), len(task.prompts)):
            try:  # the rest of a line after a kill or a power failure is cut off
                reason = parse_json(line)["finish_reason"] if line.endswith(b"\n") else None
            except (ValueError, KeyError, TypeError):
                break
            if reason is None:
                break
            self.reasons[reason] += 1
            self.lines += 1
            end += len(line)
        self.file.truncate(end)

    def report(self, value: Any) -> None:
        """Take what an ``Engine`` reports."""
        if isinstance(value, str):
            self.backend, self.begin = value, time.perf_counter()
            bar = self.console.progress("generating", len(self.task.prompts), done=self.lines)
            self.advance = self.bar.enter_context(bar)
            return
        first, new = value
        self.tokens += sum(map(len, new))
        self.seconds = time.perf_counter() - self.begin
        rows = [self._row(first + place, ids) for place, ids in enumerate(new)]
        self.append(rows[self.lines - first :])  # of a batch that was cut off by a kill

    def append(self, rows: Sequence[dict[str, Any]]) -> None:
        """Write rows. Raises UserError where the disk is full."""
        try:
            left = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows).encode()
            while left:
                left = left[self.file.write(left) :]
        except OSError as error:
            raise UserError(
                f"{self.path} cannot be written: {sentence(error)}; once it can, run the same command again to resume"
            ) from None
        self.reasons.update(row["finish_reason"] for row in rows)
        self.lines += len(rows)
        self.advance(len(rows))

    def _row(self, number: int, new: list[int]) -> dict[str, Any]:
        prompt, ended = self.task.prompts[number], new[-1] in self.task.eos
        reason = {"finish_reason": "stop" if ended else "length"}
        if not self.asked:
            ids = [*prompt, *new]
            text = {} if self.tokenizer is None else {"text": self.tokenizer.decode(ids, skip_special_tokens=True)}
            return {**text, "input_ids": ids, **reason}
        answer, asked = answer_text(self.tokenizer, prompt, new[:-1] if ended else new), self.asked[number]
        if isinstance(asked, str):
            return {"prompt": asked, "completion": answer, **reason}
        return {"messages": [*asked, {"role": "assistant", "content": answer}], **reason}

    def finish(self) -> GenerateFileDocument:
        """Give the file the name OUT; return the outcome of the run, and show it."""
        self.bar.close()
        if self.out.exists():
            raise UserError(f"--out {self.out} appeared meanwhile; the texts are in {self.path}")
        os.fsync(self.file.fileno())
        os.replace(self.path, self.out)
        fsync(self.out.parent)
        document = GenerateFileDocument(
            model=self.task.spec.name,
            layout=str(self.task.spec.layout),
            backend=self.backend,
            out=str(self.out),
            samples=self.lines,
            ended_samples=self.reasons["stop"],
            output_tokens=self.tokens,
            output_tokens_per_s=self.tokens / self.seconds if self.tokens else None,
        )
        speed = f", {document.output_tokens_per_s:.0f} tokens/s" if document.output_tokens_per_s else ""
        self.console.result(
            f"{self.lines} texts{speed}, {self.reasons['length']} cut off at --max-new-tokens"
            f" {self.task.options.max_new_tokens}: {self.out}"
        )
        return document

    def __enter__(self) -> "LineWriter":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.bar.close()
        if not self.lines:
            self.path.unlink(missing_ok=True)
        self.file.close()


def answer_text(tokenizer: Any, prompt: list[int], new: list[int]) -> str:
    """Return the text that ``new`` adds to a prompt, without special tokens.

    It is decoded with the prompt, since ids decoded alone may lose the space that they begin with (SentencePiece).
    """
    before = str(tokenizer.decode(prompt, skip_special_tokens=True))
    both = str(tokenizer.decode([*prompt, *new], skip_special_tokens=True))
    return both[len(before) :] if both.startswith(before) else str(tokenizer.decode(new, skip_special_tokens=True))


# ---- the runtime ----


def answer_on_runtime(task: FileTask, done: int, report: Report, console: Console) -> None:
    """Answer on ladderize's own ranks. This is an ``Engine``."""
    ranks = {name: getattr(task.options, name) for name in ("tp_size", "device", "threads")}
    run(_answer_on_rank, task, done, console, **ranks, report=report)


def _answer_on_rank(group: Ranks, task: FileTask, done: int, console: Console) -> None:
    done = group.broadcast(done)
    if done == len(task.prompts):
        return
    options = task.options
    generator, backend = open_batch(group, task.spec, task.batch_size, task.longest, options, console)
    console.note(
        f"{task.spec.layout}; {backend}; {human_bytes(generator.cache.nbytes)} of KV cache for {task.batch_size} texts"
        " at a time"
    )
    group.report(backend)
    with torch.inference_mode():
        for numbers in task.parts(done, task.batch_size):
            prompts = [task.prompts[number] for number in numbers]
            prompts += prompts[-1:] * (task.batch_size - len(prompts))  # computed, and not waited for
            new: list[list[int]] = [[] for _ in numbers]
            for made in generate_tokens(
                generator,
                prompts,
                max_new_tokens=options.max_new_tokens,
                sampling=options.sampling,
                eos=task.eos,
                first_row=numbers[0],
            ):
                for ids, more in zip(new, made, strict=False):
                    ids += more
                if all(ids[-1] in task.eos for ids in new):
                    break
            group.report((numbers[0], new))
    generator.model.collectives.close()
