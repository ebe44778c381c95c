"""What a sweep reads and did not make: the dense model, data, tasks. Known by their whole content, so that a stage runs
anew when one of them is another, and noticed when one changes while the sweep runs."""

import hashlib
import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ladderize.adapt.data.sources import SourceSpec
from ladderize.checkpoint.llama import check_model
from ladderize.data import split_name
from ladderize.errors import UserError
from ladderize.files.documents import read_own, write_json
from ladderize.files.regular import open_regular
from ladderize.files.work import run_digest

CACHE = "inputs.json"  # in the sweep's folder: the hashes of files that have not changed since
OF_A_MODEL = (".json", ".safetensors", ".model", ".jinja", ".txt")
HASHED_AT_ONCE = 1 << 24


@dataclass
class Inputs:
    """Digests of files, each read once: what a file's size, place and time of change say is remembered in ``cache``."""

    cache: Path
    seen: dict[str, "SeenFile"] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.remembered = read_own(self.cache).get("files", {})

    def model(self, name: str, revision: str | None = None) -> str:
        """Of a checkpoint: all of its weights, its config and its tokenizer. Raises UserError unless it is sound."""
        folder = check_model(name, revision)
        files = sorted(path for path in folder.iterdir() if path.suffix in OF_A_MODEL and path.is_file())
        return _digest({path.name: self.file(path) for path in files})

    def data(self, spec: str) -> str:
        """Of one file as ``--perplexity`` or ``sensitivity --data`` takes it."""
        path, array = split_name(spec)
        if not path.exists():
            raise UserError(f"{path} does not exist")
        return _digest({"file": self.file(path), "array": array})

    def source(self, spec: SourceSpec) -> str:
        """Of one source of training data; a dataset on the hub is known by its name alone."""
        if spec.is_streamed:
            return _digest({"hub": spec.text, "weight": spec.weight})
        return _digest({"weight": spec.weight, "files": [self.data(name) for name in spec.files()]})

    def folder(self, path: Path) -> str:
        """Of all files in a folder, such as one of tasks."""
        if not path.is_dir():
            raise UserError(f"{path} is not a folder")
        files = sorted(entry for entry in path.rglob("*") if entry.is_file() and "__pycache__" not in entry.parts)
        return _digest({str(entry.relative_to(path)): self.file(entry) for entry in files})

    def file(self, path: Path) -> str:
        """The sha256 of a file's content."""
        path = path.resolve()
        signature = _signature(path)
        known = self.remembered.get(str(path))
        if isinstance(known, dict) and known.get("signature") == signature and isinstance(known.get("sha256"), str):
            sha256 = known["sha256"]
        else:
            sha256 = _sha256(path)
            if _signature(path) != signature:
                raise UserError(f"{path} changes while it is read; wait until whatever writes it is done")
            self.remembered[str(path)] = {"signature": signature, "sha256": sha256}
        self.seen[str(path)] = SeenFile(signature, sha256)
        return sha256

    def save(self) -> None:
        """Keep what was learnt of the files of this sweep, for the next run."""
        write_json(self.cache, {"files": {name: self.remembered[name] for name in self.seen}})

    def check_unchanged(self) -> None:
        """Raise UserError for a file that is not what it was when this run began."""
        for name, before in self.seen.items():
            path = Path(name)
            try:
                signature = _signature(path)
                same = signature == before.signature or _sha256(path) == before.sha256
            except OSError:
                same = False
            if not same:
                raise UserError(
                    f"{name} changed while the sweep ran, so what was measured meanwhile may be of either; run the same"
                    " command again: it keeps the stages that were complete before, and that do not depend on it"
                )
            self.seen[name] = SeenFile(signature, before.sha256)


@dataclass(frozen=True)
class SeenFile:
    """signature: what the file system says of it."""

    signature: list[int]
    sha256: str


def _signature(path: Path) -> list[int]:
    status = os.stat(path)
    return [status.st_size, status.st_mtime_ns, status.st_ino, status.st_dev]


def _sha256(path: Path) -> str:
    digest = hashlib.sha256()
    with open_regular(path) as stream:
        while chunk := stream.read(HASHED_AT_ONCE):
            digest.update(chunk)
    return digest.hexdigest()


def _digest(value: Any) -> str:

    return run_digest({"value": value})
