"""Locks between processes, and data that is on the disk when they end."""

import fcntl
import os
from pathlib import Path


def try_lock(descriptor: int) -> bool:
    """Lock an open file or folder for this process; False if another one holds it, or the file system has no locks."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    return True


def lock_folder(folder: Path) -> int | None:
    """Lock a folder until the returned descriptor is closed; None if another process removed it just before that.

    Raises BlockingIOError if another process holds it.
    """
    try:
        descriptor = os.open(folder, os.O_RDONLY)
    except FileNotFoundError:
        return None
    if not try_lock(descriptor):
        os.close(descriptor)
        raise BlockingIOError(f"{folder} is locked")
    if not folder.is_dir() or os.fstat(descriptor).st_ino != folder.stat().st_ino:
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
    """Force names and contents of everything below ``folder`` to disk; linked data is there already, which is cheap."""
    for root, _, files in os.walk(folder):
        for name in files:
            fsync(Path(root) / name)
        fsync(Path(root))
