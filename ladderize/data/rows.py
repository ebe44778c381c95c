"""Rows of files. Every reader of files takes them from here, but ``datasets``, which maps what training reads.

A ``.txt`` is one row, whatever its lines; a line of ``.jsonl`` that is not empty, a row of ``.parquet`` and of a 2-D
array of token ids is one; a 1-D array is one. A byte order mark is skipped, and CRLF is LF.
"""

import itertools
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from ladderize.chat_template import Conversation
from ladderize.console import Console, is_text, sentence
from ladderize.data.files import ID_SUFFIXES
from ladderize.errors import UserError
from ladderize.files.documents import parse_json
from ladderize.files.regular import check_regular, read_lines, read_text, split_name

MAX_TEXT_BYTES = 1 << 30  # of a .txt file, which is read and tokenised as a whole
MOST_IDS = 2**31  # ids are smaller


@dataclass(frozen=True)
class Row:
    values: Mapping[str, Any]
    origin: str  # where it stands in its source, for people


def file_rows(name: str) -> Iterator[Row]:
    """Yield the rows of a file; raises UserError, which names the bad line, for one that cannot be read."""
    path, key = split_name(name)
    if not path.exists():
        raise UserError(f"{path} does not exist")
    if path.suffix in ID_SUFFIXES:
        for ids in np.atleast_2d(open_ids(path, key)):
            yield Row({"input_ids": ids}, str(path))
    elif path.suffix == ".txt":
        yield Row({"text": read_text(path, MAX_TEXT_BYTES)}, str(path))
    elif path.suffix == ".jsonl":
        yield from _json_lines(path)
    elif path.suffix == ".parquet":
        yield from _parquet_rows(path)
    else:
        raise UserError(f"{path} is neither text (.txt, .jsonl, .parquet) nor token ids (.npy, .npz)")


def _json_lines(path: Path) -> Iterator[Row]:
    for number, line in enumerate(read_lines(path), start=1):
        if not line.strip():
            continue
        origin = f"{path}, line {number}"
        try:
            values = parse_json(line, constants=True)
        except ValueError as error:
            raise UserError(f"{origin}: is not JSON ({error})") from None
        if b"\\u" in line and not is_text(json.dumps(values, ensure_ascii=False)):
            raise UserError(f"{origin}: holds half of a surrogate pair, which is not a character")
        yield Row(values, origin)


def _parquet_rows(path: Path) -> Iterator[Row]:
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


def open_ids(path: Path, key: str | None = None) -> np.ndarray:
    """Return the token ids of a ``.npy`` file, which is mapped, or of an array in a ``.npz`` archive (``key``, or the
    only one): integers in one or two dimensions."""
    check_regular(path)
    try:
        array = np.load(path, mmap_mode="r", allow_pickle=False)
        if path.suffix == ".npz":
            with array as archive:
                key = archive.files[0] if key is None and len(archive.files) == 1 else key
                if key not in archive.files:
                    names = ", ".join(archive.files[:20]) or "none"
                    raise UserError(f"{path} holds the arrays {names}; name one of them, as in {path}:NAME")
                array = np.asarray(archive[key])
    except UserError:
        raise
    except Exception:  # numpy, zipfile and zlib raise a dozen kinds for broken files
        raise UserError(
            f"{path} is not a NumPy array of numbers, or an archive of these (Python objects are never unpickled)"
        ) from None
    if array.dtype.kind not in "iu" or array.ndim not in (1, 2):
        raise UserError(
            f"{path}: expected token ids, that is integers in one or two dimensions, not {array.dtype} in {array.ndim}"
        )
    _check_range(array, f"{path} holds")
    return array


def as_ids(value: Any, origin: str) -> np.ndarray:
    """Return a list of token ids as int64; raises UserError unless all are integers from 0 to 2**31 - 1."""
    try:
        array = np.asarray(value)
    except (ValueError, OverflowError):
        array = np.empty(0, dtype=object)
    if array.shape == (0,) and isinstance(value, list) and not value:
        return np.empty(0, dtype=np.int64)
    if array.ndim != 1 or array.dtype.kind not in "iu":
        raise UserError(f"{origin}: its input_ids are not a list of integers")
    _check_range(array, f"{origin}: its input_ids hold")
    return array.astype(np.int64)


def _check_range(ids: np.ndarray, subject: str) -> None:
    if ids.size and not 0 <= int(ids.min()) <= int(ids.max()) < MOST_IDS:
        raise UserError(f"{subject} a negative or an impossibly large token id")


# ---- what a row holds, told by its columns: ids, a conversation, a prompt with its completion, or text ----

SHAREGPT_ROLES = {"human": "user", "gpt": "assistant"}
SHAREGPT_ROLES |= {name: name for name in ("user", "assistant", "system", "tool")}
FIRST_ROWS, MOST_UNUSABLE = 1000, 0.05
EMPTY = "is empty"  # the problem of a row of empty text, which is no fault


@dataclass(frozen=True)
class Formats:
    """The formats of rows that a reader accepts. The first that fits is taken."""

    columns: Mapping[str, tuple[str, ...]]  # that each needs

    def __str__(self) -> str:
        names = [" and ".join(needed) for needed in self.columns.values()]
        return f"{', '.join(names[:-1])} or {names[-1]}"

    def find(self, columns: Sequence[str]) -> str | None:
        """Return the first format whose columns are all there."""
        return next((name for name, needed in self.columns.items() if {*needed} <= {*columns}), None)


# ids before the others: a row of them may carry its text too
SINGLE = {name: (name,) for name in ("input_ids", "messages", "conversations")}
TRAINING = Formats({**SINGLE, "prompt": ("prompt", "completion"), "text": ("text",)})


def check_row(row: Row, formats: Formats = TRAINING) -> str:
    """Return the format of a row: ``conversation`` where a column holds turns, else a name of ``formats``."""
    if not isinstance(row.values, Mapping):
        raise UserError(f"{row.origin}: not an object with named values; a row needs {formats}")
    present = [str(column) for column, value in row.values.items() if value is not None]
    name = formats.find(present)
    if name is None:
        raise UserError(f"{row.origin}: has {', '.join(present) or 'nothing'}; a row needs {formats}")
    if name in ("messages", "conversations") or (name == "prompt" and isinstance(row.values[name], list)):
        return "conversation"
    if name == "input_ids":
        read_ids(row)
        return name
    for column in formats.columns[name]:
        if not isinstance(row.values[column], str):
            raise UserError(f"{row.origin}: its {column} is not a string")
    return name


def read_ids(row: Row) -> tuple[np.ndarray, np.ndarray]:
    """Return a row's ``input_ids`` (int64) and its ``loss_mask`` (bool; True for all, where there is none)."""
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
    """Return a row's conversation. The loss counts the assistant's turns without ``"weight": 0``; of a prompt and its
    completion, those of the completion."""
    columns = ("messages", "conversations", "prompt")
    column = next(name for name in columns if row.values.get(name) is not None)
    turns = row.values[column]
    answers = (row.values.get("completion") or []) if column == "prompt" else []
    for name, value in ((column, turns), ("completion", answers)):
        if not isinstance(value, list):
            raise UserError(f"{row.origin}: its {name} is no list of turns")
    if not turns:
        raise UserError(f"{row.origin}: its {column} has no turns")
    first_scored = len(turns) if column == "prompt" else 0
    messages, scored = [], []
    for number, turn in enumerate([*turns, *answers]):
        message, weight = _read_turn(turn, f"{row.origin}: turn {number + 1} of its {column}")
        messages.append(message)
        scored.append(message["role"] == "assistant" and weight == 1 and number >= first_scored)
    kwargs = _read_json(row, "chat_template_kwargs", Mapping) or {}
    return Conversation(messages, scored, _read_json(row, "tools", list), kwargs)


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
    content = message.get("content")
    if isinstance(content, list):  # OpenAI's parts, each on lines of its own, as vLLM joins them
        texts = [chunk["text"] for chunk in content if _is_text(chunk)]
        if len(texts) < len(content):
            raise UserError(f"{origin} has content that is no text, such as an image")
        message["content"] = "\n".join(texts)
    is_call = "content" not in message and bool(message.get("tool_calls"))
    if not isinstance(message.get("role"), str) or not (is_call or isinstance(message.get("content"), str)):
        raise UserError(f"{origin} has no role and content that are strings")
    return message, weight


def _is_text(chunk: Any) -> bool:
    return isinstance(chunk, Mapping) and chunk.get("type") == "text" and isinstance(chunk.get("text"), str)


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


def tell_left_out(source: str, problems: Sequence[str], console: Console) -> int:
    """Warn of rows that are left out, for the problems of all rows (``EMPTY``, or why they cannot be used, or nothing),
    and return their number. More than 5 % of the first 1,000 are refused."""
    faults = [problem for problem in problems if problem not in ("", EMPTY)]
    first = [problem for problem in problems[:FIRST_ROWS] if problem not in ("", EMPTY)]
    total = min(FIRST_ROWS, len(problems))
    if len(first) > MOST_UNUSABLE * total:
        others = f" ({len(first):,} of the first {total:,} rows cannot be used)" if len(first) > 1 else ""
        raise UserError(f"{first[0]}{others}")
    empty = problems.count(EMPTY)
    counts = [f"{empty:,} of empty text"] if empty else []
    if faults:
        counts.append(f"{len(faults):,} that cannot be used (the first: {faults[0]})")
    if counts:
        console.warn(f"{source}: of {len(problems):,} rows {' and '.join(counts)} are left out")
    return empty + len(faults)
