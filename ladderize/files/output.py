"""Folders that appear whole or not at all: written beside their place, fsynced, renamed."""

import errno
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from ladderize.console import sentence
from ladderize.errors import UserError
from ladderize.files.regular import resolved
from ladderize.files.temporaries import fsync, fsync_tree, lock_folder, locked_folder, remove_abandoned, why_unwritable


def not_a_checkpoint(folder: Path) -> str | None:
    is_checkpoint = (folder / "config.json").is_file() and any(folder.glob("*.safetensors"))
    return None if is_checkpoint else "is not a checkpoint (no config.json with safetensors)"


def check_target(
    out: Path, source: Path, *, overwrite: bool, foreign: Callable[[Path], str | None] = not_a_checkpoint
) -> Path:
    """Return ``out`` resolved; raises UserError if it must not be written.

    foreign: returns why a folder is not of the kind to write, and so not replaced; None if it is.
    """
    out, source = resolved(out, "OUT "), resolved(source)
    if out == source or source in out.parents or out in source.parents:
        raise UserError(
            f"OUT {out} is the source {source}, or one lies inside the other; the source is never touched, choose"
            " another folder"
        )
    if out.exists() and not out.is_dir():
        raise UserError(f"OUT {out} is a file; choose another name")
    if os.path.ismount(out):
        raise UserError(f"OUT {out} is a mount point, which cannot be replaced as a whole; choose a folder inside it")
    if out.is_dir() and any(out.iterdir()):
        if not overwrite:
            raise UserError(f"OUT {out} is not empty; choose another folder or pass --overwrite")
        problem = foreign(out)
        if problem is not None:
            raise UserError(f"OUT {out} {problem}, so --overwrite does not replace it")
    parent = next(parent for parent in out.parents if parent.exists())
    reason = why_unwritable(parent)
    if reason is not None:
        raise UserError(f"OUT {out} cannot be written: {parent} takes no files ({reason})")
    return out


@contextmanager
def atomic_folder(out: Path, *, overwrite: bool = False) -> Iterator[Path]:
    """Yield a locked temporary folder beside ``out``. On success it takes ``out``'s place; on any error it is removed.

    A folder ``out`` that is not empty is replaced only with ``overwrite``; raises UserError otherwise, and where the
    system cannot write.
    """
    try:
        with scratch_folder(out) as temporary:
            yield temporary
            fsync_tree(temporary)
            _take_place(temporary, out, overwrite)
            fsync(out.parent)
    except OSError as error:
        raise UserError(f"writing OUT {out} failed ({sentence(error)}); nothing was left there") from error


@contextmanager
def scratch_folder(out: Path) -> Iterator[Path]:
    """Yield a locked temporary folder beside ``out``, which is removed at the end. ``clean_up`` is called first."""
    new_parents = [folder for folder in out.parents if not folder.exists()]
    out.parent.mkdir(parents=True, exist_ok=True)
    clean_up(out)
    try:
        with locked_folder(out.parent, f"{_hidden(out)}-") as folder:
            yield folder
    finally:
        with suppress(OSError):  # they are not empty where the run succeeded
            for parent in new_parents:
                parent.rmdir()


def _hidden(out: Path) -> str:
    return f".{out.name}.ladderize"


def _aside(out: Path) -> Path:
    """Return the name of the folder that was at ``out``, while another takes its place."""
    return out.with_name(f"{_hidden(out)}-old")


def clean_up(out: Path) -> None:
    """Remove temporaries of ``out`` whose writer is gone, and restore a folder that a killed run had set aside."""
    aside = _aside(out)
    with suppress(FileNotFoundError, BlockingIOError):  # another run has finished its swap, or is in the middle of it
        lock = lock_folder(aside)
        if lock is not None:
            if out.is_dir() and any(out.iterdir()):
                shutil.rmtree(aside, ignore_errors=True)
            else:
                os.rename(aside, out)
            os.close(lock)
    remove_abandoned(out.parent, f"{_hidden(out)}-")


def _take_place(temporary: Path, out: Path, overwrite: bool) -> None:
    """Rename ``temporary`` to ``out``, and remove the folder that was there."""
    try:
        os.rename(temporary, out)  # replaces nothing but an empty folder
        return
    except OSError as error:
        if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
            raise
    if not overwrite:
        raise UserError(f"OUT {out} was written to by another program meanwhile; nothing was written")
    lock = None
    with suppress(BlockingIOError):
        lock = lock_folder(out)
    if lock is None:
        raise UserError(f"OUT {out} is being replaced by another run; nothing was written")
    aside = _aside(out)  # if this run is killed between the two renames, the next one puts the old folder back
    try:
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
        except OSError:  # another file system, or one without links
            pass
    shutil.copyfile(source, target)  # fsync comes at the end, for all files together
    advance(size)
    if target.stat().st_size != size or source.stat().st_size != size:
        raise UserError(f"{source} changed while it was being copied; nothing was written")
    return "copied"
