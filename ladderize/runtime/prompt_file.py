"""The prompts of ``ladderize generate --prompt-file``: rows of a file become texts to continue, or conversations."""

import itertools
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ladderize.errors import UsageError, UserError
from ladderize.files.regular import read_lines
from ladderize.rows import Formats, Row, check_row, jsonl_rows, parquet_rows, read_messages

SUFFIXES_OF_PROMPTS = (".jsonl", ".parquet", ".txt")
PROMPT_FORMATS = Formats(
    {name: (name,) for name in ("messages", "conversations", "prompt", "text")},
    "messages, conversations, prompt or text",
)


@dataclass(frozen=True)
class FilePrompt:
    """A row of a file.

    origin: its place, for people.
    asked: the messages of a conversation without its last answer, or a text to continue.
    was_answered: the row had an answer, which was left out.
    """

    origin: str
    asked: list[dict[str, Any]] | str
    was_answered: bool = False


def read_prompts(path: Path, *, chat: bool, samples: int | None) -> list[FilePrompt]:
    """Return the first ``samples`` prompts of a file; None: all.

    chat: a text is a user's message, not one to continue.

    Raises UserError that names the line for a row that cannot be used, and for fewer prompts than are asked for.
    """
    if path.suffix not in SUFFIXES_OF_PROMPTS:
        raise UsageError(f"--prompt-file {path} must end in one of {', '.join(SUFFIXES_OF_PROMPTS)}")
    if not path.exists():
        raise UserError(f"--prompt-file {path} does not exist")
    read = {".txt": _lines}.get(path.suffix) or (jsonl_rows if path.suffix == ".jsonl" else parquet_rows)
    rows: Iterator[Row] = read(path, PROMPT_FORMATS)
    prompts = [_prompt(row, chat) for row in itertools.islice(rows, samples)]
    if not prompts:
        raise UserError(f"--prompt-file {path} holds no prompts")
    if samples is not None and len(prompts) < samples:
        raise UserError(f"--num-samples {samples} asks for more than the {len(prompts)} prompts of {path}; lower it")
    return prompts


def _lines(path: Path, formats: Formats) -> Iterator[Row]:
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
    count = len(messages)
    while messages and messages[-1]["role"] == "assistant":
        messages.pop()
    if not messages:
        raise UserError(f"{row.origin}: its {name} are the assistant's alone, so there is nothing to answer")
    # what parquet may hold and JSON may not (a date, say) is written as text
    plain: list[dict[str, Any]] = json.loads(json.dumps(messages, default=str))
    return FilePrompt(row.origin, plain, was_answered=len(messages) < count)
