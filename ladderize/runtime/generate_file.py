"""The command ``ladderize generate --out``: answers to the rows of a file, or texts from BOS alone, as training data.

A line depends on its number, the seed and the options of sampling. Lines are written in order, a batch at a time, into
a file beside OUT, which gets OUT's name when it is complete. The same command goes on with that file. Batches are cut
at multiples of their size, so a line is computed in the same row of the same products wherever a run begins.
"""

import hashlib
import itertools
import json
import os
from collections.abc import Sequence
from contextlib import closing, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from ladderize.chat_template import said_by_user
from ladderize.checkpoint.opening import read_checkpoint
from ladderize.checkpoint.tensors import fingerprint
from ladderize.console import SILENT, Console, sentence
from ladderize.data.files import file_sha256
from ladderize.data.formats import EMPTY, Formats, check_row, read_conversation, tell_left_out
from ladderize.data.rows import Row, file_rows
from ladderize.errors import UsageError, UserError
from ladderize.files.documents import check_writable
from ladderize.files.parsing import parse_json
from ladderize.files.records import Record
from ladderize.files.regular import read_lines, resolved
from ladderize.files.temporaries import fsync, try_lock
from ladderize.modeling import load_tokenizer, tokenizer_hash
from ladderize.ranks.environment import already_started, is_main_rank
from ladderize.ranks.group import ignore
from ladderize.runtime.generate import (
    Asked,
    GenerateTask,
    answer_on_runtime,
    answer_text,
    check_generate,
    check_prompt,
    end_ids,
    prompt_ids,
    tokenizer_of,
)
from ladderize.runtime.sampling import DEFAULT_TEXTS_AT_A_TIME, GenerateOptions, Sampling
from ladderize.runtime.spec import ModelSpec

PROMPT_SUFFIXES = (".jsonl", ".parquet", ".txt")
PROMPT_FORMATS = Formats({name: (name,) for name in ("messages", "conversations", "prompt", "text")})


@dataclass(frozen=True)
class GenerateFileDocument(Record):
    """The output of ``ladderize generate --out --json``.

    ended_samples: texts that EOS ended, not their length.
    """

    model: str
    layout: str
    out: str
    samples: int
    ended_samples: int


def generate_file(
    model: str | Path,
    out: str | Path,
    prompt_file: str | Path | None = None,
    options: GenerateOptions | None = None,
    *,
    samples: int | None = None,
    batch_size: int = DEFAULT_TEXTS_AT_A_TIME,
    console: Console = SILENT,
) -> GenerateFileDocument | None:
    """Write a line to ``out`` for each row of ``prompt_file``, or ``samples`` texts from BOS; see docs/files.md.

    Rows that cannot be used are left out. A killed run goes on when it is called again. Returns None on other ranks
    than 0. Raises UserError where too many rows cannot be used, or OUT cannot be written.

    model: a folder or a hub id.
    prompt_file: .jsonl, .parquet or .txt; None: texts begin with BOS alone.
    options: by default sampled at temperature 1.
    samples: the number of texts; of a file, the most rows that are read; None: all.
    batch_size: texts at a time; the KV cache grows with it.
    """
    options = options or GenerateOptions(sampling=Sampling(temperature=1.0))
    if prompt_file is None and samples is None:
        raise UsageError("--from-bos needs --num-samples N: how many texts")
    if prompt_file is None and (options.chat or options.sampling.temperature == 0):
        raise UsageError("--from-bos begins with BOS alone, so it takes no --chat, and a --temperature above 0")
    out = Path(out)
    if out.suffix != ".jsonl":
        raise UsageError(f"--out {out} must end in .jsonl, which tells --data how to read it")
    out = resolved(out, "--out ")
    if is_main_rank():
        check_writable(out)
        if out.exists():
            raise UserError(f"--out {out} already exists; choose another name, or delete it")
    spec = check_generate(str(model), options)
    assert spec.folder is not None
    asked: list[Asked] = []
    if prompt_file is None:
        tokenizer = load_tokenizer(spec.folder)
        prompts = [[bos_id(spec, tokenizer)]] * (samples or 0)
        check_prompt(prompts[0], spec, options)
    else:
        tokenizer = tokenizer_of(spec)
        with console.stage(f"reading {prompt_file}"):
            asked, prompts = read_prompts(Path(prompt_file), samples, spec, tokenizer, options, console)
    task = GenerateTask(spec, options, end_ids(spec, options), prompts, min(batch_size, len(prompts)))
    digest = _digest(task, prompt_file)
    with closing(LineWriter(out, digest, len(prompts))) if is_main_rank() else nullcontext() as lines:
        done = lines.lines if lines is not None else 0
        with console.progress("generating", len(prompts), done=done) as advance:

            def write(batch: tuple[int, list[list[int]]]) -> None:
                assert lines is not None
                first, new = batch
                rows = [_row(task, asked, tokenizer, first + place, ids) for place, ids in enumerate(new)]
                rows = rows[lines.lines - first :]  # of a batch that was cut off by a kill
                lines.append(rows)
                advance(len(rows))

            if done < len(prompts) or already_started():  # with a launcher, other ranks wait for ``done``
                answer_on_runtime(task, done, ignore if lines is None else write, console)
        if lines is None:
            return None
        lines.finish()
        console.result(
            f"{lines.lines} texts, {lines.lines - lines.ended} of them cut off at --max-new-tokens"
            f" {options.max_new_tokens}: {out}"
        )
        return GenerateFileDocument(spec.name, str(spec.layout), str(out), lines.lines, lines.ended)


# ---- prompts ----


def bos_id(spec: ModelSpec, tokenizer: Any) -> int:
    """Return the id of the BOS token, of config.json or else the tokenizer. Raises UserError where there is none."""
    bos = spec.config.get("bos_token_id")
    bos = getattr(tokenizer, "bos_token_id", None) if bos is None else bos
    if type(bos) is not int or not 0 <= bos < spec.config["vocab_size"]:
        raise UserError(
            f"{spec.name} has no BOS token among its {spec.config['vocab_size']} tokens (bos_token_id is {bos!r}), so"
            " --from-bos has nothing to begin with"
        )
    return bos


def read_prompts(
    file: Path, samples: int | None, spec: ModelSpec, tokenizer: Any, options: GenerateOptions, console: Console
) -> tuple[list[Asked], list[list[int]]]:
    """Return the prompts in the first ``samples`` rows of a file (None: all), and their ids.

    Raises UserError where too many rows cannot be used, and for a file without prompts.
    """
    path = resolved(file, "--prompt-file ")
    if path.suffix not in PROMPT_SUFFIXES:
        raise UsageError(f"--prompt-file {path} must end in one of {', '.join(PROMPT_SUFFIXES)}")
    asked: list[Asked] = []
    prompts: list[list[int]] = []
    problems: list[str] = []
    for row in itertools.islice(file_rows(str(path)), samples):
        try:
            question = _asked(row, options.chat)
            if question is not None:
                prompts.append(prompt_ids(question, spec, tokenizer, options, as_data=True))
                asked.append(question)
            problems.append(EMPTY if question is None else "")
        except UserError as problem:
            problems.append(str(problem) if str(problem).startswith(row.origin) else f"{row.origin}: {problem}")
    tell_left_out(f"--prompt-file {path}", problems, console)
    if not prompts:
        raise UserError(f"--prompt-file {path} holds no prompts")
    return asked, prompts


def _asked(row: Row, chat: bool) -> Asked | None:
    """Return what a row asks; None for empty text. Raises UserError for a row that cannot be used.

    chat: a text is a user's message, not one to continue.
    """
    name = check_row(row, PROMPT_FORMATS)
    if name != "conversation":
        text = str(row.values[name])
        if not chat or not text.strip():
            return text if text.strip() else None
        row = replace(row, values={**row.values, "messages": said_by_user(text)})
    conversation = read_conversation(row)
    count = len(conversation.messages)
    while count and conversation.messages[count - 1]["role"] == "assistant":
        count -= 1
    if not count:
        raise UserError(f"{row.origin}: its turns are the assistant's alone, so there is nothing to answer")
    return conversation.until(count)


# ---- the file ----


def _digest(task: GenerateTask, prompt_file: str | Path | None) -> str:
    """Return a hash of all that decides a line. The number of ranks and the size of a batch change rounding only."""
    spec, options = task.spec, task.options
    assert spec.folder is not None
    identity = {
        "model": fingerprint(read_checkpoint(spec.folder)),
        "tokenizer": tokenizer_hash(spec.folder),  # with the chat template
        "layout": spec.layout.to_config(),
        "dtype": spec.dtype,
        "prompts": task.prompts[0] if prompt_file is None else file_sha256(str(prompt_file)),
        "chat": options.chat,
        "eos": list(task.eos),
        "max_new_tokens": options.max_new_tokens,
        **vars(options.sampling),
    }
    return hashlib.sha256(json.dumps(identity, sort_keys=True).encode()).hexdigest()[:12]


def _row(task: GenerateTask, asked: list[Asked], tokenizer: Any, number: int, new: list[int]) -> dict[str, Any]:
    """Return a line of OUT.

    asked: what each line answers; empty: texts begin with BOS.
    """
    prompt, ended = task.prompts[number], new[-1] in task.eos
    ids: dict[str, Any] = {"input_ids": [*prompt, *new]}
    reason = {"finish_reason": "stop" if ended else "length"}
    if not asked:
        text = {} if tokenizer is None else {"text": tokenizer.decode(ids["input_ids"], skip_special_tokens=True)}
        return {**text, **ids, **reason}
    # training reads the ids: the template may not give back what the model wrote, nor the tokenizer its ids
    ids["loss_mask"] = [0] * len(prompt) + [1] * len(new)
    answer, question = answer_text(tokenizer, prompt, new[:-1] if ended else new), asked[number]
    if isinstance(question, str):
        return {"prompt": question, "completion": answer, **ids, **reason}
    messages = {"messages": [*question.messages, {"role": "assistant", "content": answer}]}
    more = {"tools": question.tools, "chat_template_kwargs": question.variables}
    return {**messages, **{name: value for name, value in more.items() if value}, **ids, **reason}


class LineWriter:
    """The writer of the unfinished OUT: a locked file beside it, whose name holds a hash of all that decides its lines.

    So only the same command goes on with it. Raises UserError while another run of the same command writes OUT.

    lines, ended: the number of complete lines, and of those that EOS ended.
    """

    def __init__(self, out: Path, digest: str, most: int) -> None:
        """Open the file that an earlier run left, or a new one.

        most: the number of lines that OUT will have.
        """
        self.out, self.path = out, out.with_name(f"{out.name}.{digest}.part")
        self.lines = self.ended = end = 0
        self.file = self.path.open("ab", buffering=0)
        if not try_lock(self.file.fileno()):
            self.file.close()
            raise UserError(f"another run writes {out}; wait for it, or choose another --out")
        for line in itertools.islice(read_lines(self.path), most):
            try:  # the rest of a line after a kill or a power failure is cut off
                reason = parse_json(line)["finish_reason"] if line.endswith(b"\n") else None
            except (ValueError, KeyError, TypeError):
                break
            if reason is None:
                break
            self.lines, self.ended, end = self.lines + 1, self.ended + (reason == "stop"), end + len(line)
        self.file.truncate(end)

    def append(self, rows: Sequence[dict[str, Any]]) -> None:
        """Write rows. Raises UserError where the disk is full."""
        try:
            # what parquet may hold and JSON may not (a date, say) is written as text
            left = "".join(json.dumps(row, ensure_ascii=False, default=str) + "\n" for row in rows).encode()
            while left:
                left = left[self.file.write(left) :]
        except OSError as error:
            raise UserError(
                f"{self.path} cannot be written: {sentence(error)}; once it can, run the same command again to resume"
            ) from None
        self.lines += len(rows)
        self.ended += sum(row["finish_reason"] == "stop" for row in rows)

    def finish(self) -> None:
        """Give the file the name OUT."""
        if self.out.exists():
            raise UserError(f"--out {self.out} appeared meanwhile; the texts are in {self.path}")
        os.fsync(self.file.fileno())
        os.replace(self.path, self.out)
        fsync(self.out.parent)

    def close(self) -> None:
        """Close the file. One without lines is removed."""
        if not self.lines:
            self.path.unlink(missing_ok=True)
        self.file.close()
