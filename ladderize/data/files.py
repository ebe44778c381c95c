"""The sources that options name: files, or datasets of the hub. Imports no numpy: the command line starts at once."""

import glob
import hashlib
import os
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ladderize.errors import UsageError, UserError
from ladderize.files.regular import check_regular, open_regular, split_name

ID_SUFFIXES = (".npy", ".npz")
SOURCE_SUFFIXES = (".json", ".jsonl", ".parquet", ".arrow", ".txt", *ID_SUFFIXES)
# What datasets and the hub write beside rows.
DESCRIPTIONS = ("dataset_info.json", "dataset_infos.json", "dataset_dict.json", "state.json")
SPLIT = r"(?:^|[/._-])(train|validation|valid|val|dev|test|eval)(?=[/._-])"  # in a file's name or its folder's
HUB = "hub:"
END_BYTES = 1 << 20  # of a file's beginning and of its end that ``source_identity`` hashes


def data_files(name: str, option: str = "--data") -> list[str]:
    """Return the files of ``x.jsonl``, ``x.npz:array``, a glob or a folder, sorted, each with its array's name."""
    if name.startswith(HUB):
        raise UserError(f"{option} {name} is a stream, and is read as a whole here; give files")
    path, key = split_name(name)
    if path.is_dir():
        files = _files_below(path, f"{option} {name}")
    else:
        files = [path] if path.exists() else [Path(file) for file in glob.glob(str(path), recursive=True)]
    suffixes = sorted({file.suffix for file in files})
    if len(suffixes) != 1 or suffixes[0] not in SOURCE_SUFFIXES:
        nothing = "a folder without rows" if path.is_dir() else "nothing that exists"
        problem = f"files that end in {', '.join(suffixes)}" if files else nothing
        raise UserError(f"{option} {name} names {problem}; give files of one of {', '.join(SOURCE_SUFFIXES)}")
    for file in files:
        check_regular(file)
    return [f"{file}:{key}" if key is not None else str(file) for file in sorted(files)]


def _files_below(folder: Path, source: str) -> list[Path]:
    """Return the files of rows in a folder and below it, unless datasets would find several splits there."""
    files = []
    splits: dict[str, Path] = {}
    for file in sorted(folder.rglob("*")):
        inner = file.relative_to(folder)
        is_hidden = any(name.startswith(".") for name in inner.parts)
        if is_hidden or file.suffix not in SOURCE_SUFFIXES or file.name in DESCRIPTIONS:
            continue
        files.append(file)
        match = re.search(SPLIT, inner.as_posix())
        if match:
            splits.setdefault(match[1], file)
    if len(splits) > 1:
        raise UserError(f"{source} holds several splits ({', '.join(map(str, splits.values()))}); name those of one")
    return files


def split_weight(text: str) -> tuple[str, float | None]:
    """Return the name and the weight of ``NAME=WEIGHT``; None where there is no weight."""
    match = None if Path(text).exists() else re.fullmatch(r"(.+)=(\d+\.?\d*|\.\d+)", text)  # a path may hold a =
    return (match[1], float(match[2])) if match else (text, None)


def hub_dataset(name: str) -> tuple[str, str | None, str] | None:
    """Return repository, configuration and split of ``hub:OWNER/NAME[:CONFIG]:SPLIT``; None where files are named."""
    if not name.startswith(HUB):
        return None
    match = re.fullmatch(HUB + r"([\w.-]+/[\w.-]+)(?::([^:\[]+))?:([^:\[]+)", name)
    if match is None:
        raise UsageError(f"--data {name}: write hub:OWNER/NAME:SPLIT or hub:OWNER/NAME:CONFIG:SPLIT")
    return match[1], match[2], match[3]


def check_sources(texts: Sequence[str]) -> None:
    """Raise UsageError for a bad name on the hub, and for weights that do not go together. No file is looked at."""
    sources = [split_weight(text) for text in texts]
    streamed = [name for name, _ in sources if hub_dataset(name) is not None]
    weights = [weight for _, weight in sources if weight is not None]
    if len(weights) == len(sources) > 1 and all(weights):
        return
    if weights or (streamed and len(sources) > 1):
        raise UsageError(
            "--data: give each of several sources a weight above 0 (FILE=2.5), or none a weight; beside a dataset of"
            " the hub, whose length is unknown, all need one"
        )


def file_sha256(name: str) -> str:
    """Return a hash of a file and of the array chosen in it."""
    path, key = split_name(name)
    digest = hashlib.sha256()
    with open_regular(path) as file:
        while chunk := file.read(1 << 20):
            digest.update(chunk)
    digest.update((key or "").encode())
    return digest.hexdigest()


def source_sha256(name: str) -> str:
    """Return the hash of the one file of a source, or of all its files' hashes."""
    hashes = [file_sha256(file) for file in data_files(name)]
    return hashes[0] if len(hashes) == 1 else hashlib.sha256("".join(hashes).encode()).hexdigest()


def source_identity(text: str) -> dict[str, Any]:
    """Return what must not change when a run resumes: of every file the size and a hash of the first and last MiB."""
    name = split_weight(text)[0]
    identities = {}
    for file in () if name.startswith(HUB) else data_files(name):
        with open_regular(split_name(file)[0]) as stream:
            digest = hashlib.sha256(stream.read(END_BYTES))
            size = stream.seek(0, os.SEEK_END)
            stream.seek(max(0, size - END_BYTES))
            digest.update(stream.read())
        identities[file] = [size, digest.hexdigest()]
    return {"data": text, "files": identities}
