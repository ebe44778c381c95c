"""The command ``ladderize generate --out``: answers to the rows of a file, or texts from BOS alone, as training data.

A line depends on its number, the seed and the options of sampling. Batches are cut at multiples of their size, so a
line is computed in the same row of the same products wherever an interrupted run goes on."""

import itertools
import json
import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from ladderize.chat_template import said_by_user
from ladderize.checkpoint.opening import read_checkpoint
from ladderize.checkpoint.tensors import fingerprint
from ladderize.console import SILENT, Console, sentence
from ladderize.data.files import file_sha256
from ladderize.data.rows import EMPTY, Formats, Row, check_row, file_rows, read_conversation, tell_left_out
from ladderize.errors import UsageError, UserError
from ladderize.files.documents import check_writable, parse_json
from ladderize.files.output import fsync
from ladderize.files.records import Record
from ladderize.files.regular import read_lines, resolved
from ladderize.files.unfinished import Unfinished, work_folder
from ladderize.modeling import load_tokenizer, tokenizer_hash
from ladderize.ranks.environment import already_started, is_main_rank
from ladderize.ranks.group import ignore
from ladderize.runtime.generate import (
    Question,
    answer,
    answer_text,
    check_prompt,
    end_ids,
    open_spec,
    prompt_ids,
    tokenizer_of,
)
from ladderize.runtime.sampling import GenerateOptions
from ladderize.runtime.spec import ModelSpec

LINES = "lines.jsonl"  # in the folder of unfinished work
PROMPT_SUFFIXES = (".jsonl", ".parquet", ".txt")
PROMPT_FORMATS = Formats({name: (name,) for name in ("messages", "conversations", "prompt", "text")})


@dataclass(frozen=True)
class GenerateFileDocument(Record):
    """The output of ``ladderize generate --out --json``."""

    model: str
    layout: str
    out: str
    samples: int
    ended_samples: int  # by EOS, not by their length


def generate_file(options: GenerateOptions, *, console: Console = SILENT) -> GenerateFileDocument | None:
    """Write a line to ``options.out`` for each row of ``prompt_file``, or texts from BOS; see docs/files.md. Rows that
    cannot be used are left out. A killed run goes on when it is called again. Returns None on other ranks than 0.
    Raises UserError where too many rows cannot be used, or OUT cannot be written."""
    if options.out is None:
        raise UsageError("generate_file needs out, the .jsonl file to write")
    out = resolved(options.out, "--out ")
    if is_main_rank():
        check_writable(out)
        if out.exists():
            raise UserError(f"--out {out} already exists; choose another name, or delete it")
    spec = open_spec(options)
    assert spec.folder is not None
    if options.prompt_file is None:
        tokenizer, count = load_tokenizer(spec.folder), options.num_samples or 0
        questions: list[Question | None] = [None] * count
        prompts = [[bos_id(spec, tokenizer)]] * count
        check_prompt(prompts[0], spec, options)
    else:
        tokenizer = tokenizer_of(spec)
        with console.stage(f"reading {options.prompt_file}"):
            questions, prompts = read_prompts(spec, tokenizer, options, console)
    if not is_main_rank():
        answer(spec, options, prompts, 0, ignore, console)
        return None
    ends = end_ids(spec, options)
    identity = _identity(spec, options, prompts[0], ends)
    with Unfinished(work_folder(out), "generate", identity, pieces=LINES, console=console) as work:
        path = work.folder / LINES
        reasons = complete_lines(path, len(prompts))
        with console.progress("generating", len(prompts), done=len(reasons)) as advance:

            def write(batch: tuple[int, list[list[int]]]) -> None:
                first, answers = batch
                skipped = len(reasons) - first  # of a batch that was cut off by a kill
                rows = []
                for number, new in enumerate(answers[skipped:], start=len(reasons)):
                    rows.append(_row(questions[number], prompts[number], new, ends, tokenizer))
                append_rows(path, rows)
                reasons.extend(row["finish_reason"] for row in rows)
                advance(len(rows))

            if len(reasons) < len(prompts) or already_started():  # other ranks of a launcher wait
                answer(spec, options, prompts, len(reasons), write, console)
        if out.exists():
            raise UserError(f"--out {out} appeared meanwhile; the texts are in {path}")
        fsync(path)
        os.replace(path, out)
        fsync(out.parent)
    ended = reasons.count("stop")
    console.result(
        f"{len(reasons)} texts, {len(reasons) - ended} of them cut off at --max-new-tokens {options.max_new_tokens}:"
        f" {out}"
    )
    return GenerateFileDocument(spec.name, str(spec.layout), str(out), len(reasons), ended)


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
    spec: ModelSpec, tokenizer: Any, options: GenerateOptions, console: Console
) -> tuple[list[Question | None], list[list[int]]]:
    """Return the prompts in the first rows of ``options.prompt_file``, and their ids."""
    path = resolved(options.prompt_file or "", "--prompt-file ")
    if path.suffix not in PROMPT_SUFFIXES:
        raise UsageError(f"--prompt-file {path} must end in one of {', '.join(PROMPT_SUFFIXES)}")
    questions: list[Question | None] = []
    prompts: list[list[int]] = []
    problems: list[str] = []
    for row in itertools.islice(file_rows(str(path)), options.num_samples):
        try:
            question = _question(row, options.chat)
            if question is not None:
                prompts.append(prompt_ids(question, spec, tokenizer, options, as_data=True))
                questions.append(question)
            problems.append(EMPTY if question is None else "")
        except UserError as problem:
            problems.append(str(problem) if str(problem).startswith(row.origin) else f"{row.origin}: {problem}")
    tell_left_out(f"--prompt-file {path}", problems, console)
    if not prompts:
        raise UserError(f"--prompt-file {path} holds no prompts")
    return questions, prompts


def _question(row: Row, chat: bool) -> Question | None:
    """Return what a row asks; None for empty text. Raises UserError for a row that cannot be used."""
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


# ---- lines ----


def _identity(spec: ModelSpec, options: GenerateOptions, prompt: list[int], ends: tuple[int, ...]) -> dict[str, Any]:
    """Return all that decides a line. The number of ranks and the size of a batch change rounding only."""
    assert spec.folder is not None
    return {
        "model": fingerprint(read_checkpoint(spec.folder)),
        "tokenizer": tokenizer_hash(spec.folder),  # with the chat template
        "layout": spec.layout.to_config(),
        "dtype": spec.dtype,
        "prompts": prompt if options.prompt_file is None else file_sha256(str(options.prompt_file)),
        "chat": options.chat,
        "eos": ends,
        "max_new_tokens": options.max_new_tokens,
        **vars(options.sampling),
    }


def _row(
    question: Question | None, prompt: list[int], new: list[int], ends: tuple[int, ...], tokenizer: Any
) -> dict[str, Any]:
    """Return a line of OUT, which answers ``question``; None: the text begins with BOS."""
    ended = new[-1] in ends
    ids: dict[str, Any] = {"input_ids": [*prompt, *new]}
    reason = {"finish_reason": "stop" if ended else "length"}
    if question is None:
        text = {} if tokenizer is None else {"text": tokenizer.decode(ids["input_ids"], skip_special_tokens=True)}
        return {**text, **ids, **reason}
    # training reads the ids: the template may not give back what the model wrote, nor the tokenizer its ids
    ids["loss_mask"] = [0] * len(prompt) + [1] * len(new)
    answered = answer_text(tokenizer, prompt, new[:-1] if ended else new)
    if isinstance(question, str):
        return {"prompt": question, "completion": answered, **ids, **reason}
    messages = {"messages": [*question.messages, {"role": "assistant", "content": answered}]}
    more = {"tools": question.tools, "chat_template_kwargs": question.variables}
    return {**messages, **{name: value for name, value in more.items() if value}, **ids, **reason}


def complete_lines(path: Path, most: int) -> list[str]:
    """Return the finish reasons of the first lines that an earlier run wrote, ``most`` at most. What follows them, such
    as what a kill or a power failure left of a line, is cut off."""
    reasons: list[str] = []
    end = 0
    if path.exists():
        for line in itertools.islice(read_lines(path), most):
            try:
                row = parse_json(line)
                if not line.endswith(b"\n"):
                    break
                reasons.append(row["finish_reason"])
            except (ValueError, KeyError, TypeError):
                break
            end += len(line)
        os.truncate(path, end)
    return reasons


def append_rows(path: Path, rows: Sequence[dict[str, Any]]) -> None:
    try:
        with path.open("a", encoding="utf-8") as file:
            # what parquet may hold and JSON may not (a date, say) is written as text
            file.writelines(json.dumps(row, ensure_ascii=False, default=str) + "\n" for row in rows)
    except OSError as error:
        raise UserError(
            f"{path} cannot be written: {sentence(error)}; once it can, run the same command again to resume"
        ) from None
