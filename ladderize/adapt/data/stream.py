"""The training data as one endless stream of packed rows: the same on every rank, for any number of ranks, and from any
place resumed.

Every rank reads and tokenises all of it and takes its part of each step's rows (``rank_rows``). So the order does not
depend on the number of ranks, a run may be resumed with another number, and no rank has to tell another where it
stands; tokenising costs a small part of what a step costs, and is done in a thread meanwhile.

The stream is made in chunks of about ``CHUNK_ROWS`` rows: examples are drawn from the sources, packed with each
other and shuffled. Files are read in a fresh random order every epoch, long texts and arrays row by row; a hub's
stream is read in its own order, and the shuffle within a chunk is all it gets."""

import threading
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from copy import deepcopy
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from ladderize.adapt.data.examples import Encoded, Encoder, Example
from ladderize.adapt.data.packing import PackedRow, join, pack
from ladderize.adapt.data.readers import DRAW_SHUFFLE, Cursor, IndexedReader, Reader, StreamedReader
from ladderize.adapt.data.sources import open_rows, source_identity
from ladderize.adapt.data_specs import SourceSpec
from ladderize.errors import UserError
from ladderize.files.records import Record
from ladderize.rows import BadRow, BadRows, Rows

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

ORDER = 3  # counts the ways in which rows were ever cut and shuffled: work begun by another one cannot go on
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

    def to_rows(self, examples: Sequence[Example]) -> list[PackedRow]:
        return pack(examples, self.seq_len) if self.packing else [join([example]) for example in examples]


@dataclass
class Tally(Record):
    """What was read so far. bad: rows that were skipped, each once and not again every epoch. truncated, dropped:
    examples, in every epoch. source_tokens: of each source."""

    examples: int = 0
    tokens: int = 0
    rows: int = 0
    truncated: int = 0
    dropped: int = 0
    bad: BadRows = field(default_factory=BadRows)
    source_tokens: list[int] = field(default_factory=list)


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
    """What was read of a stream, for the record (``Tally``): up to the end of the chunk in use, which is ahead of what
    was trained on.

    trained_tokens: of the rows that steps were made of; None where there was no training. padding_share: of the places
    in rows of ``seq_len``.
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


@dataclass(frozen=True)
class Chunk:
    """Rows in their final order. number: the chunk's. before, after: snapshots of where all sources stand."""

    number: int
    rows: list[PackedRow]
    before: Snapshot
    after: Snapshot


class Stopped(Exception):
    """The chunk that was being made is not wanted."""


class ChunkMaker:
    """Makes chunk after chunk from where the readers stand. weights: of the sources, or None; see ``Stream`` for what
    they mean."""

    def __init__(self, readers: Sequence[Reader], weights: Sequence[float] | None, options: StreamOptions) -> None:
        self.readers, self.weights, self.options = list(readers), weights, options
        self.stop = threading.Event()  # ends the making of a chunk
        self.names = " ".join(reader.name for reader in readers)
        self.tally = Tally(source_tokens=[0] * len(readers))
        for reader in readers:
            self.tally.bad.extend(reader.bad)

    def snapshot(self) -> Snapshot:
        """Where everything stands."""
        return Snapshot([reader.cursor for reader in self.readers], deepcopy(self.tally))

    def restore(self, snapshot: Snapshot) -> None:
        if snapshot == self.snapshot():
            return
        for reader, cursor in zip(self.readers, snapshot.cursors, strict=True):
            reader.seek(cursor)
        self.tally = deepcopy(snapshot.tally)

    def heldout(self, encoder: Encoder) -> list[PackedRow]:
        """The rows that the sources set aside, in their order. Raises UserError if there are some, but none can be
        scored."""
        rows = [row for reader in self.readers for row in reader.heldout]
        encoded = encoder.encode(rows)
        examples = _usable(encoded, self.options, self.tally.bad)
        if rows and not examples:
            raise UserError(
                f"{self.names}: no held-out row can be scored ({_why_none(encoded, self.options)}); give --eval-data"
                " FILE, hold out more (--heldout), or raise --seq-len"
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
        return min(reader.cursor.epoch for reader in self.readers)

    def _choose(self) -> int:
        """The source of the next row. Without weights no source begins another epoch before all have ended theirs."""
        sources = range(len(self.readers))
        if self.weights is None:
            return min(sources, key=lambda source: (self.readers[source].cursor.epoch, self.readers[source].progress))
        weights, tokens = self.weights, self.tally.source_tokens
        return min(sources, key=lambda source: tokens[source] / weights[source])

    def _take(self, source: int) -> Sequence[Example]:
        """The examples of a source's next row. Raises UserError if a whole epoch of it has given none."""
        reader, tally = self.readers[source], self.tally
        epoch = reader.cursor.epoch
        encoded = reader.take()
        examples = _usable([encoded], self.options, tally.bad if epoch == 0 else BadRows())
        tally.truncated += encoded.truncated
        tally.dropped += encoded.dropped
        tally.source_tokens[source] += sum(len(example.ids) for example in examples)
        if reader.cursor.epoch > epoch and not tally.source_tokens[source]:
            first = f"; the first: {tally.bad.first[0]}" if tally.bad.count else ""
            raise UserError(
                f"{reader.name} gives no example to train on ({tally.bad.count} bad rows; of {tally.dropped} nothing"
                f" that counts is within --seq-len {self.options.seq_len}{first})"
            )
        return examples


class Stream:
    """Iterate for PackedRows, without end; ``close()`` it, or use it as a context. tokenizer: None, if all rows are
    ids.

    Without weights every row of all sources comes once an epoch, in proportion. With weights the next example comes
    from the source with the fewest tokens for its weight, so that the shares of tokens are the weights', and each
    source begins anew when it ends. Raises UserError, at opening or while iterating, for data that cannot be used.
    """

    def __init__(
        self, specs: Sequence[SourceSpec], tokenizer: "PreTrainedTokenizerBase | None", options: StreamOptions
    ) -> None:
        self.specs, self.options = list(specs), options
        encoder = Encoder(tokenizer, options.seq_len, options.vocab_size)

        def reader(number: int, spec: SourceSpec) -> Reader:
            if spec.is_streamed:
                return StreamedReader(spec, encoder, count=options.heldout)
            rows = open_source(spec, options.skip_bad_rows, tokenizer=tokenizer, seq_len=options.seq_len)
            return IndexedReader(spec.name, rows, encoder, seed=options.seed, number=number, count=options.heldout)

        weights = [spec.weight for spec in self.specs if spec.weight is not None]
        readers = [reader(number, spec) for number, spec in enumerate(self.specs)]
        self._maker = ChunkMaker(readers, weights or None, options)
        self.heldout_rows = self._maker.heldout(encoder)
        self._thread: ThreadPoolExecutor | None = None
        self._place = StreamPlace(0, 0, self._maker.snapshot())
        self._chunk: Chunk | None = None
        self._yielded = 0
        self._next: Future[Chunk]

    def __iter__(self) -> Iterator[PackedRow]:
        return self

    def __next__(self) -> PackedRow:
        while self._chunk is None or self._yielded >= len(self._chunk.rows):
            self._advance()
        self._yielded += 1
        return self._chunk.rows[self._yielded - 1]

    def take(self, count: int) -> list[PackedRow]:
        """The next ``count`` rows: a step's."""
        return [next(self) for _ in range(count)]

    def _advance(self) -> None:
        """Go to the next chunk, or to the one that ``go_to`` asked for, and have the one after it made meanwhile."""
        if self._thread is None:
            self._maker.restore(self._place.before)
            self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="ladderize-data")
            self._next = self._thread.submit(self._maker.make, self._place.chunk)
        chunk = self._next.result()  # an error stays there: asked again, the stream says the same
        self._yielded = self._place.yielded if self._chunk is None else 0
        self._chunk = chunk
        self._next = self._thread.submit(self._maker.make, chunk.number + 1)

    def place(self) -> StreamPlace:
        """Where the stream stands, for ``go_to``."""
        if self._chunk is None:
            return self._place
        if self._yielded >= len(self._chunk.rows):
            return StreamPlace(self._chunk.number + 1, 0, self._chunk.after)
        return StreamPlace(self._chunk.number, self._yielded, self._chunk.before)

    def go_to(self, place: StreamPlace) -> None:
        """Go to exactly where ``place()`` was; its chunk is made again when the next row is asked for."""
        if self._thread is not None:
            self._maker.stop.set()
            self._thread.shutdown(wait=True, cancel_futures=True)
            self._maker.stop.clear()
        self._thread, self._chunk, self._yielded, self._place = None, None, 0, place

    def close(self) -> None:
        """End the thread, and what it was at. Whoever goes on iterating begins where it was."""
        self.go_to(self.place())

    def __enter__(self) -> "Stream":
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    @property
    def counts(self) -> DataCounts:
        """What was read up to the end of the chunk in use, which is made again where a run went on within it."""
        if self._chunk is None and self._place.yielded:
            self._advance()
        after = self._chunk.after if self._chunk is not None else self._place.before
        tally = after.tally
        places = tally.rows * self.options.seq_len
        epochs = [reader.epochs(cursor) for reader, cursor in zip(self._maker.readers, after.cursors, strict=True)]
        return DataCounts(
            examples=tally.examples,
            tokens=tally.tokens,
            rows=tally.rows,
            truncated_examples=tally.truncated,
            dropped_examples=tally.dropped,
            skipped_rows=tally.bad.count,
            skipped_first=list(tally.bad.first),
            padding_share=1 - tally.tokens / places if places else 0.0,
            epochs=min(epochs),
            sources=[
                SourceCounts(spec.text, spec.weight, tokens, seen)
                for spec, tokens, seen in zip(self.specs, tally.source_tokens, epochs, strict=True)
            ],
        )

    def identity(self) -> dict[str, Any]:
        """What the rows depend on besides the tokenizer: a resumed run must find the same. Reads all files once.

        Whether bad rows are skipped is not among it: up to the first one it makes no difference.
        """
        record = {name: getattr(self.options, name) for name in ("seq_len", "seed", "packing", "heldout")}
        return {"order": ORDER, **record, "sources": [source_identity(spec) for spec in self.specs]}


def fixed_rows(
    specs: Sequence[SourceSpec], tokenizer: "PreTrainedTokenizerBase | None", options: StreamOptions
) -> list[PackedRow]:
    """All rows of files, once and unshuffled, for ``--eval-data``. Raises UserError for a stream, which may have no
    end."""
    encoder = Encoder(tokenizer, options.seq_len, options.vocab_size)
    examples: list[Example] = []
    every: list[Encoded] = []
    for spec in specs:
        if spec.is_streamed:
            raise UserError(f"{spec.name}: a stream cannot be used for validation; give a file")
        rows = open_source(spec, options.skip_bad_rows)
        for begin in range(0, len(rows), CHUNK_ROWS):
            part = [rows.read(number) for number in range(begin, min(len(rows), begin + CHUNK_ROWS))]
            every += (encoded := encoder.encode(part))
            examples += _usable(encoded, options, BadRows())
    if not examples:
        names = " ".join(spec.name for spec in specs)
        raise UserError(f"{names} gives no example that can be scored ({_why_none(every, options)})")
    return options.to_rows(examples)


def open_source(spec: SourceSpec, skip_bad_rows: bool, **passages: Any) -> Rows:
    """``open_rows``, whose error also says that bad rows may be skipped."""
    try:
        return open_rows(spec, skip_bad_rows=skip_bad_rows, **passages)
    except BadRow as problem:
        raise _unskipped(problem) from None


def _usable(found: Iterable[Encoded], options: StreamOptions, bad: BadRows) -> list[Example]:
    """The examples of rows. Raises BadRow for a bad row, unless such are skipped, and then counted in ``bad``."""
    examples: list[Example] = []
    for encoded in found:
        if encoded.problem is not None:
            if not options.skip_bad_rows:
                raise _unskipped(encoded.problem)
            bad.add(encoded.problem)
        examples += encoded.examples
    return examples


def _why_none(found: Sequence[Encoded], options: StreamOptions) -> str:
    """Why rows gave no example, in words."""
    cut, bad = sum(encoded.dropped for encoded in found), sum(encoded.problem is not None for encoded in found)
    return f"of {cut} nothing that counts is within --seq-len {options.seq_len}; bad rows: {bad}"


def _unskipped(problem: BadRow) -> BadRow:
    return BadRow(f"{problem}; repair it, or skip such rows with --skip-bad-rows")


def rank_rows(rows: Sequence[PackedRow], rank: int, ranks: int, micro: int) -> list[list[PackedRow]]:
    """A rank's part of a step's rows in micro-batches of at most ``micro``; together the ranks have each row once.

    Every rank gets the same number of micro-batches, since all ranks take part in every pass; where the rows do not
    divide, a rank's last one may be empty (``collate`` makes it one token that counts nothing).
    """
    most = -(-len(rows) // ranks)
    mine = list(rows[rank::ranks])
    return [mine[begin : begin + micro] for begin in range(0, most, micro)]
