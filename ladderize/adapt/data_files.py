"""The files that ``--data`` names. Imports no numpy, so that the command line starts at once."""

import glob
from pathlib import Path

from ladderize.errors import UserError
from ladderize.files.regular import check_regular, split_name

SOURCE_SUFFIXES = (".json", ".jsonl", ".parquet", ".txt", ".npy", ".npz")


def data_files(name: str, option: str = "--data") -> list[str]:
    """Return the files of one value of ``option``, sorted, those of ``.npz`` with their array's name.

    name: ``x.jsonl``, ``x.npz:array``, a folder or a glob.
    Raises UserError if there are none, or files of several kinds.
    """
    path, key = split_name(name)
    if path.is_dir():  # which may hold a README too
        found = [file for file in path.iterdir() if file.suffix in SOURCE_SUFFIXES]
    else:
        found = [path] if path.exists() else [Path(file) for file in glob.glob(str(path), recursive=True)]
    suffixes = sorted({file.suffix for file in found})
    if len(suffixes) != 1 or suffixes[0] not in SOURCE_SUFFIXES:
        what = f"files that end in {', '.join(suffixes)}" if found else "nothing that exists"
        raise UserError(f"{option} {name} names {what}; give files of one of {', '.join(SOURCE_SUFFIXES)}")
    for file in found:
        check_regular(file)
    return [f"{file}:{key}" if key is not None else str(file) for file in sorted(found)]
