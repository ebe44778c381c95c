"""Files and folders that appear whole or not at all: written beside their place, fsynced, renamed; and their locks."""

import errno
import fcntl
import os
import re
import secrets
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO

from ladderize.console import sentence
from ladderize.errors import UserError
from ladderize.files.regular import resolved


def why_unwritable(folder: Path) -> str | None:
    """Return the system's reason why no file can be created in ``folder``, by creating one; None where one can."""
    try:
        with tempfile.TemporaryFile(dir=folder):
            return None
    except OSError as error:
        return error.strerror


def lock_folder(folder: Path) -> int | None:
    """Lock a folder until the returned descriptor is closed; return None if another process has just removed it. Raises
    BlockingIOError if another process holds it."""
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
    """Yield a new folder in ``parent``, which is locked meanwhile and removed at the end. Those of the same prefix
    whose process was killed are removed first."""
    remove_abandoned(parent, prefix)
    lock = None
    while lock is None:  # another run may take it for an abandoned one before it is locked
        folder = parent / f"{prefix}{secrets.token_hex(8)}"
        folder.mkdir(mode)
        with suppress(BlockingIOError):
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
        with suppress(OSError):  # its process holds the lock while it lives; or there are no locks
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
    """Yield a text file beside ``path``. At the end it takes ``path``'s place; on an error it is removed."""
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(8)}")
    try:
        with temporary.open("x", encoding="utf-8") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException as error:
        with suppress(OSError):
            temporary.unlink(missing_ok=True)
        if isinstance(error, OSError) and error.filename is None:  # a full disk, say: a write does not know its file
            raise OSError(error.errno, error.strerror, str(path)) from None
        raise


def not_a_checkpoint(folder: Path) -> str | None:
    is_checkpoint = (folder / "config.json").is_file() and any(folder.glob("*.safetensors"))
    return None if is_checkpoint else "is not a checkpoint (no config.json with safetensors)"


def check_target(
    out: Path, source: Path, *, overwrite: bool, foreign: Callable[[Path], str | None] = not_a_checkpoint
) -> Path:
    """Return ``out`` resolved, if it may be written; ``foreign`` returns why a folder is not of the kind to write, and
    so not replaced, or None."""
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
    """Yield a locked temporary folder beside ``out``. On success it takes ``out``'s place, which may only be a full
    folder with ``overwrite``; on any error it is removed."""
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
        with locked_folder(out.parent, _temporary(out).name) as folder:
            yield folder
    finally:
        with suppress(OSError):  # they are not empty where the run succeeded
            for parent in new_parents:
                parent.rmdir()


def _temporary(out: Path, name: str = "") -> Path:
    """Return a hidden name beside ``out``; that of the folder there, while another takes its place, ends in ``old``."""
    return out.with_name(f".{out.name}.ladderize-{name}")


def clean_up(out: Path) -> None:
    """Remove temporaries of ``out`` whose writer is gone, and restore a folder that a killed run had set aside."""
    aside = _temporary(out, "old")
    with suppress(
        FileNotFoundError, NotADirectoryError, BlockingIOError
    ):  # another run has finished its swap, or is in the middle of it
        lock = lock_folder(aside)
        if lock is not None:
            if out.is_dir() and any(out.iterdir()):
                shutil.rmtree(aside, ignore_errors=True)
            else:
                os.rename(aside, out)
            os.close(lock)
    remove_abandoned(out.parent, _temporary(out).name)


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
    aside = _temporary(out, "old")  # a run that is killed between the two renames leaves it, and the next puts it back
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
    """Link or copy an unchanged file; return ``linked`` or ``copied``."""
    source = source.resolve()  # a hub snapshot is full of symbolic links, and the output must depend on no cache
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
