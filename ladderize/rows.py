"""The formats of a row, told by its columns: token ids, a conversation, a prompt with its completion, or text.

It also reads files of rows, one after the other.
"""

import contextlib
import itertools
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from ladderize.console import sentence
from ladderize.data import as_ids, json_lines
from ladderize.errors import UserError

SHAREGPT = {"human": "user", "user": "user", "gpt": "assistant", "assistant": "assistant", "system": "system"}


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
    """Return the format of a row; raises UserError for one with missing or mistyped values."""
    if not isinstance(row.values, Mapping):
        raise UserError(f"{row.origin}: not an object with named values; a row needs {formats.in_words}")
    present = [name for name, value in row.values.items() if value is not None]
    name = formats.find(present)
    if name is None:
        raise UserError(
            f"{row.origin}: has {', '.join(map(str, present)) or 'nothing'}; a row needs {formats.in_words}"
        )
    if name == "input_ids":
        read_ids(row)
    elif name in ("messages", "conversations"):
        read_messages(row, name)
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


def read_messages(row: Row, column: str) -> list[dict[str, Any]]:
    """Return a conversation as chat templates take it; ShareGPT's names (from, value; human, gpt) are translated.

    Raises UserError for an invalid one.
    """
    role, content = ("role", "content") if column == "messages" else ("from", "value")
    turns = row.values[column]
    if not isinstance(turns, list) or not turns:
        raise UserError(f"{row.origin}: its {column} are not a list of turns")
    messages: list[dict[str, Any]] = []
    for number, turn in enumerate(turns, start=1):
        where = f"{row.origin}: turn {number} of its {column}"
        if not isinstance(turn, Mapping) or not all(isinstance(turn.get(key), str) for key in (role, content)):
            raise UserError(f"{where} has no {role} and {content} that are strings")
        # Other keys of a message, such as a name, are left to the template; parquet fills in None where a turn has
        # none.
        message = {key: value for key, value in turn.items() if value is not None}
        if column == "conversations":
            if turn["from"] not in SHAREGPT:
                raise UserError(f"{where} is from {turn['from']!r}; known are {', '.join(SHAREGPT)}")
            message = {"role": SHAREGPT[turn["from"]], "content": turn["value"]}
        messages.append(message)
    return messages


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
