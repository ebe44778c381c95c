"""One source, row by row and epoch after epoch: in which order, which rows are held out, and where it stands."""

from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Iterator
from copy import deepcopy
from dataclasses import dataclass
from itertools import islice
from typing import Any, ClassVar

import numpy as np

from ladderize.adapt.data.examples import Encoded, Encoder
from ladderize.adapt.data_specs import SourceSpec
from ladderize.errors import UserError
from ladderize.files.records import Record
from ladderize.rows import TRAINING, BadRows, Row, Rows, quiet_datasets

BATCH = 64  # rows that are tokenised together, ahead of their use
HELDOUT_OF_STREAM, MOST_HELDOUT, HELDOUT_SHARE = 64, 256, 100
LEAST_HELDOUT = 8  # or a tenth of fewer rows: a single row says little
# What a random generator draws. Keys after the seed must not end in it: numpy takes [seed, 1] and [seed, 1, 0] for the
# same.
DRAW_ORDER, DRAW_HELDOUT, DRAW_SHUFFLE = 1, 2, 3


@dataclass(frozen=True)
class Cursor(Record):
    """Behind ``row`` rows of an epoch's order. state: of ``datasets``' making, from which a stream reads on; None: its
    beginning."""

    LEFT_OUT: ClassVar = ("state",)
    FORMER: ClassVar = {"row": "position"}

    epoch: int
    row: int
    state: dict[str, Any] | None = None


class Reader(ABC):
    """heldout: the rows set aside. bad: those left out at opening. cursor: where it stands."""

    name: str
    encoder: Encoder
    heldout: list[Row]
    bad: BadRows
    cursor: Cursor
    ahead: deque[tuple[Encoded, Cursor]]  # rows that are tokenised, each with the cursor behind it

    def take(self) -> Encoded:
        """What the next row gives. After an epoch's last row the reader stands at the beginning of the next."""
        if not self.ahead:
            self.read_ahead()
        encoded, self.cursor = self.ahead.popleft()
        if self.at_end():
            self.seek(Cursor(self.cursor.epoch + 1, 0))
        return encoded

    def seek(self, cursor: Cursor) -> None:
        """Go to exactly where ``cursor`` was."""
        self.cursor = cursor
        self.ahead = deque()

    @abstractmethod
    def read_ahead(self) -> None:
        """Tokenise the next ``BATCH`` rows of the epoch, or those that are left of it."""

    @abstractmethod
    def at_end(self) -> bool:
        """Whether the epoch has no rows left."""

    @property
    def progress(self) -> float:
        """The share of the epoch that was read, in the middle of the next row; 0 for a stream, whose length is
        unknown."""
        return 0.0

    def epochs(self, cursor: Cursor) -> float:
        """How often the source was read at a cursor; of a stream only whole times are known."""
        return float(cursor.epoch)


class IndexedReader(Reader):
    """Rows of files in a fresh order every epoch, except ``count`` held-out ones (None: a hundredth, at least 8 or a
    tenth, at most 256), drawn once.

    number: the source's, so that no two are shuffled alike. Raises UserError if nothing would be left to train on.
    """

    def __init__(self, name: str, rows: Rows, encoder: Encoder, *, seed: int, number: int, count: int | None) -> None:
        self.name, self.rows, self.encoder, self.bad = name, rows, encoder, rows.bad
        self._keys = [seed, number]
        total = len(rows)
        if count is None:
            if total == 1:
                raise UserError(
                    f"{name} has a single row, so none can be held out; give --eval-data FILE, or --heldout 0"
                    " to skip validation"
                )
            count = min(MOST_HELDOUT, max(1, min(LEAST_HELDOUT, total // 10), total // HELDOUT_SHARE))
        if count >= total:
            raise UserError(f"{name} has {total} rows, and --heldout {count} would leave none to train on; lower it")
        drawn = np.random.default_rng([DRAW_HELDOUT, *self._keys]).permutation(total)[:count]
        self.heldout = [rows.read(int(index)) for index in np.sort(drawn)]
        self._training = np.delete(np.arange(total), drawn)
        self.seek(Cursor(0, 0))

    def seek(self, cursor: Cursor) -> None:
        super().seek(cursor)
        self._order = np.random.default_rng([DRAW_ORDER, *self._keys, cursor.epoch]).permutation(self._training)

    def read_ahead(self) -> None:
        epoch, row = self.cursor.epoch, self.cursor.row
        rows = [self.rows.read(int(index)) for index in self._order[row : row + BATCH]]
        for number, encoded in enumerate(self.encoder.encode(rows), start=row + 1):
            self.ahead.append((encoded, Cursor(epoch, number)))

    def at_end(self) -> bool:
        return self.cursor.row == len(self._training)

    @property
    def progress(self) -> float:
        return (self.cursor.row + 0.5) / len(self._training)

    def epochs(self, cursor: Cursor) -> float:
        return cursor.epoch + cursor.row / len(self._training)


class StreamedReader(Reader):
    """A dataset on the hub in its own order, which is the same in every epoch, except its first ``count`` rows (None:
    64): ``datasets.load_dataset(name, config, split=split, streaming=True)``; code from the hub is never run.

    Raises UserError if the dataset cannot be reached, does not exist, or has no column that is known.
    """

    def __init__(self, spec: SourceSpec, encoder: Encoder, *, count: int | None) -> None:
        import datasets

        assert spec.hub is not None
        self.name, self.encoder, self.bad = spec.name, encoder, BadRows()
        self._text, self._skip = spec.text, HELDOUT_OF_STREAM if count is None else count
        name, config, split = spec.hub
        try:
            with quiet_datasets():
                self._dataset = datasets.load_dataset(name, config, split=split, streaming=True)
                self._start: dict[str, Any] = deepcopy(self._dataset.state_dict())
        except Exception as error:  # of datasets, huggingface_hub, fsspec and their HTTP client
            raise UserError(
                f"{self.name} cannot be opened ({_reason(error)}); check its name, its split and the connection"
            ) from None
        columns = self._dataset.column_names
        if columns and TRAINING.find(columns) is None:
            raise UserError(f"{self.name} has the columns {', '.join(columns)}; rows need {TRAINING.in_words}")
        self.seek(Cursor(0, 0))

    def seek(self, cursor: Cursor) -> None:
        super().seek(cursor)
        self._rows = self._read(cursor)
        if cursor.state is None:
            self.heldout = [row for row, _ in islice(self._rows, self._skip)]
        self.read_ahead()
        if not self.ahead:
            raise UserError(
                f"{self.name} holds {len(self.heldout)} rows, and --heldout {self._skip} leaves none to train on;"
                " lower it"
            )

    def _read(self, cursor: Cursor) -> Iterator[tuple[Row, Cursor]]:
        """The rows from a cursor on, each with the cursor behind it."""
        self._dataset.load_state_dict(deepcopy(self._start if cursor.state is None else cursor.state))
        rows, number = iter(self._dataset), cursor.row
        while True:
            try:
                values = next(rows)
                state = self._dataset.state_dict()
            except StopIteration:
                return
            except Exception as error:
                raise UserError(
                    f"{self.name} cannot be read beyond row {number} ({_reason(error)}); resume when it can be"
                ) from None
            number += 1
            yield Row(values, f"{self._text}, row {number}"), Cursor(cursor.epoch, number, state)

    def read_ahead(self) -> None:
        read = list(islice(self._rows, BATCH))
        encoded = self.encoder.encode([row for row, _ in read])
        self.ahead.extend((one, cursor) for one, (_, cursor) in zip(encoded, read, strict=True))

    def at_end(self) -> bool:
        if not self.ahead:
            self.read_ahead()  # only this tells whether the epoch has ended
        return not self.ahead


def _reason(error: Exception) -> str:
    return " ".join(str(error).split())[:200] or type(error).__name__
