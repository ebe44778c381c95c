"""The rows that ``--data`` names, read by ``datasets``: files are mapped from its cache, the hub is streamed."""

import contextlib
import glob
import os
from collections.abc import Iterator
from typing import Any

from ladderize.console import sentence
from ladderize.data.files import ID_SUFFIXES, data_files, hub_dataset
from ladderize.data.rows import TRAINING, file_rows
from ladderize.errors import UserError
from ladderize.files.regular import split_name

LOADERS = {".txt": "text", ".parquet": "parquet", ".arrow": "arrow", ".json": "json", ".jsonl": "json"}


@contextlib.contextmanager
def quiet_datasets() -> Iterator[None]:
    """Silence the progress bars and log lines of ``datasets`` in the block."""
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


@quiet_datasets()
def open_rows(name: str, option: str = "--data") -> Any:
    """Return the rows of one source as a ``datasets.Dataset``, those of the hub as an ``IterableDataset``.

    Raises UserError for a source that cannot be read, holds no rows, or has none of the columns that training reads.
    """
    import datasets

    hub = hub_dataset(name) if option == "--data" else None
    files = data_files(name, option) if hub is None else []
    try:
        rows = _open_files(files) if hub is None else datasets.load_dataset(*hub[:2], split=hub[2], streaming=True)
        columns = column_names(rows) if rows else []
    except UserError:
        raise
    except Exception as error:  # of datasets, pyarrow, pandas or the network, nested
        for file in files if len(files) > 1 else ():
            open_rows(file, option)  # raises the error of the broken file by its name
        problem = sentence(error.__cause__ or error)[:200]
        raise UserError(f"{option} {name} cannot be read ({problem}); is it there, and complete?") from None
    if not columns:
        raise UserError(f"{option} {name} holds no rows")
    if TRAINING.find(columns) is None:
        raise UserError(f"{option} {name} has the columns {', '.join(columns)}; rows need {TRAINING}")
    return rows


def _open_files(files: list[str]) -> Any:
    """Return the rows of files of one kind; None where all are empty."""
    import datasets

    paths = [split_name(file)[0] for file in files]
    full = [glob.escape(os.path.abspath(path)) for path in paths if path.stat().st_size]  # datasets takes patterns
    suffix = paths[0].suffix
    if suffix in ID_SUFFIXES:
        ids = [row.values["input_ids"] for file in files for row in file_rows(file)]
        return datasets.Dataset.from_dict({"input_ids": [row for row in ids if len(row)]}).with_format("numpy")
    if not full:
        return None
    as_documents = {"sample_by": "document", "encoding": "utf-8-sig"} if suffix == ".txt" else {}
    return datasets.load_dataset(LOADERS[suffix], data_files=full, split="train", **as_documents)


def column_names(rows: Any) -> list[str]:
    """Return the columns of a dataset; of a stream that does not know them, those of its first row."""
    return rows.column_names or list(next(iter(rows), ()))
