"""The command ``ladderize generate --out``: answers to the rows of a file, or texts from BOS alone, as training data.

A line depends on its number, the seed and the options of sampling. Lines are written in order, a batch at a time, into
a file beside OUT, which gets OUT's name when it is complete. The same command goes on with that file. Batches are cut
at multiples of their size, so a line is computed in the same row of the same products wherever a run begins.
"""

import contextlib
import hashlib
import json
import os
import shutil
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np
import torch

from ladderize.chat_template import DATE_OF_DATA
from ladderize.checkpoint.opening import read_checkpoint
from ladderize.checkpoint.tensors import fingerprint
from ladderize.console import SILENT, Console, human_bytes, sentence
from ladderize.data import file_sha256
from ladderize.errors import UsageError, UserError
from ladderize.files.documents import check_writable, read_json
from ladderize.files.output import existing_parent
from ladderize.files.parsing import parse_json
from ladderize.files.records import Record
from ladderize.files.regular import read_lines, resolved
from ladderize.files.temporaries import fsync, try_lock
from ladderize.modeling import load_tokenizer, tokenizer_hash
from ladderize.ranks.environment import already_started, is_main_rank
from ladderize.ranks.group import Ranks
from ladderize.runtime.decode import generate_tokens
from ladderize.runtime.generate import PromptEncoder, check_generate, open_batch, tokenizer_of
from ladderize.runtime.launch import Report, run
from ladderize.runtime.prompt_file import FilePrompt, read_prompts
from ladderize.runtime.sampling import DEFAULT_TEXTS_AT_A_TIME, GenerateOptions, Sampling
from ladderize.runtime.spec import ModelSpec, eos_ids

SHORTEST_LINE = len('{"input_ids": [1, 2]}\n')


# ---- the task ----


def bos_id(spec: ModelSpec, tokenizer: Any) -> int:
    """Return the id of the BOS token, of generation_config.json, else config.json, else the tokenizer. Raises UserError
    where none is named."""
    path = spec.folder / "generation_config.json" if spec.folder is not None else None
    named = [read_json(path).get("bos_token_id")] if path is not None and path.is_file() else []
    named += [spec.config.get("bos_token_id"), getattr(tokenizer, "bos_token_id", None)]
    bos = next((value for value in named if value is not None), None)
    if bos is None:
        raise UserError(
            f"{spec.name} has no BOS token (no bos_token_id in its config.json), so --from-bos has nothing to begin"
            " with"
        )
    if type(bos) is not int or not 0 <= bos < spec.config["vocab_size"]:
        raise UserError(f"{spec.name}: bos_token_id is {bos!r}, but the model has {spec.config['vocab_size']} tokens")
    return bos


@dataclass(frozen=True)
class FileTask:
    """All prompts, and the options for continuing them.

    bos: the token that every text begins with; None: texts begin with prompts.
    prompts: token ids of each, int32 [tokens].
    total: the number of texts.
    batch_size: texts at a time.
    """

    spec: ModelSpec
    options: GenerateOptions
    eos: tuple[int, ...]
    bos: int | None
    prompts: list[np.ndarray]
    total: int
    batch_size: int

    @property
    def longest(self) -> int:
        """The number of tokens of the longest prompt."""
        return 1 if self.bos is not None else max(map(len, self.prompts))

    def ids(self, number: int) -> list[int]:
        """Return the token ids that a text begins with."""
        return [self.bos] if self.bos is not None else list(self.prompts[number].tolist())

    def parts(self, done: int, size: int) -> Iterator[range]:
        """Yield the numbers of ``size`` texts at a time, from the part that holds the first unfinished text.

        done: the number of finished texts.
        """
        for first in range(done - done % size, self.total, size):
            yield range(first, min(first + size, self.total))


# A function that answers the prompts of a task that are not ``done``. It reports words for its backend (str), the
# number of further texts that have ended (int), and then the new ids of each whole batch: (number of the first text,
# list of ids).
Engine = Callable[[FileTask, int, Report, Console], object]


@dataclass(frozen=True)
class GenerateFileDocument(Record):
    """The output of ``ladderize generate --out --json``.

    backend, output_tokens_per_s: None where nothing was left to do.
    ended_samples: texts that EOS or a stop text ended, not their length.
    resumed_samples: texts that were there before this run.
    output_tokens, seconds, output_tokens_per_s: of this run.
    """

    model: str
    layout: str
    tp_size: int
    backend: str | None
    dtype: str
    prompt_file: str | None
    out: str
    samples: int
    ended_samples: int
    resumed_samples: int
    output_tokens: int
    seconds: float
    output_tokens_per_s: float | None


def generate_file(
    model: str | Path,
    out: str | Path,
    prompt_file: str | Path | None = None,
    options: GenerateOptions | None = None,
    *,
    samples: int | None = None,
    batch_size: int | None = None,
    overwrite: bool = False,
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
    out = _checked_target(Path(out), samples, batch_size, overwrite)
    if prompt_file is None:
        _check_from_bos(options, samples)
    else:
        prompt_file = resolved(Path(prompt_file), "--prompt-file ")
        if out == prompt_file:
            raise UserError(f"--out {out} is the --prompt-file; choose another name")
    if engine is not None and already_started():
        raise UserError("vLLM starts its own ranks; leave the launcher out")
    spec = check_generate(str(model), options)
    assert spec.folder is not None
    tokenizer = load_tokenizer(spec.folder) if prompt_file is None else tokenizer_of(spec)
    prompts: list[FilePrompt] = []
    ids: list[np.ndarray] = []
    bos = None
    if prompt_file is None:
        bos = bos_id(spec, tokenizer)
        if options.max_new_tokens + 1 > spec.positions:
            raise UserError(
                f"--max-new-tokens {options.max_new_tokens} and the BOS token exceed the model's {spec.positions}"
                " positions"
            )
        if tokenizer is None:
            console.note(f"{spec.name} has no tokenizer: the lines get input_ids without text")
    else:
        with console.stage(f"reading {prompt_file}"):
            prompts = read_prompts(prompt_file, chat=options.chat, samples=samples)
        # a chat template sees the day that it sees when the answers are trained on
        encoder = PromptEncoder(spec, options.max_new_tokens, date=DATE_OF_DATA)
        with console.progress("tokenising", len(prompts)) as advance:
            for prompt in prompts:
                ids.append(np.asarray(encoder.ids(prompt.asked, prompt.origin), dtype=np.int32))
                advance(1)
        if answered := sum(prompt.was_answered for prompt in prompts):
            console.note(f"{answered} of {len(prompts)} rows have an answer already, which is left out")
    if not spec.layout.is_dense:
        console.note(f"{spec.name} is converted ({spec.layout}): this is its text, not the dense model's")
    total = len(prompts) or int(samples or 0)
    _check_disk(out, total)
    eos = () if options.ignore_eos else eos_ids(spec)
    task = FileTask(spec, options, eos, bos, ids, total, min(batch_size or DEFAULT_TEXTS_AT_A_TIME, total))
    identity = _identity(task, prompt_file, "runtime" if engine is None else "vllm")
    with contextlib.ExitStack() as stack:
        part = stack.enter_context(PartFile(out, identity, total, overwrite=overwrite)) if is_main_rank() else None
        done = part.lines if part is not None else 0
        lines = LineWriter(task, prompts, tokenizer, part, console, stack)
        if done:
            console.note(f"{done} texts are already there")
        if done < total or already_started():  # with a launcher, other ranks wait for ``done``
            (engine or answer_on_runtime)(task, done, lines.report, console)
        if part is None:
            return None
        part.finish()
    return lines.document(out, prompt_file, done)


def _check_from_bos(options: GenerateOptions, samples: int | None) -> None:
    if samples is None:
        raise UsageError("without a file of prompts, --num-samples has to say how many texts to make")
    if options.chat:
        raise UsageError("--from-bos begins with the BOS token alone; leave --chat out")
    if options.stop:
        raise UsageError("--stop has no effect without --prompt-file")
    if options.sampling.temperature == 0:
        raise UsageError(
            "--temperature 0 with --from-bos would give the same text every time; give a temperature above 0"
        )


def _checked_target(out: Path, samples: int | None, batch_size: int | None, overwrite: bool) -> Path:
    if out.suffix != ".jsonl":
        raise UsageError(f"--out {out} must end in .jsonl, which tells --data and --perplexity how to read it")
    for name, count in (("--num-samples", samples), ("--batch-size", batch_size)):
        if count is not None and count < 1:
            raise UsageError(f"{name} must be at least 1, not {count}")
    out = resolved(out, "--out ")
    if is_main_rank():
        check_writable(out)
        if out.exists() and not overwrite:
            raise UserError(f"--out {out} already exists; choose another name, or pass --overwrite")
    return out


def _check_disk(out: Path, samples: int) -> None:
    """Raise UserError if the disk is too small for the lines even where each text has one token."""
    needed, free = samples * SHORTEST_LINE, shutil.disk_usage(existing_parent(out)).free
    if needed > free:
        raise UserError(
            f"--num-samples {samples:,} takes at least {human_bytes(needed)} beside {out}, where {human_bytes(free)}"
            " are free; lower it, or choose another disk"
        )


def _identity(task: FileTask, prompt_file: Path | None, engine: str) -> dict[str, Any]:
    """Return all that decides a line. The number of ranks and the size of a batch change rounding only."""
    spec, options = task.spec, task.options
    assert spec.folder is not None
    return {
        "model": fingerprint(read_checkpoint(spec.folder)),
        "tokenizer": tokenizer_hash(spec.folder),  # with the chat template
        "layout": spec.layout.to_config(),
        "dtype": spec.dtype,
        "engine": engine,
        "prompts": None if prompt_file is None else file_sha256(str(prompt_file)),
        "bos": task.bos,
        "chat": options.chat,
        "stop": list(options.stop),
        "eos": list(task.eos),
        "max_new_tokens": options.max_new_tokens,
        **vars(options.sampling),
    }


# ---- the file ----


class PartFile:
    """The unfinished OUT: a locked file beside it, whose name holds a hash of all that decides its lines.

    So only the same command goes on with it. It is a context of the one process that writes. Raises UserError while
    another run of the same command writes OUT.

    overwrite: an OUT that is there at the end is replaced.

    lines: the number of complete lines.
    """

    def __init__(self, out: Path, identity: dict[str, Any], most: int, *, overwrite: bool = False) -> None:
        digest = hashlib.sha256(json.dumps(identity, sort_keys=True).encode()).hexdigest()[:12]
        self.out, self.path, self.overwrite = out, out.with_name(f"{out.name}.{digest}.part"), overwrite
        self.reasons, self.lines = Counter[str](), 0
        self.file = self.path.open("ab", buffering=0)
        if not try_lock(self.file.fileno()):
            self.file.close()
            raise UserError(f"another run writes {out}; wait for it, or choose another --out")
        end = 0
        for line in read_lines(self.path):
            try:  # the rest of a line after a kill or a power failure is cut off
                reason = parse_json(line)["finish_reason"] if line.endswith(b"\n") else None
            except (ValueError, KeyError, TypeError):
                break
            if reason is None or self.lines == most:
                break
            self.reasons[reason] += 1
            self.lines += 1
            end += len(line)
        self.file.truncate(end)

    def append(self, rows: Sequence[dict[str, Any]]) -> None:
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

    def finish(self) -> None:
        """Give the file the name OUT. Raises UserError where another run has made OUT meanwhile."""
        if self.out.exists() and not self.overwrite:
            raise UserError(f"--out {self.out} appeared meanwhile; the texts are in {self.path}")
        os.fsync(self.file.fileno())
        os.replace(self.path, self.out)
        fsync(self.out.parent)

    def __enter__(self) -> "PartFile":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if not self.lines:
            self.path.unlink(missing_ok=True)
        self.file.close()


class LineWriter:
    """The receiver of an engine's reports. It writes lines, and counts tokens and time."""

    def __init__(
        self,
        task: FileTask,
        prompts: list[FilePrompt],
        tokenizer: Any,
        part: PartFile | None,
        console: Console,
        stack: contextlib.ExitStack,
    ) -> None:
        self.task, self.prompts, self.tokenizer, self.part = task, prompts, tokenizer, part
        self.console, self.stack = console, stack
        self.backend: str | None = None
        self.tokens, self.begin, self.end = 0, 0.0, 0.0
        self.advance: Callable[[int], None] = lambda count: None

    def report(self, value: Any) -> None:
        assert self.part is not None
        if isinstance(value, str):
            self.backend, self.begin = value, time.perf_counter()
            bar = self.console.progress("generating", self.task.total, done=self.part.lines)
            self.advance = self.stack.enter_context(bar)
        elif isinstance(value, int):
            self.advance(value)
        else:
            first, new = value
            self.tokens += sum(map(len, new))
            self.end = time.perf_counter()
            skip = self.part.lines - first  # of a batch that was cut off by a kill
            self.part.append([self._row(first + place, ids) for place, ids in enumerate(new)][skip:])

    def _row(self, number: int, new: list[int]) -> dict[str, Any]:
        prompt = self.task.ids(number)
        ended = new[-1] in self.task.eos
        if not self.prompts:
            ids = [*prompt, *new]
            decoded = {} if self.tokenizer is None else {"text": self.tokenizer.decode(ids, skip_special_tokens=True)}
            return {**decoded, "input_ids": ids, "finish_reason": "stop" if ended else "length"}
        text, stopped = answer_text(self.tokenizer, prompt, new[:-1] if ended else new, self.task.options.stop)
        asked = self.prompts[number].asked
        if isinstance(asked, str):
            row: dict[str, Any] = {"prompt": asked, "completion": text}
        else:
            row = {"messages": [*asked, {"role": "assistant", "content": text}]}
        return {**row, "finish_reason": "stop" if ended or stopped else "length"}

    def document(self, out: Path, prompt_file: Path | None, done: int) -> GenerateFileDocument:
        """Return the outcome of the run, and show it.

        done: the number of lines before this run.
        """
        assert self.part is not None
        seconds, spec = self.end - self.begin, self.task.spec
        document = GenerateFileDocument(
            model=spec.name,
            layout=str(spec.layout),
            tp_size=self.task.options.tp_size,
            backend=self.backend,
            dtype=spec.dtype,
            prompt_file=None if prompt_file is None else str(prompt_file),
            out=str(out),
            samples=self.part.lines,
            ended_samples=self.part.reasons["stop"],
            resumed_samples=done,
            output_tokens=self.tokens,
            seconds=seconds,
            output_tokens_per_s=self.tokens / seconds if self.tokens else None,
        )
        speed = f", {document.output_tokens_per_s:.0f} tokens/s" if document.output_tokens_per_s else ""
        cut = document.samples - document.ended_samples
        self.console.result(
            f"{document.samples} texts{speed}, {cut} cut off at --max-new-tokens"
            f" {self.task.options.max_new_tokens}: {out}"
        )
        return document


def answer_text(tokenizer: Any, prompt: list[int], new: list[int], stops: Sequence[str]) -> tuple[str, bool]:
    """Return the text that ``new`` adds to a prompt, up to a stop text, and True if there was one.

    The text has no special tokens. It is decoded with the prompt, since ids decoded alone may lose the space that they
    begin with (SentencePiece).
    """
    before = str(tokenizer.decode(prompt, skip_special_tokens=True))
    both = str(tokenizer.decode([*prompt, *new], skip_special_tokens=True))
    text = both[len(before) :] if both.startswith(before) else str(tokenizer.decode(new, skip_special_tokens=True))
    cut = min((place for stop in stops if (place := text.find(stop)) >= 0), default=None)
    # a stop text that is a special token is seen in the ids, and not in the text
    return text[:cut], cut is not None or StopTexts(tokenizer, stops).end(new)


class StopTexts:
    """A search for stop texts in the newest tokens, however a text was cut into tokens."""

    def __init__(self, tokenizer: Any, stops: Sequence[str]) -> None:
        self.tokenizer, self.stops = tokenizer, stops
        # a token spells a byte at least; one more, since some tokenizers drop the space that a text begins with
        self.window = 1 + max((len(stop.encode()) for stop in stops), default=0)

    def end(self, ids: list[int]) -> bool:
        """Return True if the last tokens hold a stop text. Special tokens count as their text."""
        if not self.stops:
            return False
        text = self.tokenizer.decode(ids[-self.window :])
        return any(stop in text for stop in self.stops)


# ---- the runtime ----


def answer_on_runtime(task: FileTask, done: int, report: Report, console: Console) -> None:
    """Answer on ladderize's own ranks. This is an ``Engine``."""
    ranks = {name: getattr(task.options, name) for name in ("tp_size", "device", "threads")}
    run(_answer_on_rank, task, done, console, **ranks, report=report)


def _answer_on_rank(group: Ranks, task: FileTask, done: int, console: Console) -> None:
    done = group.broadcast(done)
    if done == task.total:
        return
    options, tokenizer = task.options, tokenizer_of(task.spec) if task.options.stop else None
    generator, backend = open_batch(group, task.spec, task.batch_size, task.longest, options, console)
    console.note(
        f"{task.spec.layout}; {backend}; {human_bytes(generator.cache.nbytes)} of KV cache for {task.batch_size} texts"
        " at a time"
    )
    stops = StopTexts(tokenizer, options.stop)
    group.report(backend)
    with torch.inference_mode():
        for numbers in task.parts(done, task.batch_size):
            prompts = [task.ids(number) for number in numbers]
            prompts += prompts[-1:] * (task.batch_size - len(prompts))  # computed, and not waited for
            new: list[list[int]] = [[] for _ in numbers]
            running = set(range(len(numbers)))
            for made in generate_tokens(
                generator,
                prompts,
                max_new_tokens=options.max_new_tokens,
                sampling=options.sampling,
                eos=task.eos,
                first_row=numbers[0],
            ):
                before = len(running)
                for row in list(running):
                    for token in made[row]:
                        new[row].append(token)
                        if token in task.eos or stops.end(new[row]):
                            running.discard(row)
                            break
                group.report(before - len(running))
                if not running:
                    break
            group.report(len(running))  # texts that are cut off at their length
            group.report((numbers[0], new))
    generator.model.collectives.close()
