"""What a row may look like, by its columns: token ids, a conversation, a prompt with its completion, or text."""

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from ladderize.data import as_ids
from ladderize.errors import UserError

SHAREGPT = {"human": "user", "user": "user", "gpt": "assistant", "assistant": "assistant", "system": "system"}


class BadRow(UserError):
    """A row that cannot be used; the sentence names its place. The only error that --skip-bad-rows passes over."""

    def unskipped(self) -> "BadRow":
        """The same with what to do about it, where such rows are not skipped."""
        return BadRow(f"{self}; repair it, or skip such rows with --skip-bad-rows")


@dataclass(frozen=True)
class Row:
    """One row of a source. origin: its place, for people. is_passage: cut out of a longer text, so that its end is no
    end of a text."""

    values: Mapping[str, Any]
    origin: str
    is_passage: bool = False


@dataclass
class BadRows:
    """The rows that were left out: how many, and what was wrong with the first of them."""

    count: int = 0
    first: list[str] = field(default_factory=list)

    def add(self, problem: BadRow) -> None:
        self.count += 1
        if len(self.first) < 5:
            self.first.append(str(problem))

    def extend(self, other: "BadRows") -> None:
        self.count += other.count
        self.first = [*self.first, *other.first][:5]


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
    role_key, content_key = ("role", "content") if column == "messages" else ("from", "value")
    turns = row.values[column]
    if not isinstance(turns, list) or not turns:
        raise BadRow(f"{row.origin}: its {column} are not a list of turns")
    messages: list[dict[str, Any]] = []
    for number, turn in enumerate(turns, start=1):
        if not isinstance(turn, Mapping) or not all(isinstance(turn.get(key), str) for key in (role_key, content_key)):
            raise BadRow(
                f"{row.origin}: turn {number} of its {column} has no {role_key} and {content_key} that are strings"
            )
        # other keys of a message (a name, say) are the template's business; parquet fills in None where a turn has none
        message = {key: value for key, value in turn.items() if value is not None}
        if column == "conversations":
            if turn["from"] not in SHAREGPT:
                raise BadRow(
                    f"{row.origin}: turn {number} of its conversations is from {turn['from']!r}; known are"
                    f" {', '.join(SHAREGPT)}"
                )
            message = {"role": SHAREGPT[turn["from"]], "content": turn["value"]}
        messages.append(message)
    return messages
