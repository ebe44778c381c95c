"""Temporary files and folders, which the next run removes if their owner was killed.

Each is locked while its owner lives. A temporary that has our name, belongs to this user and is not locked is left over
from a killed run.
"""

import contextlib
import fcntl
import os
import re
import secrets
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO


def why_unwritable(folder: Path) -> str | None:
    """Return the system's reason why no file can be created in ``folder``; None where one can.

    It creates one: root may write where permissions forbid it.
    """
    try:
        with tempfile.TemporaryFile(dir=folder):
            return None
    except OSError as error:
        return error.strerror


def try_lock(descriptor: int) -> bool:
    """Lock an open file or folder for this process; return False if another one holds it, or the file system has no
    locks."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    return True


def lock_folder(folder: Path) -> int | None:
    """Lock a folder until the returned descriptor is closed; return None if another process has just removed it.

    Raises BlockingIOError if another process holds it.
    """
    try:
        descriptor = os.open(folder, os.O_RDONLY)
    except FileNotFoundError:
        return None
    if not try_lock(descriptor):
        os.close(descriptor)
        raise BlockingIOError(f"{folder} is locked")
    if not _is_open_as(descriptor, folder):
        os.close(descriptor)
        return None
    return descriptor


def fsync(path: Path) -> None:
    """Force a file's content, or a folder's names, to disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def fsync_tree(folder: Path) -> None:
    """Force names and contents of everything below ``folder`` to disk. Linked data are there already, and cost
    little."""
    for root, _, files in os.walk(folder):
        for name in files:
            fsync(Path(root) / name)
        fsync(Path(root))


@contextmanager
def locked_folder(parent: Path, prefix: str, mode: int = 0o777) -> Iterator[Path]:
    """Yield a new, locked folder in ``parent`` whose name begins with ``prefix``.

    It is removed at the end. Folders with this prefix that killed runs left are removed at the beginning.
    """
    folder, lock = _make_locked(parent, prefix, lambda path: path.mkdir(mode=mode))
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        os.close(lock)


@contextmanager
def temporary_folder(purpose: str) -> Iterator[Path]:
    """Yield a ``locked_folder`` in the system's folder for temporaries, which only this user can read."""
    with locked_folder(Path(tempfile.gettempdir()), f"ladderize-{purpose}-", 0o700) as folder:
        yield folder


@contextmanager
def replacement(path: Path) -> Iterator[IO[str]]:
    """Yield a locked text file beside ``path``. At the end it takes ``path``'s place; on an error it is removed.

    Its content is on disk before it appears. Files that killed runs left are removed first.
    """
    temporary, lock = _make_locked(path.parent, f".{path.name}.", lambda made: made.touch(exist_ok=False))
    try:
        with temporary.open("w", encoding="utf-8") as file:
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
    finally:
        os.close(lock)


def remove_abandoned(folder: Path, prefix: str) -> None:
    """Remove the temporaries in ``folder`` with names that begin with ``prefix``, unless they are locked."""
    pattern = re.compile(re.escape(prefix) + "[0-9a-f]{8,16}")
    with os.scandir(folder) as entries:
        candidates = [entry for entry in entries if pattern.fullmatch(entry.name) and not entry.is_symlink()]
    for entry in candidates:
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


def _make_locked(parent: Path, prefix: str, make: Callable[[Path], None]) -> tuple[Path, int]:
    """Return a new temporary and the descriptor that locks it; a temporary that another run removes before the lock is
    made again."""
    remove_abandoned(parent, prefix)
    while True:
        path = parent / (prefix + secrets.token_hex(8))
        make(path)
        with contextlib.suppress(FileNotFoundError):
            descriptor = os.open(path, os.O_RDONLY)
            with contextlib.suppress(OSError):  # a file system without locks: nothing is removed there
                fcntl.flock(descriptor, fcntl.LOCK_EX)
            if _is_open_as(descriptor, path):
                return path, descriptor
            os.close(descriptor)


def _is_open_as(descriptor: int, path: Path) -> bool:
    """Return whether an open file or folder still lies at ``path``."""
    try:
        return os.path.samestat(os.fstat(descriptor), path.stat())
    except FileNotFoundError:
        return False
