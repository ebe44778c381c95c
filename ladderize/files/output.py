"""Folders that appear whole or not at all: written beside their place, fsynced, renamed."""

import ctypes
import errno
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from io import BufferedIOBase, RawIOBase
from pathlib import Path

from ladderize.errors import UserError
from ladderize.files.regular import resolved
from ladderize.files.temporaries import fsync, fsync_tree, locked_folder, remove_abandoned, try_lock, why_unwritable

COPIED_AT_ONCE = 64 << 20
AT_FDCWD, RENAME_EXCHANGE = -100, 2


def not_a_checkpoint(folder: Path) -> str | None:
    """Return why --overwrite may not replace ``folder``; None if it is a checkpoint."""
    if (folder / "config.json").is_file() and any(folder.glob("*.safetensors")):
        return None
    return "is not a checkpoint (no config.json with safetensors)"


def check_target(
    out: Path, source: Path, *, overwrite: bool, foreign: Callable[[Path], str | None] = not_a_checkpoint
) -> Path:
    """Return ``out`` resolved; raises UserError if it must not be written.

    foreign: returns why a folder is not of the kind to write, and so not replaced; None if it is.
    """
    out, source = resolved(out, "OUT "), resolved(source)
    if out == source or source in out.parents:
        raise UserError(
            f"OUT {out} is the source or lies inside it; the source is never touched, choose another folder"
        )
    if out in source.parents:
        raise UserError(f"OUT {out} contains the source {source}; choose another folder")
    if out.exists() and not out.is_dir():
        raise UserError(f"OUT {out} is a file; choose another name")
    if os.path.ismount(out):
        raise UserError(f"OUT {out} is a mount point, which cannot be replaced as a whole; choose a folder inside it")
    if out.is_dir() and any(out.iterdir()):
        if not overwrite:
            raise UserError(f"OUT {out} is not empty; choose another folder or pass --overwrite")
        if (what := foreign(out)) is not None:
            raise UserError(f"OUT {out} {what}, so --overwrite does not replace it")
    parent = existing_parent(out)
    if (why := why_unwritable(parent)) is not None:
        raise UserError(f"OUT {out} cannot be written: {parent} takes no files ({why})")
    return out


def existing_parent(path: Path) -> Path:
    """Return the nearest ancestor of ``path`` that exists."""
    return next(parent for parent in path.parents if parent.exists())


@contextmanager
def atomic_folder(out: Path, *, overwrite: bool = False) -> Iterator[Path]:
    """Yield a locked temporary folder beside ``out``. On success it takes ``out``'s place; on any error it is removed.

    A folder ``out`` that is not empty is replaced only with ``overwrite``; raises UserError otherwise.
    """
    with scratch_folder(out) as temporary:
        yield temporary
        fsync_tree(temporary)
        _take_place(temporary, out, overwrite)
        fsync(out.parent)


@contextmanager
def scratch_folder(out: Path) -> Iterator[Path]:
    """Yield a locked temporary folder beside ``out``, which is removed at the end. ``clean_up`` is called first."""
    with _parents(out):
        clean_up(out)
        with locked_folder(out.parent, _prefix(out)) as temporary:
            yield temporary


@contextmanager
def _parents(out: Path) -> Iterator[None]:
    """Create the folders above ``out``; on an error the created ones that are empty are removed again."""
    created = [parent for parent in (out.parent, *out.parent.parents) if not parent.exists()]
    out.parent.mkdir(parents=True, exist_ok=True)
    try:
        yield
    except BaseException:
        for parent in created:
            if parent.is_dir() and not any(parent.iterdir()):
                parent.rmdir()
        raise


def _prefix(out: Path) -> str:
    return f".{out.name}.ladderize-"


def clean_up(out: Path) -> None:
    """Remove temporaries of ``out`` whose writer is gone, and restore a folder that a killed swap had set aside."""
    aside = _aside(out)
    with suppress(FileNotFoundError, NotADirectoryError):  # nothing is there, or another run has finished its swap
        descriptor = os.open(aside, os.O_RDONLY)
        try:
            if try_lock(descriptor):  # else another run is swapping right now
                if out.is_dir() and any(out.iterdir()):
                    shutil.rmtree(aside, ignore_errors=True)
                else:
                    os.rename(aside, out)
        finally:
            os.close(descriptor)
    if out.parent.is_dir():
        remove_abandoned(out.parent, _prefix(out))


def _take_place(temporary: Path, out: Path, overwrite: bool) -> None:
    """Rename ``temporary`` to ``out``; the folder that was there then has the temporary's name, or is removed.

    Raises UserError where ``out`` is not empty and ``overwrite`` is False.
    """
    try:
        os.rename(temporary, out)  # replaces nothing but an empty folder
        return
    except OSError as error:
        if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
            raise
    if not overwrite:
        raise UserError(f"OUT {out} was written to by another program meanwhile; nothing was written")
    if _exchange(temporary, out):
        return
    aside = _aside(out)  # two renames: if this run is killed between them, the next one puts the old folder back
    if aside.exists():  # where files cannot be locked, nobody knows whose it is
        raise UserError(f"{aside} is left of an earlier run; look whether it is needed, and delete it")
    lock = os.open(out, os.O_RDONLY)
    try:
        try_lock(lock)
        os.rename(out, aside)
        try:
            os.rename(temporary, out)
        except BaseException:
            os.rename(aside, out)
            raise
        fsync(out.parent)
        shutil.rmtree(aside, ignore_errors=True)
    finally:
        os.close(lock)


def _aside(out: Path) -> Path:
    return out.parent / f".{out.name}.ladderize-old"


def _exchange(a: Path, b: Path) -> bool:
    """Swap two folders in one step (renameat2 with RENAME_EXCHANGE); return False where the system cannot."""
    try:
        rename = ctypes.CDLL(None, use_errno=True).renameat2
    except (OSError, AttributeError):
        return False
    if rename(AT_FDCWD, os.fsencode(a), AT_FDCWD, os.fsencode(b), RENAME_EXCHANGE) == 0:
        return True
    if ctypes.get_errno() in (errno.EINVAL, errno.ENOSYS, errno.EOPNOTSUPP):
        return False
    raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()), str(b))


def transfer(source: Path, target: Path, *, copy: bool, advance: Callable[[int], None]) -> str:
    """Link or copy an unchanged file; return ``linked`` or ``copied``.

    Symbolic links (a hub snapshot is full of them) are resolved first, so that the output depends on no cache.
    Raises UserError where the source changes meanwhile.
    """
    source = source.resolve()
    size = source.stat().st_size
    if not copy:
        try:
            os.link(source, target)
            advance(size)
            return "linked"
        except OSError as error:
            if error.errno == errno.ENOSPC:
                raise
    with source.open("rb", buffering=0) as reader, target.open("xb") as writer:
        copy_span(reader, writer, 0, size, advance)  # fsync comes at the end, for all files together
    if target.stat().st_size != size or source.stat().st_size != size:
        raise UserError(f"{source} changed while it was being copied; nothing was written")
    return "copied"


def copy_span(
    reader: RawIOBase | BufferedIOBase, writer: BufferedIOBase, start: int, stop: int, advance: Callable[[int], None]
) -> int:
    """Append a file's bytes from ``start`` to ``stop``; return their number, which is smaller where the file ends
    before.

    The kernel copies, and shares blocks where the file system can.

    advance: is called with the number of bytes of each step.
    """
    writer.flush()
    at = start
    while at < stop:
        count = min(stop - at, COPIED_AT_ONCE)
        try:
            moved = os.copy_file_range(reader.fileno(), writer.fileno(), count, at)
        except (AttributeError, OSError):  # between two file systems that cannot; an error of the disk comes again
            moved = writer.write(os.pread(reader.fileno(), count, at))
            writer.flush()
        if not moved:
            break
        at += moved
        advance(moved)
    return at - start
