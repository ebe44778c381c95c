"""Result files: written whole or not at all, as often as there is something new."""

import os
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ladderize.console import UserError, to_json


def check_writable(path: Path) -> None:
    """Raise UserError unless ``path`` can be written: found before hours of work, not after."""
    path = path.expanduser()
    if path.is_dir():
        raise UserError(f"--out {path} is a folder; name a file")
    if path.exists() and not path.is_file():
        raise UserError(f"--out {path} is no ordinary file; name another")
    parent = path.resolve().parent
    if not parent.is_dir():
        raise UserError(f"--out {path}: the folder {parent} does not exist")
    try:
        with tempfile.TemporaryFile(dir=parent):
            pass
    except OSError as error:
        raise UserError(f"--out {path} cannot be written: {error.strerror}") from None


def write_json(path: Path, value: Mapping[str, Any]) -> None:
    """Write a result document atomically, with schema and version in front."""
    path = path.expanduser().resolve()
    text = to_json(value)
    with tempfile.NamedTemporaryFile("w", dir=path.parent, prefix=f".{path.name}.", delete=False, encoding="utf-8") as file:
        try:
            file.write(text + "\n")
            file.flush()
            os.fsync(file.fileno())
            os.chmod(file.name, 0o666 & ~_umask())
            os.replace(file.name, path)
        except BaseException:
            os.unlink(file.name)
            raise


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask
