"""The file of ``ladderize generate --prompt-file``: what a model is to answer, a row after the other."""

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from ladderize.chat_template import DATE_OF_DATA
from ladderize.errors import UsageError, UserError
from ladderize.files.regular import check_regular, read_lines
from ladderize.rows import Formats, JsonlRows, ParquetRows, Row, check_row, read_messages
from ladderize.runtime.spec import ModelSpec
from ladderize.runtime.texts.prompts import PromptEncoder

SUFFIXES_OF_PROMPTS = (".jsonl", ".parquet", ".txt")
PROMPT_FORMATS = Formats(
    {
        "messages": ("messages",),
        "conversations": ("conversations",),
        "prompt": ("prompt",),
        "text": ("text",),
    },
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


def check_prompt_file(path: Path) -> None:
    """Raise UsageError for a name that says nothing of the format, UserError where there is no such file."""
    if path.suffix not in SUFFIXES_OF_PROMPTS:
        raise UsageError(f"--prompt-file {path} must end in one of {', '.join(SUFFIXES_OF_PROMPTS)}")
    if not path.exists():
        raise UserError(f"--prompt-file {path} does not exist")
    check_regular(path)


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
        return
    rows = JsonlRows(path, PROMPT_FORMATS) if path.suffix == ".jsonl" else ParquetRows(path, PROMPT_FORMATS)
    for number in range(len(rows)):
        yield rows.read(number)


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
        if isinstance(prompt.asked, str):
            ids = encoder.prompt(prompt.asked, prompt.origin)
        else:
            ids = encoder.conversation(prompt.asked, prompt.origin)
        found.append(np.asarray(ids, dtype=np.int32))
        advance(1)
    return found
