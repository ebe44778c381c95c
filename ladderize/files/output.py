"""A folder that appears whole or not at all.

It is written beside its place under a temporary name, fsynced, and renamed. A temporary is locked by the process that
writes it, so the next run can tell what a killed one left behind from what is still being written.
"""

import ctypes
import errno
import fcntl
import json
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from io import BufferedIOBase, RawIOBase
from pathlib import Path

from ladderize.errors import UserError
from ladderize.files.parsing import parse_json
from ladderize.files.regular import open_regular, resolved
from ladderize.files.temporaries import fsync, fsync_tree, locked_folder, remove_abandoned, try_lock, why_unwritable

COPIED_AT_ONCE = 64 << 20
AT_FDCWD, RENAME_EXCHANGE, FICLONE = -100, 2, 0x40049409


def not_a_checkpoint(folder: Path) -> str | None:
    """What tells ``folder`` from the checkpoints that --overwrite may replace; None if it is one."""
    if (folder / "config.json").is_file() and any(folder.glob("*.safetensors")):
        return None
    return "is not a checkpoint (no config.json with safetensors)"


def check_target(
    out: Path, source: Path, *, overwrite: bool, foreign: Callable[[Path], str | None] = not_a_checkpoint
) -> Path:
    """Return ``out`` resolved, or raise UserError if it must not be written.

    foreign: says of a folder that is not of the kind to write, and so not to replace, what is wrong with it.
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
    """The nearest ancestor of ``path`` that exists."""
    return next(parent for parent in path.parents if parent.exists())


@contextmanager
def atomic_folder(out: Path, *, overwrite: bool = False) -> Iterator[Path]:
    """Yield a locked temporary folder beside ``out``; on success it takes ``out``'s place, on any error it is removed.

    What fills ``out`` by then is replaced only with ``overwrite``.
    """
    with scratch_folder(out) as temporary:
        yield temporary
        fsync_tree(temporary)
        _take_place(temporary, out, overwrite)
        fsync(out.parent)


@contextmanager
def scratch_folder(out: Path) -> Iterator[Path]:
    """Yield a locked temporary folder beside ``out``, for what is needed only until ``out`` is there; it is always
    removed.

    What a killed run left of it, the next ``atomic_folder`` or ``scratch_folder`` of the same ``out`` removes.
    """
    with _parents(out):
        complete_journal(out)
        with locked_folder(out.parent, _prefix(out)) as temporary:
            yield temporary


@contextmanager
def _parents(out: Path) -> Iterator[None]:
    """Make the folders above ``out``; on an error those that were made for it, and are empty, are removed again."""
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
    """Complete an interrupted swap, and remove temporaries of ``out`` whose writer is gone."""
    complete_journal(out)
    remove_abandoned(out.parent, _prefix(out))


def _take_place(temporary: Path, out: Path, overwrite: bool) -> None:
    """Rename ``temporary`` to ``out``; what was there before has its name then, or is removed."""
    try:
        os.rename(temporary, out)  # replaces nothing but an empty folder
        return
    except OSError as error:
        if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
            raise
    if not overwrite:
        raise UserError(f"OUT {out} was written to by another program meanwhile; nothing was written")
    if not _exchange(temporary, out):
        _swap_with_journal(temporary, out)


def _exchange(a: Path, b: Path) -> bool:
    """Swap two folders in one step (renameat2 with RENAME_EXCHANGE); False where the system cannot."""
    try:
        rename = ctypes.CDLL(None, use_errno=True).renameat2
    except (OSError, AttributeError):
        return False
    if rename(AT_FDCWD, os.fsencode(a), AT_FDCWD, os.fsencode(b), RENAME_EXCHANGE) == 0:
        return True
    if ctypes.get_errno() in (errno.EINVAL, errno.ENOSYS, errno.EOPNOTSUPP):
        return False
    raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()), str(b))


def _swap_with_journal(temporary: Path, out: Path) -> None:
    """Swap in two renames; a journal lets the next run complete the swap if we are killed between them."""
    aside = out.parent / (temporary.name + "-old")
    journal = _journal(out)
    with journal.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        json.dump({"new": temporary.name, "old": aside.name}, file)
        file.flush()
        os.fsync(file.fileno())
        fsync(out.parent)
        os.rename(out, aside)
        try:
            os.rename(temporary, out)
        except BaseException:
            if not out.exists():
                os.rename(aside, out)
                journal.unlink()
            raise
        fsync(out.parent)
        journal.unlink()
    shutil.rmtree(aside, ignore_errors=True)  # OUT is complete; what resists is left to the next clean-up


def _journal(out: Path) -> Path:
    return out.parent / f".{out.name}.ladderize.journal"


def complete_journal(out: Path) -> None:
    """Complete a swap that was interrupted between its two renames, so that ``out`` is there again."""
    journal = _journal(out)
    if not journal.is_file():
        return
    with open_regular(journal) as file:
        if not try_lock(file.fileno()):
            return  # another run is swapping right now
        try:
            names = parse_json(file.read())
            new, old = (out.parent / Path(names[key]).name for key in ("new", "old"))
        except (ValueError, KeyError, TypeError):
            journal.unlink()  # killed before the journal was complete, so before anything was renamed
            return
        for candidate in (new, old):
            if not out.exists() and candidate.name.startswith(_prefix(out)) and candidate.is_dir():
                os.rename(candidate, out)
        fsync(out.parent)
        journal.unlink()


def transfer(source: Path, target: Path, *, copy: bool, advance: Callable[[int], None]) -> str:
    """Bring an unchanged file over; returns how: ``linked``, ``reflinked`` or ``copied``.

    Symbolic links (a hub snapshot is full of them) are resolved first, so that the output depends on no cache.
    """
    source = source.resolve()
    size = source.stat().st_size
    if not copy:
        for how, attempt in (("linked", os.link), ("reflinked", _reflink)):
            try:
                attempt(source, target)
                advance(size)
                return how
            except OSError as error:
                if error.errno == errno.ENOSPC:
                    raise
                target.unlink(missing_ok=True)
    with source.open("rb", buffering=0) as reader, target.open("xb") as writer:
        copy_span(reader, writer, 0, size, advance)  # fsync comes at the end, for all files together
    if target.stat().st_size != size or source.stat().st_size != size:
        raise UserError(f"{source} changed while it was being copied; nothing was written")
    return "copied"


def copy_span(
    reader: RawIOBase | BufferedIOBase, writer: BufferedIOBase, start: int, stop: int, advance: Callable[[int], None]
) -> int:
    """Append a file's bytes from ``start`` to ``stop``, inside the kernel where it can; returns how many: fewer
    where the file ends before. advance: is given what each step copied."""
    writer.flush()
    at = start
    while moved := _copy_some(reader.fileno(), writer, at, min(stop - at, COPIED_AT_ONCE)):
        at += moved
        advance(moved)
    return at - start


def _copy_some(descriptor: int, writer: BufferedIOBase, at: int, count: int) -> int:
    try:
        return os.copy_file_range(descriptor, writer.fileno(), count, at) if count else 0
    except (AttributeError, OSError) as error:
        if isinstance(error, OSError) and error.errno not in (
            errno.EXDEV,
            errno.EINVAL,
            errno.ENOSYS,
            errno.EOPNOTSUPP,
        ):
            raise
        moved = writer.write(os.pread(descriptor, count, at))
        writer.flush()
        return moved


def _reflink(source: Path, target: Path) -> None:
    with source.open("rb") as reader, target.open("xb") as writer:
        fcntl.ioctl(writer.fileno(), FICLONE, reader.fileno())
