"""The rows that ``--data`` names, read by ``datasets``: files are mapped from its cache, the hub is streamed."""

import glob
import hashlib
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ladderize.adapt.data_files import HUB, data_files, hub_dataset, split_weight
from ladderize.console import sentence
from ladderize.data import file_sha256
from ladderize.errors import UserError
from ladderize.files.id_arrays import open_ids, read_id_rows
from ladderize.files.regular import open_regular, split_name
from ladderize.files.temporaries import why_unwritable
from ladderize.rows import TRAINING, quiet_datasets

ID_SUFFIXES = (".npy", ".npz")
END_BYTES = 1 << 20  # of a file's beginning and of its end that are hashed


@quiet_datasets()
def open_rows(name: str, option: str = "--data") -> Any:
    """Return the rows of one source as a ``datasets.Dataset``, those of the hub as an ``IterableDataset``.

    A text file is one row. Raises UserError for a source that cannot be read, holds no rows, or has none of the columns
    that training reads.
    """
    import datasets

    hub = hub_dataset(name) if option == "--data" else None
    files = [split_name(file) for file in data_files(name, option)] if hub is None else []
    full = [glob.escape(os.path.abspath(path)) for path, _ in files if path.stat().st_size]  # datasets takes patterns
    suffix, rows = files[0][0].suffix if files else "", None
    loader = {".txt": "text", ".parquet": "parquet", ".arrow": "arrow"}.get(suffix, "json")
    if full:
        check_cache()
    try:
        if hub is not None:
            rows = datasets.load_dataset(*hub[:2], split=hub[2], streaming=True)
        elif suffix in ID_SUFFIXES:
            ids = [row for path, key in files for row in read_id_rows(path, key) if len(row)]
            rows = datasets.Dataset.from_dict({"input_ids": ids}).with_format("numpy")
        elif full:
            as_documents = {"sample_by": "document", "encoding": "utf-8-sig"} if loader == "text" else {}
            rows = datasets.load_dataset(loader, data_files=full, split="train", **as_documents)
        columns = column_names(rows) if rows else []
    except UserError:
        raise
    except Exception as error:  # of datasets, pyarrow, pandas or the network, nested
        for file in data_files(name, option) if len(files) > 1 else ():
            open_rows(file, option)  # raises the error of the broken file by its name
        problem = sentence(error.__cause__ or error)[:200]
        raise UserError(f"{option} {name} cannot be read ({problem}); is it there, and complete?") from None
    if not columns:
        raise UserError(f"{option} {name} holds no rows")
    if TRAINING.find(columns) is None:
        raise UserError(f"{option} {name} has the columns {', '.join(columns)}; rows need {TRAINING.in_words}")
    return rows


def check_cache() -> None:
    """Raise UserError where datasets cannot write its cache."""
    from datasets import config

    cache = Path(config.HF_DATASETS_CACHE)
    try:
        cache.mkdir(parents=True, exist_ok=True)
        problem = why_unwritable(cache)
    except OSError as error:
        problem = error.strerror
    if problem is not None:
        raise UserError(
            f"the cache of datasets, {cache}, takes no files ({problem}); set HF_DATASETS_CACHE to a folder that does"
        )


def column_names(rows: Any) -> list[str]:
    """Return the columns of a dataset; of a stream that does not know them, those of its first row."""
    return rows.column_names or list(next(iter(rows), ()))


def row_of_ids(texts: Sequence[str]) -> int | None:
    """Return the number of ids in each row where all sources are arrays with rows of one length; else None."""
    names = [split_weight(text)[0] for text in texts]
    if any(name.startswith(HUB) for name in names):
        return None
    files = [split_name(file) for name in names for file in data_files(name)]
    rows = {open_ids(path, key).shape[1:] if path.suffix in ID_SUFFIXES else () for path, key in files}
    row = rows.pop() if len(rows) == 1 else ()
    return row[0] if row and row[0] > 1 else None


def source_identity(text: str) -> dict[str, Any]:
    """Return what must not change when a run resumes: name, weight, and of every file the size and a hash of the first
    and last MiB."""
    name, found = split_weight(text)[0], {}
    for file in () if name.startswith(HUB) else data_files(name):
        with open_regular(split_name(file)[0]) as stream:
            digest = hashlib.sha256(stream.read(END_BYTES))
            size = stream.seek(0, os.SEEK_END)
            stream.seek(max(0, size - END_BYTES))
            digest.update(stream.read())
        found[file] = [size, digest.hexdigest()]
    return {"data": text, "files": found}


def source_sha256(name: str) -> str:
    """Return a hash of the whole content: of the one file (and the array chosen in it), or of all files' hashes."""
    hashes = [file_sha256(file) for file in data_files(name)]
    return hashes[0] if len(hashes) == 1 else hashlib.sha256("".join(hashes).encode()).hexdigest()
