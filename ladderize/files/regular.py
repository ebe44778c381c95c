"""Files that a user names or a checkpoint brings: opened only where they are regular, and read up to a limit: a FIFO
would make its reader wait for ever, and a device may never end."""

import stat
from collections.abc import Iterator
from io import BufferedReader
from pathlib import Path

from ladderize.console import human_bytes
from ladderize.errors import UserError

MAX_DOCUMENT_BYTES = 128 << 20  # of a document that is read as a whole: a hundred times the largest known index
MAX_LINE_BYTES = 64 << 20  # of one line of JSON: ten million tokens


def resolved(path: str | Path, option: str = "") -> Path:
    """Return the absolute path without links and ``~``; ``option`` precedes it in messages, and with it an empty path
    is refused: a variable may not be set."""
    if option and not str(path).strip():
        raise UserError(f"{option}is empty; name a file or folder")
    try:
        return Path(path).expanduser().resolve()
    except (RuntimeError, ValueError, OSError):
        raise UserError(
            f"{option}{path} cannot be resolved: a loop of links, the home folder of an unknown user, or a path in a"
            " current folder that was deleted; name another"
        ) from None


def names_a_file(text: str) -> bool:
    """Return whether ``text``, which may name something else, is the path of a file."""
    try:
        return resolved(text).is_file()
    except (UserError, OSError):
        return False


def inside(folder: Path, name: str) -> Path | None:
    """Return the path of ``name``, which comes from a stranger's file, in ``folder``; None where it leads out."""
    try:
        path = resolved(folder / name)
    except UserError:
        return None
    return path if path.is_relative_to(resolved(folder)) else None


def check_regular(path: Path) -> None:
    """Raise UserError unless ``path`` is a regular file; raises OSError where it does not exist."""
    if not stat.S_ISREG(path.stat().st_mode):
        raise UserError(f"{path} is not a regular file; name another")


def open_regular(path: Path) -> BufferedReader:
    check_regular(path)
    return path.open("rb")


def read_bytes(path: Path, limit: int = MAX_DOCUMENT_BYTES) -> bytes:
    """Return the whole content of a regular file; raises UserError where it is longer than ``limit`` bytes."""
    with open_regular(path) as file:
        content = file.read(limit + 1)
    if len(content) > limit:
        raise UserError(f"{path} is larger than the {human_bytes(limit)} that are read of such a file")
    return content


def read_text(path: Path, limit: int = MAX_DOCUMENT_BYTES) -> str:
    """Return the content as UTF-8 text with LF behind each line and no BOM, whatever system wrote it."""
    try:
        return read_bytes(path, limit).decode("utf-8-sig").replace("\r\n", "\n").replace("\r", "\n")
    except UnicodeDecodeError as error:
        raise UserError(f"{path} is not UTF-8 text (byte {error.start}); is it another kind of file?") from None


def read_lines(path: Path, limit: int = MAX_LINE_BYTES) -> Iterator[bytes]:
    """Yield the lines of a regular file with their ends; raises UserError for one longer than ``limit`` bytes."""
    with open_regular(path) as file:
        for number, line in enumerate(iter(lambda: file.readline(limit + 1), b""), 1):
            if len(line) > limit:
                raise UserError(
                    f"{path}, line {number} is longer than {human_bytes(limit)}; write one JSON object a line"
                )
            yield line


def split_name(spec: str) -> tuple[Path, str | None]:
    """Return the file and the array in it from ``ids.npz:heldout``; for other files the array is None."""
    name, colon, key = spec.rpartition(":")
    if colon and name.endswith(".npz"):
        return Path(name), key
    return Path(spec), None
