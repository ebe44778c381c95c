"""What the commands share: results to stdout, progress to stderr, one place that turns errors into sentences."""

import contextlib
import io
import json
import math
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ladderize.ranks.launcher import is_main_rank

SCHEMA_VERSION = 1
DEBUG = "LADDERIZE_DEBUG"  # in the environment of started ranks: --debug was given


class UserError(Exception):
    """Something the user can mend: one sentence that says what is wrong, where, and what to do. Exit code 1."""


class UsageError(UserError):
    """The same for what argv alone decides. Exit code 2."""


@dataclass(frozen=True)
class Console:
    """One command's output. ``as_json``: exactly one JSON document on stdout, nothing else."""

    as_json: bool = False

    def result(self, text: str) -> None:
        """A line for a person; silent with --json and on other ranks than 0."""
        if not self.as_json and is_main_rank():
            print(text, flush=True)

    def document(self, value: Mapping[str, Any]) -> None:
        """The JSON document of a command; printed only with --json."""
        if self.as_json and is_main_rank():
            print(to_json(value), flush=True)

    def note(self, text: str) -> None:
        """A remark on stderr that the user should see."""
        if is_main_rank():
            print(text, file=sys.stderr, flush=True)

    def status(self, text: str) -> None:
        """Progress in words on stderr; silent when stderr is no terminal, like the bars."""
        if sys.stderr.isatty():
            self.note(text)

    @contextlib.contextmanager
    def progress(self, description: str, total: int, *, is_bytes: bool = False) -> Iterator["Any"]:
        """A progress bar with an ETA on stderr; yields ``advance(n, detail="")``. Silent when stderr is no terminal."""
        from rich.console import Console as RichConsole
        from rich.progress import (
            BarColumn,
            DownloadColumn,
            MofNCompleteColumn,
            Progress,
            TextColumn,
            TimeRemainingColumn,
        )
        from rich.table import Column

        # on a narrow terminal the bar and the detail give way, not the count and the time
        fixed = Column(min_width=2 * len(str(total)) + 1, no_wrap=True)
        count = DownloadColumn() if is_bytes else MofNCompleteColumn(table_column=fixed)
        remaining = TimeRemainingColumn(table_column=Column(min_width=7, no_wrap=True))
        bar = Progress(
            TextColumn("{task.description}"),
            BarColumn(bar_width=20),
            count,
            remaining,
            TextColumn("{task.fields[detail]}"),
            console=RichConsole(stderr=True),
            disable=not (sys.stderr.isatty() and is_main_rank()),
            transient=True,
        )
        with bar:
            task = bar.add_task(description, total=total, detail="")
            yield lambda steps=1, detail="": bar.update(task, advance=steps, detail=detail)

    @contextlib.contextmanager
    def contained(self) -> Iterator[None]:
        """Around a library that prints: its stdout goes to stderr, and its progress bars nowhere if stderr is no
        terminal."""
        stderr = sys.stderr if sys.stderr.isatty() and is_main_rank() else io.StringIO()
        with contextlib.redirect_stdout(stderr), contextlib.redirect_stderr(stderr):
            yield


@contextlib.contextmanager
def silent_stdout() -> Iterator[None]:
    """Some versions of gloo print to the stdout that ``--json`` promises to one document."""
    sys.stdout.flush()
    kept, nowhere = os.dup(1), os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 1)
    try:
        yield
    finally:
        os.dup2(kept, 1)
        os.close(kept)
        os.close(nowhere)


def with_schema(value: Mapping[str, Any]) -> dict[str, Any]:
    """Put the keys that every result file carries in front."""
    from ladderize import __version__

    return {"schema_version": SCHEMA_VERSION, "ladderize_version": __version__, **value}


def to_json(value: Mapping[str, Any]) -> str:
    """A result document as strict JSON: arrays' scalars become numbers, NaN and infinity null, anything else its
    text."""

    def plain(item: Any) -> Any:
        if isinstance(item, Mapping):
            return {str(key): plain(entry) for key, entry in item.items()}
        if isinstance(item, list | tuple):
            return [plain(entry) for entry in item]
        if callable(getattr(item, "item", None)) and getattr(item, "size", 1) == 1:
            return plain(item.item())
        if isinstance(item, float):
            return item if math.isfinite(item) else None
        return item if item is None or isinstance(item, str | int | bool) else str(item)

    return json.dumps(plain(with_schema(value)), indent=2, allow_nan=False)


def table(rows: Sequence[Mapping[str, Any]], *, right: Sequence[str] = ()) -> str:
    """Rows of equal keys as an aligned text table; columns named in ``right`` are right-aligned."""
    if not rows:
        return ""
    keys = list(rows[0])
    cells = [[str(row[key]) for key in keys] for row in rows]
    widths = [max(len(key), *(len(line[i]) for line in cells)) for i, key in enumerate(keys)]

    def line(values: Sequence[str]) -> str:
        padded = (v.rjust(w) if k in right else v.ljust(w) for k, v, w in zip(keys, values, widths, strict=True))
        return "  ".join(padded).rstrip()

    return "\n".join([line(keys), line(["-" * width for width in widths]), *map(line, cells)])


def human_bytes(count: float) -> str:
    """``1234567`` -> ``1.23 MB`` (decimal units, as disks and links are sold)."""
    for unit in ("B", "kB", "MB", "GB"):
        if count < 1000:
            return f"{count:.0f} B" if unit == "B" else f"{count:.3g} {unit}"
        count /= 1000
    return f"{count:.3g} TB"


def human_seconds(seconds: float) -> str:
    """``95`` -> ``1.6 min``."""
    if seconds < 90:
        return f"{max(1, round(seconds))} s"
    return f"{seconds / 60:.2g} min" if seconds < 5400 else f"{seconds / 3600:.2g} h"


@contextlib.contextmanager
def error_boundary(debug: bool) -> Iterator[None]:
    """Turn known exceptions into one sentence on stderr and an exit code; with ``debug`` the traceback comes too."""
    from ladderize.layout import LayoutError, RangeSyntaxError

    try:
        yield
    except BrokenPipeError:
        # the reader of our stdout went away (`| head`): nothing to say to anybody
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(0)
    except KeyboardInterrupt:
        print("Interrupted.", file=sys.stderr)
        sys.exit(130)
    except (UserError, LayoutError, OSError) as error:
        if debug:
            raise
        print(f"Error: {sentence(error)}", file=sys.stderr)
        sys.exit(2 if isinstance(error, UsageError | RangeSyntaxError) else 1)
    except Exception as error:
        if debug:
            raise
        what = f"{type(error).__name__}: {sentence(error)}"
        print(f"Error: something unforeseen, {what} (run again with --debug for the traceback)", file=sys.stderr)
        sys.exit(1)


def sentence(error: BaseException) -> str:
    """An exception as one line; system errors name the file and what to do about it."""
    if isinstance(error, OSError) and error.strerror:
        where = f"{error.filename}: " if error.filename else ""
        return f"{where}{error.strerror.lower()}"
    return " ".join(str(error).split()) or type(error).__name__
