"""Output of the commands: results on stdout, progress on stderr, and numbers and strangers' text made for people."""

import contextlib
import errno
import functools
import io
import json
import math
import os
import re
import shutil
import sys
import textwrap
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from ladderize.ranks.environment import is_main_rank

SCHEMA_VERSION = 1
LOG_INTERVAL_S = 60.0  # between two lines of progress where stderr is no terminal
REFRESH_S = 0.1  # between two states of a bar
# Characters that a terminal would obey rather than show, except new lines and tabs, and those that reverse text.
_UNPRINTABLE = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u2028\u2029\u202a-\u202e\u2066-\u2069\ufffe\uffff]")


class Advance(Protocol):
    """A function that reports ``steps`` more of a progress; ``detail`` is shown behind the time left."""

    def __call__(self, steps: int = 1, detail: str = "") -> None: ...


@dataclass(frozen=True)
class Console:
    """The output of one command. On a terminal, rich fits it to the width; piped, all is plain text of any width."""

    as_json: bool = False  # exactly one JSON document on stdout, nothing else
    quiet: bool = False  # nothing at all, for use as a library

    @property
    def speaks(self) -> bool:
        """True if this process prints: rank 0, unless it is quiet."""
        return not self.quiet and is_main_rank()

    def result(self, text: str) -> None:
        """Print a line for people; silent with --json and on other ranks than 0."""
        if not self.as_json and self.speaks:
            print(printable(text), flush=True)

    def prose(self, text: str, *, indent: int = 0) -> None:
        """Print a result in sentences, which wrap on a terminal; all lines but the first are indented."""
        if sys.stdout.isatty():
            width, spaces = shutil.get_terminal_size().columns, " " * indent
            text = textwrap.fill(text, width, subsequent_indent=spaces, break_long_words=False, break_on_hyphens=False)
        self.result(text)

    def table(self, rows: Sequence[Mapping[str, Any]], *, right: Sequence[str] = ()) -> None:
        """Print rows with equal keys as a result; columns named in ``right`` are right-aligned."""
        if self.as_json or not self.speaks or not rows:
            return
        if not sys.stdout.isatty():
            print(table(rows, right=right), flush=True)
            return
        from rich.table import Table
        from rich.text import Text

        shown = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
        for key in rows[0]:
            shown.add_column(Text(key), justify="right" if key in right else "left", overflow="fold")
        for row in rows:
            shown.add_row(*(Text(printable(str(value))) for value in row.values()))
        _terminal(sys.stdout).print(shown)

    def document(self, value: Mapping[str, Any]) -> None:
        """Print the JSON document of a command; silent without --json."""
        if self.as_json and self.speaks:
            print(to_json(value), flush=True)

    def note(self, text: str) -> None:
        """Print a remark for the user on stderr."""
        if self.speaks:
            say(text)

    def warn(self, text: str) -> None:
        """Print a warning that the user should read before trusting the result."""
        if self.speaks:
            say(f"Warning: {text}", style="yellow")

    @contextlib.contextmanager
    def stage(self, text: str) -> Iterator[None]:
        """Show work of unknown length: by a spinner on a terminal, elsewhere by a line at once and each minute."""
        if not self.speaks:
            yield
        elif not sys.stderr.isatty():
            say(text)
            begin = time.monotonic()
            with _each_minute(lambda: f"{text}: for {time.monotonic() - begin:.0f} s"):
                yield
        else:
            from rich.markup import escape

            # A descriptor of its own, since the block may replace or redirect stderr.
            with os.fdopen(os.dup(sys.stderr.fileno()), "w") as file, _terminal(file).status(escape(printable(text))):
                yield

    @contextlib.contextmanager
    def progress(self, description: str, total: int, *, done: int = 0, is_bytes: bool = False) -> Iterator[Advance]:
        """Show progress by a bar on a terminal, elsewhere by a line each minute. What an earlier run has ``done`` does
        not count for the speed."""
        progress = _Progress(total, done, human_bytes if is_bytes else str)
        if not self.speaks:
            yield progress.add
        elif not sys.stderr.isatty():
            with _each_minute(lambda: f"{description}: {progress}"):
                yield progress.add
        else:
            from rich.progress import BarColumn, Progress, TextColumn

            name, state = (TextColumn(f"{{task.{key}}}", markup=False) for key in ("description", "fields[state]"))
            terminal = _terminal(sys.stderr)
            # drawn when something is done: a thread would wake up beside measurements
            with Progress(name, BarColumn(), state, console=terminal, auto_refresh=False, transient=True) as bar:
                task, drawn = bar.add_task(printable(description), total=total, completed=done, state=""), 0.0

                def advance(steps: int = 1, detail: str = "") -> None:
                    nonlocal drawn
                    progress.add(steps, detail)
                    if time.monotonic() > drawn + REFRESH_S:
                        drawn = time.monotonic()
                        bar.update(task, completed=progress.done, state=printable(str(progress)), refresh=True)

                yield advance

    @contextlib.contextmanager
    def contained(self, *, bars: bool = False) -> Iterator[None]:
        """Hide what a library prints; with ``bars`` show its progress on stderr, or a line of it every minute."""
        hidden, shows = io.StringIO(), bars and self.speaks
        stream = sys.stderr if shows and sys.stderr.isatty() else hidden
        with contextlib.ExitStack() as stack:
            if shows and stream is hidden:
                stack.enter_context(_each_minute(lambda: hidden.getvalue().strip().rpartition("\r")[2]))
            stack.enter_context(contextlib.redirect_stdout(stream))
            stack.enter_context(contextlib.redirect_stderr(stream))
            yield


SILENT = Console(quiet=True)  # of calls from Python


class _Progress:
    """How much is done of ``total``, and for how long; as text with the time left by the average speed."""

    def __init__(self, total: int, done: int, shown: Callable[[float], str]) -> None:
        self.total, self.done, self.first, self.shown = total, done, done, shown
        self.begin, self.detail = time.monotonic(), ""

    def add(self, steps: int = 1, detail: str = "") -> None:
        self.done += steps
        self.detail = detail or self.detail

    def __str__(self) -> str:
        elapsed, steps = time.monotonic() - self.begin, self.done - self.first
        more = self.total - self.done
        left = f", {human_seconds(elapsed * more / steps)} left" if steps and more > 0 else ""
        counts = f"{self.done / max(1, self.total):4.0%} ({self.shown(self.done)} of {self.shown(self.total)})"
        return f"{counts}, {human_seconds(elapsed)}{left}{self.detail and f', {self.detail}'}"


@contextlib.contextmanager
def _each_minute(line: Callable[[], str]) -> Iterator[None]:
    """Print ``line()`` on the present stderr each minute, from a thread, while the block runs."""
    ended, stream = threading.Event(), sys.stderr

    def repeat() -> None:
        while not ended.wait(LOG_INTERVAL_S):
            print(printable(line()), file=stream, flush=True)

    thread = threading.Thread(target=repeat, daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()


def _terminal(stream: Any) -> Any:
    """Return rich's console of a stream: one for all that is drawn there at a time."""
    return _console_of(getattr(stream, "rich_proxied_file", stream))  # a bar replaces stderr by a proxy


@functools.cache
def _console_of(stream: Any) -> Any:
    from rich.console import Console as RichConsole

    return RichConsole(file=stream, highlight=False, emoji=False)


def say(text: str, *, style: str = "") -> None:
    """Print a line on stderr: wrapped at words and coloured on a terminal, unchanged elsewhere."""
    if sys.stderr.isatty():
        _terminal(sys.stderr).print(printable(text), style=style, markup=False)
    else:
        print(printable(text), file=sys.stderr, flush=True)


def to_json(value: Mapping[str, Any]) -> str:
    """Return a result document as strict JSON, with the keys of every result file in front."""
    from ladderize import __version__

    document = {"schema_version": SCHEMA_VERSION, "ladderize_version": __version__, **value}
    return json.dumps(strict_json(document), indent=2, allow_nan=False)


def strict_json(value: Any) -> Any:
    """Return a value as strict JSON holds it: NaN and infinity become null, other objects numbers, lists or text."""
    if isinstance(value, Mapping):
        return {str(key): strict_json(item) for key, item in value.items()}
    if isinstance(value, list | tuple | set):
        return [strict_json(item) for item in value]
    if callable(getattr(value, "item", None)) and getattr(value, "size", 1) == 1:
        return strict_json(value.item())
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    return value if value is None or isinstance(value, str | int | bool) else str(value)


def table(rows: Sequence[Mapping[str, Any]], *, right: Sequence[str] = ()) -> str:
    """Return rows with equal keys as an aligned text table; columns named in ``right`` are right-aligned."""
    columns = []
    for key in rows[0]:
        cells = [key, *(printable(str(row[key])) for row in rows)]
        width = max(map(len, cells))
        aligned = [cell.rjust(width) if key in right else cell.ljust(width) for cell in cells]
        columns.append([aligned[0], "-" * width, *aligned[1:]])
    return "\n".join("  ".join(line).rstrip() for line in zip(*columns, strict=True))


def human_bytes(count: float) -> str:
    """Return bytes in words: ``1234567`` -> ``1.23 MB`` (decimal units, as disks and links are sold)."""
    return _scaled(count, (" B", " kB", " MB", " GB", " TB"))


def human_count(count: float) -> str:
    """Return a count in words: ``11804672`` -> ``11.8M``."""
    return _scaled(count, ("", "k", "M", "B", "T"))


def _scaled(count: float, units: Sequence[str]) -> str:
    power = 0
    while count >= 999.5 and power < len(units) - 1:  # more would round to 1000
        count, power = count / 1000, power + 1
    return f"{count:.3g}{units[power]}"


def human_seconds(seconds: float) -> str:
    """Return a duration in words: ``95`` -> ``1.6 min``."""
    if seconds < 90:
        return f"{max(1, round(seconds))} s"
    if seconds < 5400:
        return f"{seconds / 60:.2g} min"
    hours = seconds / 3600
    return f"{hours:.2g} h" if hours < 72 else f"{float(f'{hours / 24:.2g}'):,.0f} days"


def printable(text: str) -> str:
    """Return strangers' text for a terminal, where an escape sequence would overwrite other text: what cannot be seen,
    but new lines and tabs, is written as in Python."""
    return _UNPRINTABLE.sub(lambda match: repr(match[0])[1:-1], text)


def code_span(text: str) -> str:
    """Return strangers' text as code in Markdown, which no backtick in it can end."""
    text = printable(text).replace("\n", "\\n")
    fence = "`" * (1 + max(map(len, re.findall("`+", text)), default=0))
    space = " " if len(fence) > 1 else ""
    return f"{fence}{space}{text}{space}{fence}"


def is_text(value: str) -> bool:
    """Return whether UTF-8 can hold this text: it has no half of a surrogate pair."""
    return value.encode(errors="ignore").decode() == value


def sentence(error: BaseException) -> str:
    """Return an exception as one line; a system error's names the file."""
    if isinstance(error, OSError) and error.strerror:
        # a copy that fills the disk names the file that it reads first
        path = (error.errno == errno.ENOSPC and error.filename2) or error.filename
        return f"{f'{path}: ' if path else ''}{error.strerror.lower()}"
    return " ".join(str(error).split()) or type(error).__name__
