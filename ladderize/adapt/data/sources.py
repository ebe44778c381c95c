"""The rows that a ``--data SPEC`` (data_specs.py) names, through ``datasets``: files as a ``Dataset``, mapped from its
cache, and the hub's as an ``IterableDataset``, which is streamed."""

import glob
import hashlib
import os
from collections.abc import Sequence
from typing import Any

from ladderize.adapt.data_specs import SourceSpec
from ladderize.data import file_sha256
from ladderize.errors import UserError
from ladderize.files.id_arrays import read_id_rows, shape_of_ids
from ladderize.files.regular import open_regular, split_name
from ladderize.rows import TRAINING, quiet_datasets

ID_SUFFIXES = (".npy", ".npz")
# suffix -> what ``load_dataset`` takes; a .txt file is one document, and a line of another only where it is one of JSON
LOADERS: dict[str, tuple[str, dict[str, str]]] = {
    ".json": ("json", {}),
    ".jsonl": ("json", {}),
    ".parquet": ("parquet", {}),
    ".txt": ("text", {"sample_by": "document"}),
}
END_BYTES = 1 << 20  # hashed of a file's beginning and of its end


def open_rows(spec: SourceSpec) -> Any:
    """The rows of a source: ``datasets.Dataset``, or ``IterableDataset`` of one on the hub.

    Raises UserError for what cannot be read, holds no rows, or has none of the columns that training reads.
    """
    with quiet_datasets():
        rows = _stream(spec) if spec.hub is not None else _load(spec, spec.files())
    columns = rows.column_names
    if columns is None:  # of a stream that does not say
        columns = list(next(iter(rows), {"text": ""}))
    if TRAINING.find(columns) is None:
        raise UserError(f"{spec.name} has the columns {', '.join(columns)}; rows need {TRAINING.in_words}")
    return rows


def _stream(spec: SourceSpec) -> Any:
    import datasets

    name, config, split = spec.hub or ("", None, "")
    try:
        return datasets.load_dataset(name, config, split=split, streaming=True)
    except Exception as error:  # of the network, the hub, or the dataset's files
        raise UserError(f"{spec.name} cannot be opened ({_in_words(error)}); check its name and the network") from None


def _load(spec: SourceSpec, files: Sequence[str]) -> Any:
    import datasets

    parts = [split_name(file) for file in files]
    suffix = parts[0][0].suffix
    if suffix in ID_SUFFIXES:
        ids = [row for path, key in parts for row in read_id_rows(path, key) if len(row)]
        if not ids:
            raise UserError(f"{spec.name} holds no rows")
        return datasets.Dataset.from_dict({"input_ids": ids}).with_format("numpy")
    full = [os.path.abspath(path) for path, _ in parts if path.stat().st_size]
    if not full:
        raise UserError(f"{spec.name} holds no rows")
    loader, options = LOADERS[suffix]
    try:
        # which takes patterns
        rows = datasets.load_dataset(loader, data_files=[*map(glob.escape, full)], split="train", **options)
    except Exception as error:  # datasets' own, pyarrow's and pandas', one around the other
        for file in files if len(files) > 1 else ():
            _load(spec, [file])  # raises the same for the file that is wrong, where it is one
        what = f"{spec.name}: {files[0]}" if len(files) == 1 else f"{spec.name}, whose files do not fit together,"
        raise UserError(f"{what} cannot be read as {loader} ({_in_words(error)}); is it complete?") from None
    if not len(rows):
        raise UserError(f"{spec.name} holds no rows")
    return rows


def _in_words(error: BaseException) -> str:
    while error.__cause__ is not None:
        error = error.__cause__
    return " ".join(str(error).split())[:200] or type(error).__name__


def row_of_ids(specs: Sequence[SourceSpec]) -> int | None:
    """How many ids all rows of these sources have, where they are arrays of rows of ids; else None."""
    files = [split_name(file) for spec in specs for file in (() if spec.is_streamed else spec.files())]
    if any(spec.is_streamed for spec in specs) or any(path.suffix not in ID_SUFFIXES for path, _ in files):
        return None
    rows = {shape_of_ids(path, key)[1:] for path, key in files}  # of an array of one dimension: ()
    row = rows.pop() if len(rows) == 1 else ()
    return row[0] if row and row[0] > 1 else None


# ---- what a run that goes on must find again ----


def source_identity(spec: SourceSpec) -> dict[str, Any]:
    """The spec, its weight, and of every file its size and a hash of its first and last MiB."""
    files = () if spec.is_streamed else spec.files()
    return {"data": spec.text, "weight": spec.weight, "files": {file: _size_and_ends(file) for file in files}}


def _size_and_ends(file: str) -> list[Any]:
    with open_regular(split_name(file)[0]) as stream:
        digest = hashlib.sha256(stream.read(END_BYTES))
        size = stream.seek(0, os.SEEK_END)
        stream.seek(max(0, size - END_BYTES))
        digest.update(stream.read())
    return [size, digest.hexdigest()]


def source_sha256(spec: SourceSpec) -> str:
    """A hash of the whole content: of the one file (and the array chosen in it), or of all files' hashes."""
    hashes = [file_sha256(file) for file in spec.files()]
    return hashes[0] if len(hashes) == 1 else hashlib.sha256("".join(hashes).encode()).hexdigest()
