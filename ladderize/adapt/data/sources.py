"""The files of a ``--data SPEC`` (data_specs.py), opened as rows, which are read by number, in any order. The hub's
datasets are streamed (readers.py).

A long text or array is cut into passages, so that its rows can be shuffled over the whole. In training a passage is
about one row: rows that come one after the other in the text would otherwise come together in a step. Of a text only
the bytes are known before it is tokenised, so a sample of it says how many make a row.
"""

import codecs
import hashlib
from array import array
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

from ladderize.adapt.data_specs import SourceSpec
from ladderize.data import file_sha256, text_ids
from ladderize.errors import UserError
from ladderize.files.id_arrays import open_ids, shape_of_ids
from ladderize.files.regular import split_name
from ladderize.rows import BadRows, JoinedRows, JsonlRows, ParquetRows, Row, Rows

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

WHOLE_HASH = 1_000_000_000  # bytes; of larger files only the ends are hashed
LONG_PASSAGE = 16 << 10  # bytes of a text, or ids, for readers that join passages again
LEAST_PASSAGE = 64  # bytes
ID_SUFFIXES = (".npy", ".npz")
TEXT_SAMPLES, SAMPLE_BYTES = 16, 8 << 10


def open_rows(
    spec: SourceSpec,
    *,
    skip_bad_rows: bool = False,
    tokenizer: "PreTrainedTokenizerBase | None" = None,
    seq_len: int | None = None,
) -> Rows:
    """A source of files, for reading by row number. tokenizer, seq_len: long texts and arrays are cut into passages of
    about so many tokens; None: long ones. Raises UserError for what cannot be read or holds no rows, and BadRow for a
    row that has no known format, unless such are to be skipped."""

    def open_file(file: str) -> Rows:
        path, key = split_name(file)
        if path.suffix == ".jsonl":
            return JsonlRows(path, skip_bad_rows=skip_bad_rows)
        if path.suffix == ".parquet":
            return ParquetRows(path)
        if path.suffix == ".txt":
            known = tokenizer is not None and seq_len is not None and path.stat().st_size
            return TextRows(path, _bytes_of_row(path, tokenizer, seq_len) if known else LONG_PASSAGE)
        return IdRows(path, key, seq_len or LONG_PASSAGE)

    parts = [open_file(file) for file in spec.files()]
    rows = parts[0] if len(parts) == 1 else JoinedRows(parts)
    if not len(rows):
        left_out = f" besides {rows.bad.count} bad ones, first {rows.bad.first[0]}" if rows.bad.count else ""
        raise UserError(f"{spec.name} holds no rows{left_out}")
    return rows


def row_of_ids(specs: Sequence[SourceSpec]) -> int | None:
    """How many ids all rows of these sources have, where they are arrays of rows of ids; else None."""
    files = [split_name(file) for spec in specs for file in (() if spec.is_streamed else spec.files())]
    if any(spec.is_streamed for spec in specs) or any(path.suffix not in ID_SUFFIXES for path, _ in files):
        return None
    rows = {shape_of_ids(path, key)[1:] for path, key in files}  # of an array of one dimension: ()
    row = rows.pop() if len(rows) == 1 else ()
    return row[0] if row and row[0] > 1 else None


class TextRows:
    """A text in passages of about ``passage`` bytes that end where a line does (or a word, where no line ends near).
    All of them together are the text."""

    def __init__(self, path: Path, passage: int = LONG_PASSAGE) -> None:
        self.path, self.bad = path, BadRows()
        self._offsets = array("q", [0])
        decoder = codecs.getincrementaldecoder("utf-8")()
        with path.open("rb") as file:
            try:
                while block := file.read(1 << 20):
                    decoder.decode(block)
                decoder.decode(b"", final=True)
            except UnicodeDecodeError:
                raise UserError(f"{path} is not UTF-8 text") from None
            size = file.tell()
            while size > self._offsets[-1]:
                self._offsets.append(_end_of_passage(file, self._offsets[-1], size, passage))

    def __len__(self) -> int:
        return len(self._offsets) - 1

    def read(self, number: int) -> Row:
        begin, end = self._offsets[number], self._offsets[number + 1]
        with self.path.open("rb") as file:
            file.seek(begin)
            content = file.read(end - begin)
        try:
            text = content.decode("utf-8")
        except UnicodeDecodeError:
            raise UserError(f"{self.path} was changed while it was in use; start again") from None
        return Row({"text": text}, f"{self.path}, bytes {begin} to {end - 1}", is_passage=True)


def _end_of_passage(file: BinaryIO, offset: int, size: int, passage: int) -> int:
    if size - offset <= passage * 5 // 4:
        return size  # no last passage that is too short to be of use
    file.seek(offset)
    block = file.read(passage)
    least = passage * 3 // 4  # a line that ended before would leave much of a row empty
    end = block.rfind(b"\n", least) + 1 or block.rfind(b" ", least) + 1
    if not end:
        end = len(block) - 1
        while block[end] & 0xC0 == 0x80:  # inside a character
            end -= 1
    return offset + end


def _bytes_of_row(path: Path, tokenizer: Any, seq_len: int | None) -> int:
    """How many bytes of a text make about ``seq_len`` tokens, by parts of it from all over it; the same every time."""
    size, texts = path.stat().st_size, []
    with path.open("rb") as file:
        for number in range(TEXT_SAMPLES):
            file.seek(max(0, size - SAMPLE_BYTES) * number // (TEXT_SAMPLES - 1))
            texts.append(file.read(SAMPLE_BYTES).decode("utf-8", errors="ignore"))
    tokens = sum(map(len, text_ids(tokenizer, texts)))
    count = sum(len(text.encode()) for text in texts)
    # BOS, which begins every passage, takes a place of the row
    return max(LEAST_PASSAGE, round(count / max(1, tokens) * ((seq_len or LONG_PASSAGE) - 1)))


class IdRows:
    """An array of token ids: a row of two dimensions is a row; one of one dimension is cut into passages of
    ``passage`` ids, the last with what is left."""

    def __init__(self, path: Path, key: str | None, passage: int) -> None:
        self.bad, self._passage = BadRows(), passage
        self._name = f"{path}:{key}" if key else str(path)
        self._array = open_ids(path, key)

    def __len__(self) -> int:
        if not self._array.size:
            return 0
        return len(self._array) if self._array.ndim == 2 else max(1, len(self._array) // self._passage)

    def read(self, number: int) -> Row:
        if self._array.ndim == 2:
            return Row({"input_ids": self._array[number]}, f"{self._name}, row {number + 1}")
        begin = number * self._passage
        ids = self._array[begin : begin + self._passage if number + 1 < len(self) else None]
        return Row({"input_ids": ids}, f"{self._name}, ids {begin} to {begin + len(ids) - 1}", is_passage=True)


# ---- what a run that goes on must find again ----


def source_identity(spec: SourceSpec) -> dict[str, Any]:
    """The spec, and a hash of every file (of its size and ends, over ``WHOLE_HASH`` bytes)."""
    files = [] if spec.is_streamed else spec.files()
    return {"data": spec.text, "weight": spec.weight, "files": {file: _hash(file) for file in files}}


def source_sha256(spec: SourceSpec) -> str:
    """A hash of the whole content: of the one file (and the array chosen in it), or of all files' hashes."""
    hashes = [file_sha256(file) for file in spec.files()]
    return hashes[0] if len(hashes) == 1 else hashlib.sha256("".join(hashes).encode()).hexdigest()


def _hash(file: str) -> str:
    path, key = split_name(file)
    size = path.stat().st_size
    if size <= WHOLE_HASH:
        return file_sha256(file)
    digest = hashlib.sha256(f"{size} {key or ''}".encode())
    with path.open("rb") as stream:
        digest.update(stream.read(1 << 20))
        stream.seek(max(0, size - (1 << 20)))
        digest.update(stream.read())
    return digest.hexdigest()
