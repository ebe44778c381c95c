"""Temporary files and folders that the next run removes if the one that made them was killed.

Each is locked for as long as its owner lives. What bears our name, is this user's and is not locked is a killed
run's.
"""

import contextlib
import fcntl
import os
import re
import secrets
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

from ladderize.files.locks import try_lock

_HEX = 16  # digits in a name, which tell our files from others with the same beginning


@contextmanager
def temporary_folder(purpose: str) -> Iterator[Path]:
    """Yield a locked folder ``ladderize-PURPOSE-...`` in the system's folder for temporaries; it is removed at the end.

    What killed runs left of this purpose is removed first.
    """
    parent, prefix = Path(tempfile.gettempdir()), f"ladderize-{purpose}-"
    remove_abandoned(parent, prefix)
    folder, lock = _make_locked(parent, prefix)
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        os.close(lock)


@contextmanager
def replacement(path: Path) -> Iterator[IO[str]]:
    """Yield a locked text file beside ``path``; at the end it takes ``path``'s place, on an error it is removed.

    What killed runs left of it is removed first. The content is on the disk before the file appears.
    """
    prefix = f".{path.name}."
    remove_abandoned(path.parent, prefix)
    file, temporary = _open_locked(path.parent, prefix)
    try:
        with file:
            yield file
            file.flush()
            os.fsync(file.fileno())
            os.replace(temporary, path)
    except BaseException as error:
        with contextlib.suppress(OSError):
            temporary.unlink(missing_ok=True)
        if isinstance(error, OSError) and error.filename is None:  # a full disk, say: a write does not know its file
            raise OSError(error.errno, error.strerror, str(path)) from None
        raise


def remove_abandoned(folder: Path, prefix: str) -> None:
    """Remove the temporaries in ``folder`` with names that begin with ``prefix``, unless they are locked."""
    pattern = re.compile(re.escape(prefix) + f"[0-9a-f]{{{_HEX}}}")
    with os.scandir(folder) as entries:
        found = [entry for entry in entries if pattern.fullmatch(entry.name) and not entry.is_symlink()]
    for entry in found:
        try:
            if entry.stat(follow_symlinks=False).st_uid != os.getuid():
                continue
            descriptor = os.open(entry.path, os.O_RDONLY | os.O_NONBLOCK)
        except OSError:  # its owner removed it just now, or it may not be opened
            continue
        try:
            if not try_lock(descriptor):
                continue
            if entry.is_dir(follow_symlinks=False):
                shutil.rmtree(entry.path, ignore_errors=True)
            else:
                Path(entry.path).unlink(missing_ok=True)
        finally:
            os.close(descriptor)


def _fresh(prefix: str) -> str:
    return prefix + secrets.token_hex(_HEX // 2)


def _holds(descriptor: int, path: Path) -> bool:
    """Lock an open temporary; False if another run, which found it before it was locked, has removed it."""
    with contextlib.suppress(OSError):  # a file system without locks: nothing is removed there
        fcntl.flock(descriptor, fcntl.LOCK_EX)
    return path.exists()


def _make_locked(parent: Path, prefix: str) -> tuple[Path, int]:
    while True:
        folder = parent / _fresh(prefix)
        folder.mkdir(mode=0o700)
        with contextlib.suppress(FileNotFoundError):
            descriptor = os.open(folder, os.O_RDONLY)
            if _holds(descriptor, folder):
                return folder, descriptor
            os.close(descriptor)


def _open_locked(folder: Path, prefix: str) -> tuple[IO[str], Path]:
    while True:
        path = folder / _fresh(prefix)
        file = path.open("x", encoding="utf-8")
        if _holds(file.fileno(), path):
            return file, path
        file.close()
