"""Locks, writing through to the disk, and files that appear whole or not at all."""

import contextlib
import fcntl
import os
import secrets
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
    """Force names and contents of everything below ``folder`` to disk. Linked data are there already, and cost
    little."""
    for root, _, files in os.walk(folder):
        for name in files:
            fsync(Path(root) / name)
        fsync(Path(root))


@contextmanager
def temporary_folder(purpose: str) -> Iterator[Path]:
    """Yield a folder among the system's temporaries, which is removed at the end."""
    with tempfile.TemporaryDirectory(prefix=f"ladderize-{purpose}-", ignore_cleanup_errors=True) as folder:
        yield Path(folder)


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
