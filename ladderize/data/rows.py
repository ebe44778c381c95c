"""Rows of files. Every reader of files takes them from here, but ``datasets``, which maps what training reads.

A ``.txt`` is one row, whatever its lines; a line of ``.jsonl`` that is not empty, a row of ``.parquet`` and of a 2-D
array of token ids is one; a 1-D array is one. A byte order mark is skipped, and CRLF is LF.
"""

import itertools
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from ladderize.console import is_text, sentence
from ladderize.data.files import ID_SUFFIXES
from ladderize.errors import UserError
from ladderize.files.parsing import parse_json
from ladderize.files.regular import check_regular, read_lines, read_text, split_name

MAX_TEXT_BYTES = 1 << 30  # of a .txt file, which is read and tokenised as a whole
MOST_IDS = 2**31  # ids are smaller


@dataclass(frozen=True)
class Row:
    """One row of a source, and where it stands there, for people."""

    values: Mapping[str, Any]
    origin: str


def file_rows(name: str) -> Iterator[Row]:
    """Yield the rows of a file; raises UserError, which names the bad line, for one that cannot be read."""
    path, key = split_name(name)
    if not path.exists():
        raise UserError(f"{path} does not exist")
    if path.suffix in ID_SUFFIXES:
        for ids in np.atleast_2d(open_ids(path, key)):
            yield Row({"input_ids": ids}, str(path))
    elif path.suffix == ".txt":
        yield Row({"text": read_text(path, MAX_TEXT_BYTES)}, str(path))
    elif path.suffix == ".jsonl":
        yield from _json_lines(path)
    elif path.suffix == ".parquet":
        yield from _parquet_rows(path)
    else:
        raise UserError(f"{path} is neither text (.txt, .jsonl, .parquet) nor token ids (.npy, .npz)")


def _json_lines(path: Path) -> Iterator[Row]:
    for number, line in enumerate(read_lines(path), start=1):
        if not line.strip():
            continue
        origin = f"{path}, line {number}"
        try:
            values = parse_json(line, constants=True)
        except ValueError as error:
            raise UserError(f"{origin}: is not JSON ({error})") from None
        if b"\\u" in line and not is_text(json.dumps(values, ensure_ascii=False)):
            raise UserError(f"{origin}: holds half of a surrogate pair, which is not a character")
        yield Row(values, origin)


def _parquet_rows(path: Path) -> Iterator[Row]:
    from pyarrow import ArrowException
    from pyarrow.parquet import ParquetFile

    numbers = itertools.count(1)
    try:
        with ParquetFile(path) as file:
            for batch in file.iter_batches(1024):
                for values in batch.to_pylist():
                    yield Row(values, f"{path}, row {next(numbers)}")
    except (ArrowException, OSError, UnicodeDecodeError) as error:
        raise UserError(f"{path} cannot be read as parquet ({sentence(error)[:200]})") from None


# ---- token ids ----


def open_ids(path: Path, key: str | None = None) -> np.ndarray:
    """Return the token ids of a ``.npy`` file, which is mapped, or of an array in a ``.npz`` archive (``key``, or the
    only one). They are integers in one or two dimensions, each from 0 to 2**31 - 1; raises UserError for others."""
    check_regular(path)
    try:
        array = np.load(path, mmap_mode="r", allow_pickle=False)
        if path.suffix == ".npz":
            with array as archive:
                key = archive.files[0] if key is None and len(archive.files) == 1 else key
                if key not in archive.files:
                    names = ", ".join(archive.files[:20]) or "none"
                    raise UserError(f"{path} holds the arrays {names}; name one of them, as in {path}:NAME")
                array = np.asarray(archive[key])
    except UserError:
        raise
    except Exception:  # numpy, zipfile and zlib raise a dozen kinds for broken files
        raise UserError(
            f"{path} is not a NumPy array of numbers, or an archive of these (Python objects are never unpickled)"
        ) from None
    if array.dtype.kind not in "iu" or array.ndim not in (1, 2):
        raise UserError(
            f"{path}: expected token ids, that is integers in one or two dimensions, not {array.dtype} in {array.ndim}"
        )
    _check_range(array, f"{path} holds")
    return array


def as_ids(value: Any, origin: str) -> np.ndarray:
    """Return a list of token ids as int64; raises UserError unless all are integers from 0 to 2**31 - 1."""
    try:
        array = np.asarray(value)
    except (ValueError, OverflowError):
        array = np.empty(0, dtype=object)
    if array.shape == (0,) and isinstance(value, list) and not value:
        return np.empty(0, dtype=np.int64)
    if array.ndim != 1 or array.dtype.kind not in "iu":
        raise UserError(f"{origin}: its input_ids are not a list of integers")
    _check_range(array, f"{origin}: its input_ids hold")
    return array.astype(np.int64)


def _check_range(ids: np.ndarray, subject: str) -> None:
    if ids.size and not 0 <= int(ids.min()) <= int(ids.max()) < MOST_IDS:
        raise UserError(f"{subject} a negative or an impossibly large token id")
