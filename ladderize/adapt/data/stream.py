"""The training data as one endless stream of packed rows: the same on every rank, for any number of ranks, and from any
place resumed.

Every rank reads and tokenises all of it and takes its part of each step's rows (``rank_rows``). So the order does not
depend on the number of ranks, a run may be resumed with another number, and no rank has to tell another where it
stands; tokenising costs a small part of what a step costs, and is done in a thread meanwhile.

The stream is made in chunks of about ``CHUNK_ROWS`` rows: examples are drawn from the sources, packed with each
other and shuffled. Files are read in a fresh random order every epoch, long texts and arrays row by row; a hub's
stream is read in its own order, and the shuffle within a chunk is all it gets."""

import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ladderize.adapt.data.chunks import CHUNK_ROWS, Chunk, ChunkMaker, StreamOptions
from ladderize.adapt.data.examples import Encoder, Example
from ladderize.adapt.data.packing import PackedRow
from ladderize.adapt.data.passages import Passages, row_passages
from ladderize.adapt.data.place import DataCounts, SourceCounts, StreamPlace
from ladderize.adapt.data.readers import IndexedReader, Reader, StreamedReader
from ladderize.adapt.data.sources import SourceSpec, open_hub_rows, open_rows, source_identity
from ladderize.errors import UserError
from ladderize.rows.files import Rows
from ladderize.rows.formats import BadRow, BadRows

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

ORDER = 2  # counts the ways in which rows were ever cut and shuffled: work begun by another one cannot go on


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
        self._stop = threading.Event()
        encoder = Encoder(tokenizer, options.seq_len, options.vocab_size)

        def reader(number: int, spec: SourceSpec) -> Reader:
            if spec.is_streamed:
                return StreamedReader(spec.name, open_hub_rows(spec), encoder, count=options.heldout)
            rows = _open_rows(spec, options, lambda path: row_passages(path, tokenizer, options.seq_len))
            return IndexedReader(spec.name, rows, encoder, seed=options.seed, number=number, count=options.heldout)

        weights = [spec.weight for spec in self.specs if spec.weight is not None]
        readers = [reader(number, spec) for number, spec in enumerate(self.specs)]
        self._maker = ChunkMaker(readers, weights or None, options, self._stop)
        self.heldout_rows = self._maker.heldout(encoder)
        self._place = StreamPlace(0, 0, self._maker.snapshot())
        self._chunk: Chunk | None = None
        self._yielded = 0
        self._thread: ThreadPoolExecutor | None = None
        self._next: Future[Chunk] | None = None

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
        assert self._next is not None
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
        self._stop.set()
        if self._thread is not None:
            self._thread.shutdown(wait=True, cancel_futures=True)
        self._thread, self._next = None, None
        self._stop.clear()
        self._chunk, self._yielded = None, 0
        self._place = place

    def close(self) -> None:
        """End the thread, and what it was at. Whoever goes on iterating begins where it was."""
        self.go_to(self.place())

    def __enter__(self) -> "Stream":
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    @property
    def counts(self) -> DataCounts:
        """What was read up to the end of the chunk in use."""
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
            skipped_rows=tally.skipped,
            skipped_first=list(tally.skipped_first),
            padding_share=1 - tally.tokens / places if places else 0.0,
            epochs=min(epochs),
            sources=[
                SourceCounts(spec.text, spec.weight, tokens, seen)
                for spec, tokens, seen in zip(self.specs, tally.source_tokens, epochs, strict=True)
            ],
        )

    def identity(self) -> dict[str, Any]:
        """What the rows depend on besides the tokenizer: a resumed run must find the same. Reads all files once."""
        return {"order": ORDER, **self.options.record(), "sources": [source_identity(spec) for spec in self.specs]}


def _open_rows(
    spec: SourceSpec, options: StreamOptions, passages: Callable[[Path], Passages] = lambda path: Passages()
) -> Rows:
    try:
        return open_rows(spec, skip_bad_rows=options.skip_bad_rows, passages=passages)
    except BadRow as problem:
        raise problem.unskipped() from None


def fixed_rows(
    specs: Sequence[SourceSpec],
    tokenizer: "PreTrainedTokenizerBase | None",
    options: StreamOptions,
    *,
    bad: BadRows | None = None,
) -> list[PackedRow]:
    """All rows of files, once and unshuffled, for ``--eval-data``. bad: where to count what is skipped, if bad rows
    are.

    Raises UserError for a stream, which may have no end.
    """
    bad = bad if bad is not None else BadRows()
    encoder = Encoder(tokenizer, options.seq_len, options.vocab_size)
    examples: list[Example] = []
    for spec in specs:
        if spec.is_streamed:
            raise UserError(f"{spec.name}: a stream cannot be used for validation; give a file")
        rows = _open_rows(spec, options)
        bad.extend(rows.bad)
        for begin in range(0, len(rows), CHUNK_ROWS):
            for encoded in encoder.encode(
                [rows.read(number) for number in range(begin, min(len(rows), begin + CHUNK_ROWS))]
            ):
                if encoded.problem is not None:
                    if not options.skip_bad_rows:
                        raise encoded.problem.unskipped()
                    bad.add(encoded.problem)
                examples += encoded.examples
    if not examples:
        raise UserError(f"{' '.join(spec.name for spec in specs)} gives no example that can be scored")
    return options.to_rows(examples)


def rank_rows(rows: Sequence[PackedRow], rank: int, ranks: int, micro: int) -> list[list[PackedRow]]:
    """A rank's part of a step's rows in micro-batches of at most ``micro``; together the ranks have each row once.

    Every rank gets the same number of micro-batches, since all ranks take part in every pass; where the rows do not
    divide, a rank's last one may be empty (``collate`` makes it one token that counts nothing).
    """
    most = -(-len(rows) // ranks)
    mine = list(rows[rank::ranks])
    return [mine[begin : begin + micro] for begin in range(0, most, micro)]
