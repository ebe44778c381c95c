"""The rows that a ``--data SPEC`` (data_specs.py) names, read by ``datasets``.

Files become a ``Dataset`` that is mapped from the cache; a dataset of the hub is streamed as an ``IterableDataset``.
"""

import glob
import hashlib
import os
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from ladderize.adapt.data_specs import SourceSpec
from ladderize.data import file_sha256
from ladderize.errors import UserError
from ladderize.files.id_arrays import open_ids, read_id_rows
from ladderize.files.regular import open_regular, split_name
from ladderize.rows import TRAINING, quiet_datasets

ID_SUFFIXES = (".npy", ".npz")
END_BYTES = 1 << 20  # of a file's beginning and of its end that are hashed


@quiet_datasets()
def open_rows(spec: SourceSpec) -> Any:
    """Return the rows of a source: a ``datasets.Dataset``, or an ``IterableDataset`` of one on the hub.

    A text file is one row. Raises UserError for a source that cannot be read, holds no rows, or has none of the columns
    that training reads.
    """
    import datasets

    files = [] if spec.hub is not None else [split_name(file) for file in spec.files()]
    full = [glob.escape(os.path.abspath(path)) for path, _ in files if path.stat().st_size]  # datasets takes patterns
    suffix = files[0][0].suffix if files else ""
    loader = {".txt": "text", ".parquet": "parquet"}.get(suffix, "json")
    columns: list[str] = []
    try:
        if spec.hub is not None:
            rows = datasets.load_dataset(*spec.hub[:2], split=spec.hub[2], streaming=True)
            columns = rows.column_names or list(next(iter(rows), ()))
        elif suffix in ID_SUFFIXES:
            ids = [row for path, key in files for row in read_id_rows(path, key) if len(row)]
            rows = datasets.Dataset.from_dict({"input_ids": ids}).with_format("numpy")
        elif full:
            whole = {"sample_by": "document"} if loader == "text" else {}
            rows = datasets.load_dataset(loader, data_files=full, split="train", **whole)
        if files and full and len(rows):
            columns = rows.column_names
    except UserError:
        raise
    except Exception as error:  # of datasets, pyarrow, pandas or the network, nested
        for file in spec.files() if len(files) > 1 else ():
            open_rows(replace(spec, text=file))  # raises the error of the broken file by its name
        problem = " ".join(str(error.__cause__ or error).split())[:200] or type(error).__name__
        raise UserError(f"{spec.name} cannot be read ({problem}); is it there, and complete?") from None
    if not columns:
        raise UserError(f"{spec.name} holds no rows")
    if TRAINING.find(columns) is None:
        raise UserError(f"{spec.name} has the columns {', '.join(columns)}; rows need {TRAINING.in_words}")
    return rows


def row_of_ids(specs: Sequence[SourceSpec]) -> int | None:
    """Return the number of ids in each row where all sources are arrays with rows of one length; else None."""
    if any(spec.is_streamed for spec in specs):
        return None
    files = [split_name(file) for spec in specs for file in spec.files()]
    rows = {open_ids(path, key).shape[1:] if path.suffix in ID_SUFFIXES else () for path, key in files}
    row = rows.pop() if len(rows) == 1 else ()
    return row[0] if row and row[0] > 1 else None


def source_identity(spec: SourceSpec) -> dict[str, Any]:
    """Return what must not change when a run resumes: the spec, its weight, and the size and a hash of the first and
    last MiB of every file."""
    found = {}
    for file in () if spec.is_streamed else spec.files():
        with open_regular(split_name(file)[0]) as stream:
            digest = hashlib.sha256(stream.read(END_BYTES))
            size = stream.seek(0, os.SEEK_END)
            stream.seek(max(0, size - END_BYTES))
            digest.update(stream.read())
        found[file] = [size, digest.hexdigest()]
    return {"data": spec.text, "weight": spec.weight, "files": found}


def source_sha256(spec: SourceSpec) -> str:
    """Return a hash of the whole content: of the one file (and the array chosen in it), or of all files' hashes."""
    hashes = [file_sha256(file) for file in spec.files()]
    return hashes[0] if len(hashes) == 1 else hashlib.sha256("".join(hashes).encode()).hexdigest()
