"""What a row of training data may look like, by its columns: token ids, a conversation, a prompt with its completion,
or text."""

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from ladderize.data import as_ids
from ladderize.errors import UserError

# Looked for in this order, since a row of ids may carry its text too.
COLUMNS = {
    "input_ids": ("input_ids",),
    "messages": ("messages",),
    "conversations": ("conversations",),
    "prompt": ("prompt", "completion"),
    "text": ("text",),
}
IN_WORDS = "input_ids, messages, conversations, prompt and completion, or text"
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


def find_format(columns: Collection[str]) -> str | None:
    """The first format whose columns are all there."""
    return next((name for name, needed in COLUMNS.items() if all(column in columns for column in needed)), None)


def check_row(row: Row) -> str:
    """The format of a row whose values have the right types; raises BadRow. Cheap: nothing is tokenised."""
    if not isinstance(row.values, Mapping):
        raise BadRow(f"{row.origin}: not an object with named values; a row needs {IN_WORDS}")
    present = [name for name, value in row.values.items() if value is not None]
    name = find_format(present)
    if name is None:
        raise BadRow(f"{row.origin}: has {', '.join(map(str, present)) or 'nothing'}; a row needs {IN_WORDS}")
    if name == "input_ids":
        read_ids(row)
    elif name in ("messages", "conversations"):
        read_messages(row, name)
    elif wrong := [column for column in COLUMNS[name] if not isinstance(row.values[column], str)]:
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
