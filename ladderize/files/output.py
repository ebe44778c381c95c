"""Folders that appear whole or not at all: written beside their place, fsynced, renamed."""

import errno
import os
import re
import secrets
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from io import BufferedIOBase, RawIOBase
from pathlib import Path

from ladderize.errors import UserError
from ladderize.files.regular import resolved
from ladderize.files.temporaries import fsync, fsync_tree, lock_folder, try_lock, why_unwritable

COPIED_AT_ONCE = 64 << 20


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
    out.parent.mkdir(parents=True, exist_ok=True)
    clean_up(out)
    lock = None
    while lock is None:  # another run may take it for an abandoned one before it is locked
        folder = out.parent / f"{_prefix(out)}{secrets.token_hex(8)}"
        folder.mkdir()
        with suppress(BlockingIOError):
            lock = lock_folder(folder)
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        os.close(lock)


def _prefix(out: Path) -> str:
    return f".{out.name}.ladderize-"


def _aside(out: Path) -> Path:
    """Return the name of the folder that was at ``out``, while another takes its place."""
    return out.parent / f".{out.name}.ladderize-old"


def clean_up(out: Path) -> None:
    """Remove temporaries of ``out`` whose writer is gone, and restore a folder that a killed run had set aside."""
    aside = _aside(out)
    if aside.exists():
        if out.is_dir() and any(out.iterdir()):
            shutil.rmtree(aside, ignore_errors=True)
        else:
            with suppress(FileNotFoundError):  # another run has finished its swap
                os.rename(aside, out)
    pattern = re.compile(re.escape(_prefix(out)) + "[0-9a-f]{16}")
    for name in filter(pattern.fullmatch, os.listdir(out.parent) if out.parent.is_dir() else ()):
        try:
            descriptor = os.open(out.parent / name, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
        except OSError:  # its owner removed it just now, or it may not be opened
            continue
        if try_lock(descriptor):  # its writer holds it while it lives
            shutil.rmtree(out.parent / name, ignore_errors=True)
        os.close(descriptor)


def _take_place(temporary: Path, out: Path, overwrite: bool) -> None:
    """Rename ``temporary`` to ``out``, and remove the folder that was there.

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
    aside = _aside(out)  # if this run is killed between the two renames, the next one puts the old folder back
    os.rename(out, aside)
    try:
        os.rename(temporary, out)
    except BaseException:
        os.rename(aside, out)
        raise
    fsync(out.parent)
    shutil.rmtree(aside, ignore_errors=True)


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
