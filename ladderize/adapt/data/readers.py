"""One source, row by row and epoch after epoch: in which order, which rows are held out, and where it stands."""

from collections import deque
from itertools import islice
from typing import Any, Protocol

import numpy as np

from ladderize.adapt.data.examples import Encoded, Encoder
from ladderize.adapt.data.hub import HubRows
from ladderize.adapt.data.place import Cursor, FileCursor, HubCursor
from ladderize.errors import UserError
from ladderize.rows.files import Rows
from ladderize.rows.formats import BadRows, Row

BATCH = 64  # rows that are tokenised together, ahead of their use
HELDOUT_OF_STREAM, MOST_HELDOUT, HELDOUT_SHARE = 64, 256, 100
LEAST_HELDOUT = 8  # or a tenth of fewer rows: a single row says little
# What a random generator draws. Keys after the seed must not end in it: numpy takes [seed, 1] and [seed, 1, 0] for the
# same.
DRAW_ORDER, DRAW_HELDOUT, DRAW_SHUFFLE = 1, 2, 3


class Reader(Protocol):
    """bad: the rows left out since opening. ``seek`` goes to exactly where ``cursor`` was; a cursor is of the reader's
    own kind."""

    name: str
    heldout: list[Row]
    bad: BadRows

    @property
    def epoch(self) -> int: ...

    @property
    def progress(self) -> float:
        """The share of the epoch that was read, in the middle of the next row; 0 for a stream, whose length is
        unknown."""
        ...

    def take(self) -> Encoded:
        """What the next row gives. After an epoch's last row the reader stands at the beginning of the next."""
        ...

    def cursor(self) -> Cursor: ...

    def seek(self, cursor: Any) -> None: ...

    def epochs(self, cursor: Any) -> float:
        """How often the source was read at a cursor; of a stream only whole times are known."""
        ...


class IndexedReader:
    """Rows of files in a fresh order every epoch, except ``count`` held-out ones (None: a hundredth, at least 8 or a
    tenth, at most 256), drawn once.

    number: the source's, so that no two are shuffled alike. Raises UserError if nothing would be left to train on.
    """

    def __init__(self, name: str, rows: Rows, encoder: Encoder, *, seed: int, number: int, count: int | None) -> None:
        self.name, self.rows, self.encoder, self.bad = name, rows, encoder, rows.bad
        self._seed, self._number = seed, number
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
        drawn = np.random.default_rng([DRAW_HELDOUT, seed, number]).permutation(total)[:count]
        self.heldout = [rows.read(int(index)) for index in np.sort(drawn)]
        self._training = np.delete(np.arange(total), drawn)
        self._epoch = self._position = 0
        self._order = self._draw(0)
        self._ahead: deque[Encoded] = deque()

    def _draw(self, epoch: int) -> np.ndarray:
        return np.random.default_rng([DRAW_ORDER, self._seed, self._number, epoch]).permutation(self._training)

    @property
    def epoch(self) -> int:
        return self._epoch

    @property
    def progress(self) -> float:
        return (self._position + 0.5) / len(self._training)

    def take(self) -> Encoded:
        if not self._ahead:
            indices = self._order[self._position : self._position + BATCH]
            self._ahead.extend(self.encoder.encode([self.rows.read(int(index)) for index in indices]))
        encoded = self._ahead.popleft()
        self._position += 1
        if self._position == len(self._training):
            self.seek(FileCursor(self._epoch + 1, 0))
        return encoded

    def cursor(self) -> FileCursor:
        return FileCursor(self._epoch, self._position)

    def seek(self, cursor: FileCursor) -> None:
        self._epoch, self._position = cursor.epoch, cursor.position
        self._order = self._draw(self._epoch)
        self._ahead.clear()

    def epochs(self, cursor: FileCursor) -> float:
        return cursor.epoch + cursor.position / len(self._training)


class StreamedReader:
    """A dataset on the hub in its own order, which is the same in every epoch, except its first ``count`` rows (None:
    64)."""

    def __init__(self, name: str, rows: HubRows, encoder: Encoder, *, count: int | None) -> None:
        self.name, self.rows, self.encoder, self.bad = name, rows, encoder, BadRows()
        self._skip = HELDOUT_OF_STREAM if count is None else count
        self._ahead: deque[tuple[Encoded, HubCursor]] = deque()
        self.seek(HubCursor(0, 0, None))

    def seek(self, cursor: HubCursor) -> None:
        self._cursor = cursor
        self._ahead.clear()
        self._stream = self.rows.read(cursor.state, cursor.row)
        if cursor.state is None:
            self.heldout = [row for row, _ in islice(self._stream, self._skip)]
        self._fill()
        if not self._ahead:
            raise UserError(
                f"{self.name} holds {len(self.heldout)} rows, and --heldout {self._skip} leaves none to train on;"
                " lower it"
            )

    def _fill(self) -> None:
        read = list(islice(self._stream, BATCH))
        number = len(self.heldout) if self._cursor.state is None else self._cursor.row
        for (_, state), encoded in zip(read, self.encoder.encode([row for row, _ in read]), strict=True):
            number += 1
            self._ahead.append((encoded, HubCursor(self._cursor.epoch, number, state)))

    @property
    def epoch(self) -> int:
        return self._cursor.epoch

    @property
    def progress(self) -> float:
        return 0.0

    def take(self) -> Encoded:
        encoded, self._cursor = self._ahead.popleft()
        if not self._ahead:
            self._fill()  # only this tells whether the epoch has ended
        if not self._ahead:
            self.seek(HubCursor(self.epoch + 1, 0, None))
        return encoded

    def cursor(self) -> HubCursor:
        return self._cursor

    def epochs(self, cursor: HubCursor) -> float:
        return float(cursor.epoch)
