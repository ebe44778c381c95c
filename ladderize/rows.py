"""The formats of a row, told by its columns: token ids, a conversation, a prompt with its completion, or text.

It also reads files of rows, one after the other.
"""

import contextlib
import itertools
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from ladderize.chat_template import Conversation
from ladderize.console import Console, sentence
from ladderize.data import as_ids, json_lines
from ladderize.errors import UserError
from ladderize.files.parsing import parse_json

CONVERSATIONS = ("messages", "conversations", "prompt")  # the columns that may hold turns
SHAREGPT_ROLES = {
    "human": "user",
    "user": "user",
    "gpt": "assistant",
    "assistant": "assistant",
    "system": "system",
    "tool": "tool",
}
FIRST_ROWS, MOST_UNUSABLE = 1000, 0.05
EMPTY = "is empty"  # the problem of a row of empty text, which is no fault


@dataclass(frozen=True)
class Row:
    """One row of a source, and its place there, for people."""

    values: Mapping[str, Any]
    origin: str


# ---- what a row may look like ----


@dataclass(frozen=True)
class Formats:
    """The formats of rows that a reader accepts.

    columns: of each format; the first is taken whose columns a row has.
    in_words: the same, for messages.
    """

    columns: Mapping[str, tuple[str, ...]]
    in_words: str

    def find(self, columns: Collection[str]) -> str | None:
        """Return the first format whose columns are all there; None where there is none."""
        return next((name for name, needed in self.columns.items() if all(one in columns for one in needed)), None)


TRAINING = Formats(
    {
        "input_ids": ("input_ids",),  # before the others: a row of ids may carry its text too
        "messages": ("messages",),
        "conversations": ("conversations",),
        "prompt": ("prompt", "completion"),
        "text": ("text",),
    },
    "input_ids, messages, conversations, prompt and completion, or text",
)


def check_row(row: Row, formats: Formats = TRAINING) -> str:
    """Return the format of a row: ``conversation`` where a column holds turns, else a name of ``formats``.

    Raises UserError where columns are missing, or do not hold ids or text.
    """
    if not isinstance(row.values, Mapping):
        raise UserError(f"{row.origin}: not an object with named values; a row needs {formats.in_words}")
    present = [name for name, value in row.values.items() if value is not None]
    name = formats.find(present)
    if name is None:
        raise UserError(
            f"{row.origin}: has {', '.join(map(str, present)) or 'nothing'}; a row needs {formats.in_words}"
        )
    if name in ("messages", "conversations") or (name == "prompt" and isinstance(row.values[name], list)):
        return "conversation"
    if name == "input_ids":
        read_ids(row)
    elif wrong := [column for column in formats.columns[name] if not isinstance(row.values[column], str)]:
        raise UserError(f"{row.origin}: its {wrong[0]} is not a string")
    return name


def read_ids(row: Row) -> tuple[np.ndarray, np.ndarray]:
    """Return a row's ``input_ids`` (int64) and its ``loss_mask`` (bool; True for all, where there is none).

    Raises UserError for invalid ones.
    """
    ids = as_ids(row.values["input_ids"], row.origin)
    mask = row.values.get("loss_mask")
    if mask is None:
        return ids, np.ones(len(ids), dtype=bool)
    if not isinstance(mask, list) or len(mask) != len(ids) or any(value not in (0, 1) for value in mask):
        raise UserError(
            f"{row.origin}: its loss_mask is not a list of 0 and 1, one for each of the {len(ids)} input_ids"
        )
    return ids, np.asarray(mask, dtype=bool)


def read_conversation(row: Row) -> Conversation:
    """Return a row's conversation.

    The loss counts the assistant's turns without ``"weight": 0``; of a prompt and its completion, those of the
    completion. Raises UserError for an invalid one.
    """
    column = next(name for name in CONVERSATIONS if row.values.get(name) is not None)
    turns = row.values[column]
    answers = (row.values.get("completion") or []) if column == "prompt" else []
    for name, value in ((column, turns), ("completion", answers)):
        if not isinstance(value, list):
            raise UserError(f"{row.origin}: its {name} is no list of turns")
    if not turns:
        raise UserError(f"{row.origin}: its {column} has no turns")
    asked = len(turns) if column == "prompt" else 0
    messages, scored = [], []
    for number, turn in enumerate([*turns, *answers]):
        message, weight = _read_turn(turn, f"{row.origin}: turn {number + 1} of its {column}")
        messages.append(message)
        scored.append(message["role"] == "assistant" and weight == 1 and number >= asked)
    return Conversation(
        messages,
        scored,
        _read_json(row, "tools", list),
        _read_json(row, "chat_template_kwargs", Mapping) or {},
    )


def _read_turn(turn: Any, origin: str) -> tuple[dict[str, Any], int]:
    """Return a turn as chat templates take it, and its weight: 0 or 1. Keys that are not known are the template's."""
    if not isinstance(turn, Mapping):
        raise UserError(f"{origin} is not an object with a role and content")
    message: dict[str, Any] = _without_nulls(turn)
    if "role" not in message and "from" in message:
        role = message.pop("from")
        if not isinstance(role, str) or role not in SHAREGPT_ROLES:
            raise UserError(f"{origin} is from {role!r}; known are {', '.join(SHAREGPT_ROLES)}")
        message = {"role": SHAREGPT_ROLES[role], "content": message.pop("value", None), **message}
    weight = message.pop("weight", 1)
    if weight not in (0, 1):
        raise UserError(f"{origin} has the weight {weight!r}, which is neither 0 nor 1")
    if isinstance(message.get("content"), list):
        message["content"] = _joined_parts(message["content"], origin)
    is_call = "content" not in message and bool(message.get("tool_calls"))
    if not isinstance(message.get("role"), str) or not (is_call or isinstance(message.get("content"), str)):
        raise UserError(f"{origin} has no role and content that are strings")
    return message, weight


def _joined_parts(parts: list[Any], origin: str) -> str:
    """Return the text of OpenAI's content parts, each on lines of its own, as vLLM joins them."""
    texts = [part.get("text") for part in parts if isinstance(part, Mapping) and part.get("type") == "text"]
    if len(texts) < len(parts) or not all(isinstance(text, str) for text in texts):
        raise UserError(f"{origin} has content that is no text, such as an image")
    return "\n".join(map(str, texts))


def _read_json(row: Row, column: str, kind: type) -> Any:
    """Return the value of a column, which may be JSON text; None where there is none."""
    value = row.values.get(column)
    try:
        value = parse_json(value.encode()) if isinstance(value, str) else value
    except ValueError as error:
        raise UserError(f"{row.origin}: its {column} is not JSON ({error})") from None
    if value is not None and not isinstance(value, kind):
        raise UserError(f"{row.origin}: its {column} is {'no list' if kind is list else 'no object'}")
    return _without_nulls(value)


def _without_nulls(value: Any) -> Any:
    """Return a value without the keys that hold null: Arrow gives each object the keys of all others."""
    if isinstance(value, Mapping):
        return {key: _without_nulls(item) for key, item in value.items() if item is not None}
    return [_without_nulls(item) for item in value] if isinstance(value, list) else value


# ---- rows that are left out ----


def tell_left_out(source: str, problems: Sequence[str], console: Console) -> int:
    """Warn of rows that are left out, and return their number.

    problems: of each row: ``EMPTY``, why it cannot be used, or empty text.
    Raises UserError where more than 5 % of the first 1,000 rows cannot be used.
    """
    faults = [problem for problem in problems if problem not in ("", EMPTY)]
    first = [problem for problem in problems[:FIRST_ROWS] if problem not in ("", EMPTY)]
    total = min(FIRST_ROWS, len(problems))
    if len(first) > MOST_UNUSABLE * total:
        others = f" ({len(first):,} of the first {total:,} rows cannot be used)" if len(first) > 1 else ""
        raise UserError(f"{first[0]}{others}")
    empty = len([problem for problem in problems if problem == EMPTY])
    counts = [f"{empty:,} of empty text"] if empty else []
    if faults:
        counts.append(f"{len(faults):,} that cannot be used (the first: {faults[0]})")
    if counts:
        console.warn(f"{source}: of {len(problems):,} rows {' and '.join(counts)} are left out")
    return empty + len(faults)


# ---- files of them ----


def jsonl_rows(path: Path) -> Iterator[Row]:
    """Yield the JSON value of each line that is not empty. Raises UserError, which names the first bad line."""
    return (Row(values, origin) for origin, values in json_lines(path))


def parquet_rows(path: Path) -> Iterator[Row]:
    """Yield the rows of a parquet file. Raises UserError for one that cannot be read."""
    from pyarrow import ArrowException
    from pyarrow.parquet import ParquetFile

    numbers = itertools.count(1)
    try:
        with ParquetFile(path) as file:
            for batch in file.iter_batches(1024):
                for values in batch.to_pylist():
                    yield Row(values, f"{path}, row {next(numbers)}")
    except (ArrowException, OSError, UnicodeDecodeError) as error:
        raise UserError(f"{path} cannot be read as parquet ({sentence(error)[:200]})") from None


@contextlib.contextmanager
def quiet_datasets() -> Iterator[None]:
    """Silence the progress bars and log lines of ``datasets`` in the block."""
    import datasets
    from datasets.utils import logging

    bars, level = not datasets.are_progress_bars_disabled(), logging.get_verbosity()
    datasets.disable_progress_bars()
    logging.set_verbosity(logging.CRITICAL)
    try:
        yield
    finally:
        logging.set_verbosity(level)
        if bars:
            datasets.enable_progress_bars()
