"""Output of the commands: results on stdout, progress on stderr, and numbers and strangers' text formatted for
people."""

import contextlib
import io
import itertools
import json
import math
import os
import re
import sys
import textwrap
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol, TextIO

from ladderize.errors import UsageError
from ladderize.ranks.environment import is_main_rank

if TYPE_CHECKING:
    from rich.progress import Progress

SCHEMA_VERSION = 1


class Advance(Protocol):
    """A function that reports ``steps`` more of a progress; ``detail`` is shown behind the time left."""

    def __call__(self, steps: int = 1, detail: str = "") -> None: ...


LOG_INTERVAL_S = 60.0  # between two lines of progress where stderr is no terminal
FIRST_LOG_S = 15.0
# Characters that a terminal would obey rather than show, except new lines and tabs, and those that reverse text.
_UNPRINTABLE = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u2028\u2029\u202a-\u202e\u2066-\u2069\ufffe\uffff]")


@dataclass(frozen=True)
class Console:
    """The output of one command.

    On a terminal tables fit its width, words wrap, and colours show; NO_COLOR disables colours. Piped, all is plain
    text of any width.

    as_json: print exactly one JSON document on stdout, nothing else.
    quiet: print nothing on stdout or stderr, for use as a library.
    """

    as_json: bool = False
    quiet: bool = False

    @property
    def speaks(self) -> bool:
        """True if this process prints: rank 0, unless it is quiet."""
        return not self.quiet and is_main_rank()

    def result(self, text: str) -> None:
        """Print a line for people; silent with --json and on other ranks than 0."""
        if not self.as_json and self.speaks:
            print(printable(text), flush=True)

    def prose(self, text: str, *, indent: int = 0) -> None:
        """Print a result in sentences, which wrap on a terminal.

        indent: spaces before all lines but the first.
        """
        width = terminal_width(sys.stdout)
        if width is not None:
            indented = " " * indent
            text = textwrap.fill(
                text, width, subsequent_indent=indented, break_long_words=False, break_on_hyphens=False
            )
        self.result(text)

    def table(self, rows: Sequence[Mapping[str, Any]], *, right: Sequence[str] = ()) -> None:
        """Print rows with equal keys as a result; columns named in ``right`` are right-aligned."""
        if not self.as_json and self.speaks:
            print(table(rows, right=right, width=terminal_width(sys.stdout)), flush=True)

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
        """Show work of unknown length: by a spinner on a terminal, elsewhere by a line at the beginning and every
        minute."""
        if not self.speaks:
            yield
        elif not sys.stderr.isatty():
            say(text)
            begun = time.monotonic()
            with _said_every_minute(
                lambda: f"{text}: {human_seconds(time.monotonic() - begun)} so far", LOG_INTERVAL_S
            ):
                yield
        else:
            from rich.console import Console as RichConsole
            from rich.markup import escape

            text = escape(printable(text))
            # A descriptor of its own, since the block may replace or redirect stderr.
            with os.fdopen(os.dup(sys.stderr.fileno()), "w") as file, RichConsole(file=file).status(text):
                yield

    @contextlib.contextmanager
    def progress(
        self, description: str, total: int, *, done: int = 0, is_bytes: bool = False, animated: bool = True
    ) -> Iterator[Advance]:
        """Show progress on stderr; yields ``advance(n, detail="")``.

        A terminal shows a bar with the time left. Elsewhere a line is written every minute, so that a batch job's log
        shows how far it is.

        done: the part of ``total`` that an earlier run did; it does not count for the speed.
        animated: False where nothing may run beside a measurement: only ``advance`` then draws the bar.
        """
        if not self.speaks:
            yield lambda steps=1, detail="": None
        elif not sys.stderr.isatty():
            logged = _LoggedProgress(description, total, done, is_bytes)
            with _said_every_minute(logged.line, FIRST_LOG_S):
                yield logged.advance
        else:
            with _bar(description, total, is_bytes, animated) as bar:
                task = bar.add_task(printable(description), total=total, completed=done, detail="")

                def advance(steps: int = 1, detail: str = "") -> None:
                    bar.update(task, advance=steps, detail=printable(detail), refresh=not animated)

                yield advance

    @contextlib.contextmanager
    def contained(self, *, bars: bool = False) -> Iterator[None]:
        """Hide what a library prints.

        bars: show its progress on stderr; where that is no terminal, a line every minute.
        """
        if not (bars and self.speaks):
            stream: Any = io.StringIO()
        else:
            stream = sys.stderr if sys.stderr.isatty() else _LoggedBar(sys.stderr)
        with contextlib.redirect_stdout(stream), contextlib.redirect_stderr(stream):
            yield


SILENT = Console(quiet=True)  # of calls from Python


def _bar(description: str, total: int, is_bytes: bool, animated: bool) -> "Progress":
    from rich.console import Console as RichConsole
    from rich.progress import (
        BarColumn,
        DownloadColumn,
        MofNCompleteColumn,
        Progress,
        SpinnerColumn,
        TextColumn,
        TimeRemainingColumn,
    )
    from rich.table import Column

    # on a narrow terminal the detail gives way, not the name, the count and the time
    fixed = Column(min_width=2 * len(str(total)) + 1, no_wrap=True)
    return Progress(
        *([SpinnerColumn()] if animated else []),  # it moves while a single long step does not
        TextColumn("{task.description}", markup=False, table_column=Column(min_width=len(description), no_wrap=True)),
        BarColumn(bar_width=20, table_column=Column(min_width=10)),
        DownloadColumn() if is_bytes else MofNCompleteColumn(table_column=fixed),
        TimeRemainingColumn(table_column=Column(min_width=7, no_wrap=True)),
        TextColumn("{task.fields[detail]}", markup=False, table_column=Column(no_wrap=True, overflow="ellipsis")),
        console=RichConsole(file=sys.stderr),
        transient=True,
        auto_refresh=animated,  # by a thread
    )


class _LoggedProgress:
    """Progress as lines of text."""

    def __init__(self, description: str, total: int, done: int, is_bytes: bool) -> None:
        self.description, self.total, self.is_bytes = description, total, is_bytes
        self.before = self.done = done
        self.begun, self.detail = time.monotonic(), ""

    def advance(self, steps: int = 1, detail: str = "") -> None:
        self.done, self.detail = self.done + steps, detail

    def line(self) -> str:
        count = human_bytes if self.is_bytes else str
        parts = [f"{self.description}: {count(self.done)} of {count(self.total)}"]
        if self.before < self.done < self.total:
            a_step = (time.monotonic() - self.begun) / (self.done - self.before)
            parts.append(f"{human_seconds(a_step * (self.total - self.done))} left")
        return ", ".join([*parts, *([self.detail] if self.detail else [])])


@contextlib.contextmanager
def _said_every_minute(line: Callable[[], str], first_s: float) -> Iterator[None]:
    """Print ``line()`` every minute while the block runs. A thread does it, since one step may take longer.

    first_s: seconds until the first line, so that short work prints nothing.
    """
    ended, stderr = threading.Event(), sys.stderr  # the present stderr: a library's output may be redirected later

    def speak() -> None:
        pause = first_s
        while not ended.wait(pause):
            print(printable(line()), file=stderr, flush=True)
            pause = LOG_INTERVAL_S

    thread = threading.Thread(target=speak, daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()


class _LoggedBar(io.TextIOBase):
    """A stream for tqdm that prints the latest state of its bar about once a minute."""

    def __init__(self, stream: TextIO) -> None:
        self.stream = stream
        self.next_line = time.monotonic() + FIRST_LOG_S

    def write(self, text: str) -> int:
        state = text.strip("\r\n ")
        if "%|" in state and (now := time.monotonic()) >= self.next_line:
            self.next_line = now + LOG_INTERVAL_S
            print(printable(state.rsplit("\r")[-1]), file=self.stream, flush=True)
        return len(text)


def terminal_width(stream: TextIO) -> int | None:
    """Return the columns of the terminal behind a stream; None where there is none."""
    if not stream.isatty():
        return None
    from rich.console import Console as RichConsole

    return RichConsole(file=stream).width


def say(text: str, *, style: str = "") -> None:
    """Print a line on stderr: wrapped at words and coloured on a terminal, unchanged elsewhere."""
    text = printable(text)
    if not sys.stderr.isatty():
        print(text, file=sys.stderr, flush=True)
        return
    from rich.console import Console as RichConsole

    RichConsole(file=sys.stderr, highlight=False, markup=False, emoji=False).print(text, style=style)


@contextlib.contextmanager
def silenced(stream: int) -> Iterator[None]:
    """Drop what C++ code writes to stdout (1) or stderr (2).

    gloo's lines would break the one document of ``--json``; torch prints stack frames before an error that we catch.
    """
    sys.stdout.flush()
    sys.stderr.flush()
    kept, nowhere = os.dup(stream), os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, stream)
    try:
        yield
    finally:
        os.dup2(kept, stream)
        os.close(kept)
        os.close(nowhere)


def with_schema(value: Mapping[str, Any]) -> dict[str, Any]:
    """Return the document with the keys of every result file in front."""
    from ladderize import __version__

    return {"schema_version": SCHEMA_VERSION, "ladderize_version": __version__, **value}


def to_json(value: Mapping[str, Any]) -> str:
    """Return a result document as strict JSON."""
    return json.dumps(strict_json(with_schema(value)), indent=2, allow_nan=False)


def strict_json(value: Any) -> Any:
    """Return a value as strict JSON holds it.

    Scalars of arrays become numbers, NaN and infinity null, sets lists, and other objects their text.
    """
    if isinstance(value, Mapping):
        return {str(key): strict_json(item) for key, item in value.items()}
    if isinstance(value, list | tuple | set):
        return [strict_json(item) for item in value]
    if callable(getattr(value, "item", None)) and getattr(value, "size", 1) == 1:
        return strict_json(value.item())
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    return value if value is None or isinstance(value, str | int | bool) else str(value)


def table(rows: Sequence[Mapping[str, Any]], *, right: Sequence[str] = (), width: int | None = None) -> str:
    """Return rows with equal keys as an aligned text table.

    right: columns to align right.
    width: the width to fit into: cells wrap at words, and where that is not enough, rows are stacked. None: any width.
    """
    if not rows:
        return ""
    keys = list(rows[0])
    cells = [keys, *([printable(str(row[key])) for key in keys] for row in rows)]
    columns = list(zip(*cells, strict=True))
    widths = [max(map(len, column)) for column in columns]
    longest_words = [max(len(word) for cell in column for word in cell.split() or [""]) for column in columns]
    while width is not None and sum(widths) + 2 * (len(keys) - 1) > width:
        spare = [have - least for have, least in zip(widths, longest_words, strict=True)]
        if not any(spare):
            return "\n\n".join(_stacked(dict(zip(keys, row, strict=True))) for row in cells[1:])
        widths[spare.index(max(spare))] -= 1

    def lines(values: Sequence[str]) -> Iterator[str]:
        wrapped = [
            textwrap.wrap(value, wide, break_on_hyphens=False) if len(value) > wide else [value]
            for value, wide in zip(values, widths, strict=True)
        ]
        for parts in itertools.zip_longest(*wrapped, fillvalue=""):
            padded = (p.rjust(w) if k in right else p.ljust(w) for k, p, w in zip(keys, parts, widths, strict=True))
            yield "  ".join(padded).rstrip()

    head, *body = cells
    return "\n".join([*lines(head), *lines(["-" * wide for wide in widths]), *itertools.chain(*map(lines, body))])


def _stacked(row: Mapping[str, str]) -> str:
    wide = max(map(len, row))
    return "\n".join(f"{key.strip():{wide}}  {value}" for key, value in row.items() if value)


def human_bytes(count: float) -> str:
    """Return bytes in words: ``1234567`` -> ``1.23 MB`` (decimal units, as disks and links are sold)."""
    for unit in ("B", "kB", "MB", "GB"):
        if count < 999.5:  # more would round to 1000
            return f"{count:.0f} B" if unit == "B" else f"{count:.3g} {unit}"
        count /= 1000
    return f"{count:.3g} TB"


def human_count(count: float) -> str:
    """Return a count in words: ``11804672`` -> ``11.8M``."""
    for unit in ("", "k", "M", "B"):
        if count < 999.5:
            return f"{count:.3g}{unit}"
        count /= 1000
    return f"{count:.3g}T"


def human_seconds(seconds: float) -> str:
    """Return a duration in words: ``95`` -> ``1.6 min``."""
    if seconds < 90:
        return f"{max(1, round(seconds))} s"
    if seconds < 5400:
        return f"{seconds / 60:.2g} min"
    hours = seconds / 3600
    return f"{hours:.2g} h" if hours < 72 else f"{float(f'{hours / 24:.2g}'):,.0f} days"


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether Python, or torch's allocator of a GPU or the CPU (a plain RuntimeError), ran out of memory."""
    known = isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError"
    return known or (isinstance(error, RuntimeError) and "can't allocate memory" in str(error))


def check_arguments(arguments: Sequence[str]) -> None:
    """Raise UsageError for an argument that is not UTF-8.

    Python keeps such bytes as halves of surrogate pairs, which no tokenizer and no document can hold.
    """
    for argument in arguments:
        if not is_text(argument):
            raise UsageError(
                f"the argument {argument[:80]!a} is not UTF-8 text, or the locale is none of UTF-8; set LC_ALL=C.UTF-8"
            )


def printable(text: str) -> str:
    """Return strangers' text for a terminal, where an escape sequence would colour, move or overwrite other text.

    New lines and tabs stay; other characters that cannot be seen are written as in Python.
    """
    return _UNPRINTABLE.sub(lambda found: repr(found[0])[1:-1], text)


def code_span(text: str) -> str:
    """Return strangers' text as code in Markdown, which no backtick in it can end."""
    text = printable(text).replace("\n", "\\n")
    fence = "`" * (1 + max(map(len, re.findall("`+", text)), default=0))
    space = " " if len(fence) > 1 else ""
    return f"{fence}{space}{text}{space}{fence}"


def is_text(value: str) -> bool:
    """Return whether UTF-8 can hold this text: it has no half of a surrogate pair."""
    try:
        value.encode()
    except UnicodeEncodeError:
        return False
    return True


def sentence(error: BaseException) -> str:
    """Return an exception as one line; a system error's names the file."""
    if isinstance(error, OSError) and error.strerror:
        where = f"{error.filename}: " if error.filename else ""
        return f"{where}{error.strerror.lower()}"
    return " ".join(str(error).split()) or type(error).__name__
