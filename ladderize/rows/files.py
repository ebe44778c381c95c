"""Files of rows, read by row number in any order, without holding them in memory."""

import contextlib
from array import array
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from itertools import accumulate
from pathlib import Path
from typing import Any, Protocol

from ladderize.data import parse_line
from ladderize.errors import UserError
from ladderize.files.regular import MAX_LINE_BYTES, read_lines
from ladderize.rows.formats import TRAINING, BadRow, BadRows, Formats, Row, check_row


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

    def __init__(self, path: Path, formats: Formats = TRAINING, *, skip_bad_rows: bool = False) -> None:
        self.path, self.formats, self.bad = path, formats, BadRows()
        self._offsets, self._lines = array("q"), array("q")
        offset = 0
        for number, line in enumerate(read_lines(path), start=1):
            if line.strip():
                try:
                    check_row(self._parse(line, number), formats)
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
            check_row(row, self.formats)
        except BadRow:
            raise UserError(f"{self.path} was changed while it was in use; start again") from None
        return row


class ParquetRows:
    """A parquet file through ``datasets``, which maps its own copy of it into memory. Columns are checked at opening,
    values later."""

    def __init__(self, path: Path, formats: Formats = TRAINING) -> None:
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
        if formats.find(columns) is None:
            raise UserError(
                f"{path} has the columns {', '.join(columns) or 'of nothing'}; rows need {formats.in_words}"
            )

    def __len__(self) -> int:
        return len(self._dataset)

    def read(self, number: int) -> Row:
        origin = f"{self.path}, row {number + 1}"
        try:
            return Row(self._dataset[number], origin)
        except UnicodeDecodeError:
            raise BadRow(f"{origin}: holds text that is not UTF-8") from None


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
