"""Files of rows, read by row number in any order without holding them in memory, and what a row may look like by its
columns: token ids, a conversation, a prompt with its completion, or text."""

import contextlib
import glob
from array import array
from bisect import bisect_right
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from ladderize.data import as_ids, parse_line
from ladderize.errors import UserError
from ladderize.files.records import Record
from ladderize.files.regular import MAX_LINE_BYTES, read_lines

SHAREGPT = {"human": "user", "user": "user", "gpt": "assistant", "assistant": "assistant", "system": "system"}


class BadRow(UserError):
    """A row that cannot be used; the sentence names its place. The only error that --skip-bad-rows passes over."""


@dataclass(frozen=True)
class Row:
    """One row of a source. origin: its place, for people. is_passage: cut out of a longer text, so that its end is no
    end of a text."""

    values: Mapping[str, Any]
    origin: str
    is_passage: bool = False


@dataclass
class BadRows(Record):
    """The rows that were left out: how many, and what was wrong with the first of them."""

    count: int = 0
    first: list[str] = field(default_factory=list)

    def add(self, problem: BadRow) -> None:
        self.extend(BadRows(1, [str(problem)]))

    def extend(self, other: "BadRows") -> None:
        self.count += other.count
        self.first = [*self.first, *other.first][:5]


# ---- what a row may look like ----


@dataclass(frozen=True)
class Formats:
    """What rows are read for. columns: those of each format, the first of which is taken that a row has all of.
    in_words: the same, for messages."""

    columns: Mapping[str, tuple[str, ...]]
    in_words: str

    def find(self, columns: Collection[str]) -> str | None:
        """The first format whose columns are all there."""
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
    """The format of a row whose values have the right types; raises BadRow. Cheap: nothing is tokenised."""
    if not isinstance(row.values, Mapping):
        raise BadRow(f"{row.origin}: not an object with named values; a row needs {formats.in_words}")
    present = [name for name, value in row.values.items() if value is not None]
    name = formats.find(present)
    if name is None:
        raise BadRow(f"{row.origin}: has {', '.join(map(str, present)) or 'nothing'}; a row needs {formats.in_words}")
    if name == "input_ids":
        read_ids(row)
    elif name in ("messages", "conversations"):
        read_messages(row, name)
    elif wrong := [column for column in formats.columns[name] if not isinstance(row.values[column], str)]:
        raise BadRow(f"{row.origin}: its {wrong[0]} is not a string")
    return name


def read_ids(row: Row) -> tuple[np.ndarray, np.ndarray]:
    """A row's ``input_ids`` (int64) and which of them its ``loss_mask`` scores (bool; all, where there is none)."""
    try:
        ids = as_ids(row.values["input_ids"])
    except ValueError as error:
        raise BadRow(f"{row.origin}: {error}") from None
    mask = row.values.get("loss_mask")
    if mask is None:
        return ids, np.ones(len(ids), dtype=bool)
    if not isinstance(mask, list) or len(mask) != len(ids) or any(value not in (0, 1) for value in mask):
        raise BadRow(f"{row.origin}: its loss_mask is not a list of 0 and 1, one for each of the {len(ids)} input_ids")
    return ids, np.asarray(mask, dtype=bool)


def read_messages(row: Row, column: str) -> list[dict[str, Any]]:
    """A conversation as chat templates want it; ShareGPT's names (from, value; human, gpt) are translated."""
    role, content = ("role", "content") if column == "messages" else ("from", "value")
    turns = row.values[column]
    if not isinstance(turns, list) or not turns:
        raise BadRow(f"{row.origin}: its {column} are not a list of turns")
    messages: list[dict[str, Any]] = []
    for number, turn in enumerate(turns, start=1):
        where = f"{row.origin}: turn {number} of its {column}"
        if not isinstance(turn, Mapping) or not all(isinstance(turn.get(key), str) for key in (role, content)):
            raise BadRow(f"{where} has no {role} and {content} that are strings")
        # other keys of a message (a name, say) are the template's business; parquet fills in None where a turn has none
        message = {key: value for key, value in turn.items() if value is not None}
        if column == "conversations":
            if turn["from"] not in SHAREGPT:
                raise BadRow(f"{where} is from {turn['from']!r}; known are {', '.join(SHAREGPT)}")
            message = {"role": SHAREGPT[turn["from"]], "content": turn["value"]}
        messages.append(message)
    return messages


# ---- files of them ----


class Rows(Protocol):
    """Rows 0, 1, ..., and the bad ones that were left out of them at opening."""

    bad: BadRows

    def __len__(self) -> int: ...

    def read(self, number: int) -> Row: ...


class JoinedRows:
    """Several files as one source, in their order."""

    def __init__(self, parts: Sequence[Rows]) -> None:
        self.parts, self.bad = parts, BadRows()
        for part in parts:
            self.bad.extend(part.bad)
        self._ends = list(accumulate(len(part) for part in parts))

    def __len__(self) -> int:
        return self._ends[-1]

    def read(self, number: int) -> Row:
        part = bisect_right(self._ends, number)
        return self.parts[part].read(number - (self._ends[part - 1] if part else 0))


class JsonlRows:
    """A JSON object a line. Every line is checked at opening; only where it begins is kept. Raises BadRow naming the
    first bad line."""

    def __init__(self, path: Path, formats: Formats = TRAINING, *, skip_bad_rows: bool = False) -> None:
        self.path, self.formats, self.bad = path, formats, BadRows()
        self._offsets, self._lines = array("q"), array("q")
        offset = 0
        for number, line in enumerate(read_lines(path), start=1):
            if line.strip():
                try:
                    self._parse(line, number)
                    self._offsets.append(offset)
                    self._lines.append(number)
                except BadRow as problem:
                    if not skip_bad_rows:
                        raise
                    self.bad.add(problem)
            offset += len(line)

    def _parse(self, line: bytes, number: int) -> Row:
        origin = f"{self.path}, line {number}"
        try:
            row = Row(parse_line(line), origin)
        except ValueError as error:
            raise BadRow(f"{origin}: {error}") from None
        check_row(row, self.formats)
        return row

    def __len__(self) -> int:
        return len(self._offsets)

    def read(self, number: int) -> Row:
        with self.path.open("rb") as file:
            file.seek(self._offsets[number])
            line = file.readline(MAX_LINE_BYTES)
        try:
            return self._parse(line, self._lines[number])
        except BadRow:
            raise UserError(f"{self.path} was changed while it was in use; start again") from None


class ParquetRows:
    """A parquet file through ``datasets``, which maps its own copy of it into memory. Columns are checked at opening,
    values later."""

    def __init__(self, path: Path, formats: Formats = TRAINING) -> None:
        from datasets import Dataset
        from pyarrow import parquet

        self.path, self.bad = path, BadRows()
        self._dataset: Any = ()
        try:
            about = parquet.read_metadata(path)
            columns = about.schema.to_arrow_schema().names
            if about.num_rows:  # datasets refuses a file without rows
                with quiet_datasets():
                    self._dataset = Dataset.from_parquet(glob.escape(str(path)))  # which takes patterns
        except Exception as error:  # pyarrow's own errors, and datasets' around them
            cause = " ".join(str(error.__cause__ or error).split())[:200]
            raise UserError(f"{path} cannot be read as parquet ({cause}); is it complete?") from None
        if formats.find(columns) is None:
            raise UserError(
                f"{path} has the columns {', '.join(columns) or 'of nothing'}; rows need {formats.in_words}"
            )

    def __len__(self) -> int:
        return len(self._dataset)

    def read(self, number: int) -> Row:
        origin = f"{self.path}, row {number + 1}"
        try:
            return Row(self._dataset[number], origin)
        except UnicodeDecodeError:
            raise BadRow(f"{origin}: holds text that is not UTF-8") from None


@contextlib.contextmanager
def quiet_datasets() -> Iterator[None]:
    """``datasets`` without its bars and log lines."""
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
