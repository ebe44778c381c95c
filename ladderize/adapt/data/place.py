"""Where a stream of training data stands, and what was read of it: small, and JSON can hold it."""

from copy import deepcopy
from dataclasses import dataclass, field
from typing import Any

from ladderize.files.records import Record


@dataclass(frozen=True)
class FileCursor(Record):
    """In a source of files: the row at ``position`` of the epoch's order comes next."""

    epoch: int
    position: int


@dataclass(frozen=True)
class HubCursor(Record):
    """In a stream: behind ``row`` rows. state: of ``datasets``' making, from which it reads on; None: the beginning."""

    epoch: int
    row: int
    state: dict[str, Any] | None


Cursor = FileCursor | HubCursor


@dataclass
class Tally(Record):
    """What was read so far. skipped: bad rows, each once and not again every epoch; skipped_first: what was wrong with
    the first."""

    examples: int = 0
    tokens: int = 0
    rows: int = 0
    truncated: int = 0
    dropped: int = 0
    skipped: int = 0
    skipped_first: list[str] = field(default_factory=list)
    source_tokens: list[int] = field(default_factory=list)

    def skip(self, problem: str) -> None:
        self.skipped += 1
        if len(self.skipped_first) < 5:
            self.skipped_first.append(problem)

    def copy(self) -> "Tally":
        return deepcopy(self)


@dataclass(frozen=True)
class Snapshot(Record):
    """Where all sources stand, and what was counted up to there."""

    cursors: list[Cursor]
    tally: Tally


@dataclass(frozen=True)
class StreamPlace(Record):
    """A place in a stream: ``yielded`` rows into chunk number ``chunk``, which is made from ``before``."""

    chunk: int
    yielded: int
    before: Snapshot


@dataclass(frozen=True)
class SourceCounts(Record):
    """What was read of one source. data: as it was given, without the weight."""

    data: str
    weight: float | None
    tokens: int
    epochs: float


@dataclass(frozen=True)
class DataCounts(Record):
    """What was read of a stream: up to the end of the chunk in use, which is ahead of what was trained on.

    trained_tokens: of the rows that steps were made of; None where there was no training. padding_share: of the places
    in rows of ``seq_len``. A skipped row is counted once, a truncated or dropped example in every epoch.
    """

    examples: int
    tokens: int
    rows: int
    truncated_examples: int
    dropped_examples: int
    skipped_rows: int
    skipped_first: list[str]
    padding_share: float
    epochs: float
    sources: list[SourceCounts]
    trained_tokens: int | None = None
