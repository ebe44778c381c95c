"""Chunks of the training stream: examples drawn from all sources, packed with each other and shuffled."""

import threading
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from ladderize.adapt.data.examples import Encoder, Example
from ladderize.adapt.data.packing import PackedRow, pack, unpacked
from ladderize.adapt.data.place import Snapshot, Tally
from ladderize.adapt.data.readers import DRAW_SHUFFLE, Reader
from ladderize.errors import UserError

CHUNK_ROWS = 128


@dataclass(frozen=True)
class StreamOptions:
    """seq_len: the most tokens of a row. packing: several examples a row. heldout: rows of each source to set
    aside, never trained on (None: a hundredth of files' rows, at least 8 or a tenth, at most 256, and a stream's
    first 64). min_rows: the fewest rows that a first epoch may have (without weights), that is a batch."""

    seq_len: int
    vocab_size: int
    seed: int = 0
    packing: bool = True
    heldout: int | None = None
    skip_bad_rows: bool = False
    min_rows: int = 1

    def record(self) -> dict[str, Any]:
        """What the rows depend on. Whether bad rows are skipped is not among it: up to the first one it makes no
        difference."""
        return {
            key: value for key, value in asdict(self).items() if key not in ("vocab_size", "min_rows", "skip_bad_rows")
        }

    def to_rows(self, examples: Sequence[Example]) -> list[PackedRow]:
        return pack(examples, self.seq_len) if self.packing else unpacked(examples)


@dataclass(frozen=True)
class Chunk:
    """Rows in their final order. number: the chunk's. before, after: snapshots of where all sources stand, and of what
    was counted."""

    number: int
    rows: list[PackedRow]
    before: Snapshot
    after: Snapshot


class Stopped(Exception):
    """The chunk that was being made is not wanted."""


class ChunkMaker:
    """Makes chunk after chunk from where the readers stand. weights: of the sources, or None; see ``Stream`` for what
    they mean.

    stop: an event that ends the making of a chunk.
    """

    def __init__(
        self, readers: Sequence[Reader], weights: Sequence[float] | None, options: StreamOptions, stop: threading.Event
    ) -> None:
        self.readers, self.weights, self.options, self.stop = list(readers), weights, options, stop
        self.tally = Tally(source_tokens=[0] * len(readers))
        for reader in readers:
            self.tally.skipped += reader.bad.count
            self.tally.skipped_first = [*self.tally.skipped_first, *reader.bad.first][:5]

    @property
    def names(self) -> str:
        return " ".join(reader.name for reader in self.readers)

    def snapshot(self) -> Snapshot:
        """Where everything stands."""
        return Snapshot([reader.cursor() for reader in self.readers], self.tally.copy())

    def restore(self, snapshot: Snapshot) -> None:
        if snapshot == self.snapshot():
            return
        for reader, cursor in zip(self.readers, snapshot.cursors, strict=True):
            reader.seek(cursor)
        self.tally = snapshot.tally.copy()

    def heldout(self, encoder: Encoder) -> list[PackedRow]:
        """The rows that the sources set aside, in their order. Raises UserError if there are some, but none can be
        scored."""
        examples: list[Example] = []
        for encoded in encoder.encode([row for reader in self.readers for row in reader.heldout]):
            if encoded.problem is not None:
                if not self.options.skip_bad_rows:
                    raise encoded.problem.unskipped()
                self.tally.skip(str(encoded.problem))
            examples += encoded.examples
        if not examples and any(reader.heldout for reader in self.readers):
            raise UserError(
                f"{self.names}: no held-out row can be scored; give --eval-data FILE, or hold out more (--heldout)"
            )
        return self.options.to_rows(examples)

    def make(self, number: int) -> Chunk:
        """The next chunk: enough examples for ``CHUNK_ROWS`` rows, or those until the end of an epoch.

        Raises UserError for a bad row unless such are skipped, and for a first epoch of too few rows.
        """
        before, tokens = self.snapshot(), 0
        examples: list[Example] = []
        epoch, ended = self._epoch(), False
        while tokens < CHUNK_ROWS * self.options.seq_len and not ended:
            if self.stop.is_set():
                raise Stopped
            new = self._take(self._choose())
            examples += new
            tokens += sum(len(example.ids) for example in new)
            ended = self.weights is None and self._epoch() > epoch
        rows = self.options.to_rows(examples)
        self.tally.examples += len(examples)
        self.tally.tokens += tokens
        self.tally.rows += len(rows)
        if ended and epoch == 0 and self.tally.rows < self.options.min_rows:
            raise UserError(
                f"{self.names} gives only {self.tally.rows} rows of {self.options.seq_len} tokens an epoch, fewer than"
                f" --batch-size {self.options.min_rows}; give more data or lower --batch-size"
            )
        order = np.random.default_rng([DRAW_SHUFFLE, self.options.seed, number]).permutation(len(rows))
        return Chunk(number, [rows[index] for index in order], before, self.snapshot())

    def _epoch(self) -> int:
        """How often all sources were read to their end."""
        return min(reader.epoch for reader in self.readers)

    def _choose(self) -> int:
        """The source of the next row. Without weights no source begins another epoch before all have ended theirs."""
        sources = range(len(self.readers))
        if self.weights is None:
            return min(sources, key=lambda source: (self.readers[source].epoch, self.readers[source].progress))
        weights, tokens = self.weights, self.tally.source_tokens
        return min(sources, key=lambda source: tokens[source] / weights[source])

    def _take(self, source: int) -> Sequence[Example]:
        """The examples of a source's next row. Raises UserError if a whole epoch of it has given none."""
        reader, tally = self.readers[source], self.tally
        epoch = reader.epoch
        encoded = reader.take()
        if encoded.problem is not None:
            if not self.options.skip_bad_rows:
                raise encoded.problem.unskipped()
            if epoch == 0:
                tally.skip(str(encoded.problem))
        tally.truncated += encoded.truncated
        tally.dropped += encoded.dropped
        tally.source_tokens[source] += encoded.tokens
        if reader.epoch > epoch and not tally.source_tokens[source]:
            first = f"; the first: {tally.skipped_first[0]}" if tally.skipped_first else ""
            raise UserError(
                f"{reader.name} gives no example to train on ({tally.skipped} bad rows, {tally.dropped} too"
                f" long{first})"
            )
        return encoded.examples
