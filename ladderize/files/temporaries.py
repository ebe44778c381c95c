"""Locks, writing through to the disk, and files that appear whole or not at all."""

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


def why_unwritable(folder: Path) -> str | None:
    """Return the system's reason why no file can be created in ``folder``; None where one can.

    It creates one: root may write where permissions forbid it.
    """
    try:
        with tempfile.TemporaryFile(dir=folder):
            return None
    except OSError as error:
        return error.strerror


def lock_folder(folder: Path) -> int | None:
    """Lock a folder until the returned descriptor is closed; return None if another process has just removed it.

    A file system without locks is taken for one where nobody else is.
    Raises BlockingIOError if another process holds it.
    """
    try:
        descriptor = os.open(folder, os.O_RDONLY)
    except FileNotFoundError:
        return None
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(descriptor)
        raise
    except OSError:  # the file system has no locks
        pass
    if not folder.exists() or not os.path.samestat(os.fstat(descriptor), folder.stat()):
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
    """Force names and contents of everything below ``folder`` to disk. Linked data are there already."""
    for root, _, files in os.walk(folder):
        for name in files:
            fsync(Path(root) / name)
        fsync(Path(root))


@contextmanager
def locked_folder(parent: Path, prefix: str, mode: int = 0o777) -> Iterator[Path]:
    """Yield a new folder in ``parent``, which is locked meanwhile and removed at the end.

    Those of the same prefix whose process was killed are removed first.
    """
    remove_abandoned(parent, prefix)
    lock = None
    while lock is None:  # another run may take it for an abandoned one before it is locked
        folder = parent / f"{prefix}{secrets.token_hex(8)}"
        folder.mkdir(mode)
        with contextlib.suppress(BlockingIOError):
            lock = lock_folder(folder)
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        os.close(lock)


def remove_abandoned(parent: Path, prefix: str) -> None:
    """Remove the folders that ``locked_folder`` made and whose process is gone."""
    pattern = re.compile(re.escape(prefix) + "[0-9a-f]{16}")
    for name in filter(pattern.fullmatch, os.listdir(parent) if parent.is_dir() else ()):
        try:
            descriptor = os.open(parent / name, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
        except OSError:  # its owner removed it just now, or it may not be opened
            continue
        with contextlib.suppress(OSError):  # its process holds the lock while it lives; or there are no locks
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(parent / name, ignore_errors=True)
        os.close(descriptor)


@contextmanager
def temporary_folder(purpose: str) -> Iterator[Path]:
    """Yield a folder among the system's temporaries, which only this user may open, and which is removed at the end."""
    with locked_folder(Path(tempfile.gettempdir()), f"ladderize-{purpose}-", 0o700) as folder:
        yield folder


@contextmanager
def replacement(path: Path) -> Iterator[IO[str]]:
    """Yield a text file beside ``path``. At the end it takes ``path``'s place; on an error it is removed.

    Its content is on disk before it appears.
    """
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(8)}")
    try:
        with temporary.open("x", encoding="utf-8") as file:
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
