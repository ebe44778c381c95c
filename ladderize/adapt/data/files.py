"""Files of rows, read by row number in any order, without holding them in memory."""

import codecs
import contextlib
from array import array
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from itertools import accumulate
from pathlib import Path
from typing import Any, BinaryIO, Protocol

from ladderize.adapt.data.formats import IN_WORDS, BadRow, BadRows, Row, check_row, find_format
from ladderize.adapt.data.passages import Passages
from ladderize.data import parse_line
from ladderize.errors import UserError
from ladderize.files.id_arrays import open_ids
from ladderize.files.regular import MAX_LINE_BYTES, read_lines


class Rows(Protocol):
    """Rows 0, 1, ..., and the bad ones that were left out of them at opening."""

    bad: BadRows

    def __len__(self) -> int: ...

    def read(self, number: int) -> Row: ...


class JoinedRows:
    """Several files as one source, in their order."""

    def __init__(self, parts: Sequence[Rows]) -> None:
        self.parts = parts
        self.bad = BadRows(
            sum(part.bad.count for part in parts), [problem for part in parts for problem in part.bad.first][:5]
        )
        self._ends = list(accumulate(len(part) for part in parts))

    def __len__(self) -> int:
        return self._ends[-1]

    def read(self, number: int) -> Row:
        part = bisect_right(self._ends, number)
        return self.parts[part].read(number - (self._ends[part - 1] if part else 0))


class JsonlRows:
    """A JSON object a line. Every line is checked at opening; only where it begins is kept. Raises BadRow naming the
    first bad line."""

    def __init__(self, path: Path, *, skip_bad_rows: bool = False) -> None:
        self.path, self.bad = path, BadRows()
        self._offsets, self._lines = array("q"), array("q")
        offset = 0
        for number, line in enumerate(read_lines(path), start=1):
            if line.strip():
                try:
                    check_row(self._parse(line, number))
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
            return Row(parse_line(line), origin)
        except ValueError as error:
            raise BadRow(f"{origin}: {error}") from None

    def __len__(self) -> int:
        return len(self._offsets)

    def read(self, number: int) -> Row:
        with self.path.open("rb") as file:
            file.seek(self._offsets[number])
            line = file.readline(MAX_LINE_BYTES)
        try:
            row = self._parse(line, self._lines[number])
            check_row(row)
        except BadRow:
            raise UserError(f"{self.path} was changed while it was in use; start again") from None
        return row


class ParquetRows:
    """A parquet file through ``datasets``, which maps its own copy of it into memory. Columns are checked at opening,
    values later."""

    def __init__(self, path: Path) -> None:
        from datasets import Dataset
        from pyarrow import parquet

        self.path, self.bad = path, BadRows()
        self._dataset: Any = ()
        try:
            about = parquet.read_metadata(path)
            columns = about.schema.to_arrow_schema().names
            if about.num_rows:  # datasets refuses a file without rows
                with quiet_datasets():
                    self._dataset = Dataset.from_parquet(str(path))
        except Exception as error:  # pyarrow's own errors, and datasets' around them
            cause = " ".join(str(error.__cause__ or error).split())[:200]
            raise UserError(f"{path} cannot be read as parquet ({cause}); is it complete?") from None
        if find_format(columns) is None:
            raise UserError(f"{path} has the columns {', '.join(columns) or 'of nothing'}; rows need {IN_WORDS}")

    def __len__(self) -> int:
        return len(self._dataset)

    def read(self, number: int) -> Row:
        origin = f"{self.path}, row {number + 1}"
        try:
            return Row(self._dataset[number], origin)
        except UnicodeDecodeError:
            raise BadRow(f"{origin}: holds text that is not UTF-8") from None


class TextRows:
    """A text in passages of about ``passage_bytes`` that end where a line does (or a word, where no line ends near).
    All of them together are the text."""

    def __init__(self, path: Path, passage_bytes: int = Passages.text_bytes) -> None:
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
                self._offsets.append(_end_of_passage(file, self._offsets[-1], size, passage_bytes))

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


def _end_of_passage(file: BinaryIO, offset: int, size: int, passage_bytes: int) -> int:
    if size - offset <= passage_bytes * 5 // 4:
        return size  # no last passage that is too short to be of use
    file.seek(offset)
    block = file.read(passage_bytes)
    least = passage_bytes * 3 // 4  # a line that ended before would leave much of a row empty
    end = block.rfind(b"\n", least) + 1 or block.rfind(b" ", least) + 1
    if not end:
        end = len(block) - 1
        while block[end] & 0xC0 == 0x80:  # inside a character
            end -= 1
    return offset + end


class IdRows:
    """An array of token ids: a row of two dimensions is a row; one of one dimension is cut into passages of
    ``passage_ids`` ids, the last with what is left."""

    def __init__(self, path: Path, key: str | None, passage_ids: int = Passages.ids) -> None:
        self._passage_ids = passage_ids
        self.bad = BadRows()
        self._name = f"{path}:{key}" if key else str(path)
        self._array = open_ids(path, key)

    def __len__(self) -> int:
        if not self._array.size:
            return 0
        return len(self._array) if self._array.ndim == 2 else max(1, len(self._array) // self._passage_ids)

    def read(self, number: int) -> Row:
        if self._array.ndim == 2:
            return Row({"input_ids": self._array[number]}, f"{self._name}, row {number + 1}")
        begin = number * self._passage_ids
        ids = self._array[begin : begin + self._passage_ids if number + 1 < len(self) else None]
        return Row({"input_ids": ids}, f"{self._name}, ids {begin} to {begin + len(ids) - 1}", is_passage=True)


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
