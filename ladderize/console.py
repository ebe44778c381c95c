"""Output of the commands: results on stdout, progress on stderr, and numbers and strangers' text formatted for
people."""

import contextlib
import errno
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
from typing import Any, Protocol, TextIO

from ladderize.ranks.environment import is_main_rank

SCHEMA_VERSION = 1
LOG_INTERVAL_S = 60.0  # between two lines of progress where stderr is no terminal
# Characters that a terminal would obey rather than show, except new lines and tabs, and those that reverse text.
_UNPRINTABLE = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u2028\u2029\u202a-\u202e\u2066-\u2069\ufffe\uffff]")


class Advance(Protocol):
    """A function that reports ``steps`` more of a progress; ``detail`` is shown behind the time left."""

    def __call__(self, steps: int = 1, detail: str = "") -> None: ...


@dataclass(frozen=True)
class Console:
    """The output of one command. On a terminal, rich fits it to the width; piped, all is plain text of any width.

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
        from rich.console import Console as RichConsole
        from rich.table import Table
        from rich.text import Text

        shown = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
        for key in rows[0]:
            shown.add_column(Text(key), justify="right" if key in right else "left", overflow="fold")
        for row in rows:
            shown.add_row(*(Text(printable(str(value))) for value in row.values()))
        RichConsole(file=sys.stdout, highlight=False).print(shown)

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
        """Show work of unknown length: by a spinner on a terminal, elsewhere by a line at the beginning and each
        minute."""
        if not self.speaks:
            yield
        elif not sys.stderr.isatty():
            say(text)
            begin = time.monotonic()
            with _repeated(lambda: say(f"{text}: for {time.monotonic() - begin:.0f} s"), LOG_INTERVAL_S):
                yield
        else:
            from rich.console import Console as RichConsole
            from rich.markup import escape

            text = escape(printable(text))
            # A descriptor of its own, since the block may replace or redirect stderr.
            with os.fdopen(os.dup(sys.stderr.fileno()), "w") as file, RichConsole(file=file).status(text):
                yield

    @contextlib.contextmanager
    def progress(self, description: str, total: int, *, done: int = 0, is_bytes: bool = False) -> Iterator[Advance]:
        """Show progress on stderr by tqdm's bar; yields ``advance(n, detail="")``.

        done: the part of ``total`` that an earlier run did; it does not count for the speed.
        """
        from tqdm import tqdm

        quiet_bar = type("Bar", (tqdm,), {"monitor_interval": 0})  # else a thread wakes up beside measurements
        with quiet_bar(
            desc=printable(description),
            total=total,
            initial=done,
            unit="B" if is_bytes else "",
            unit_scale=is_bytes,
            miniters=1,
            smoothing=0.01,  # the time left goes by the average speed: steps between validations are faster
            file=_bar_stream(),
            leave=False,
            disable=not self.speaks,
        ) as bar:

            def advance(steps: int = 1, detail: str = "") -> None:
                if detail:  # stays until the next one
                    bar.set_postfix_str(printable(detail), refresh=False)
                bar.update(steps)
                if not steps:
                    bar.refresh()

            # a step may take longer than a minute; a terminal's bar need not move for that
            alive = self.speaks and not sys.stderr.isatty()
            with _repeated(bar.refresh, LOG_INTERVAL_S / 4) if alive else contextlib.nullcontext():
                yield advance

    @contextlib.contextmanager
    def contained(self, *, bars: bool = False) -> Iterator[None]:
        """Hide what a library prints.

        bars: show its progress on stderr; where that is no terminal, a line every minute.
        """
        stream: Any = _bar_stream() if bars and self.speaks else io.StringIO()
        with contextlib.redirect_stdout(stream), contextlib.redirect_stderr(stream):
            yield


SILENT = Console(quiet=True)  # of calls from Python


class _LoggedBar(io.TextIOBase):
    """A stream for tqdm that prints the latest state of its bar about once a minute, so that a log can hold it."""

    def __init__(self, stream: TextIO) -> None:
        self.stream, self.printed = stream, time.monotonic()

    def write(self, text: str) -> int:
        state, now = text.strip("\r\n "), time.monotonic()
        if "%|" in state and now >= self.printed + LOG_INTERVAL_S:
            self.printed = now
            print(printable(state.rsplit("\r")[-1]), file=self.stream, flush=True)
        return len(text)


@contextlib.contextmanager
def _repeated(act: Callable[[], object], interval_s: float) -> Iterator[None]:
    """Call ``act`` each ``interval_s`` seconds, from a thread, while the block runs."""
    ended = threading.Event()

    def repeat() -> None:
        while not ended.wait(interval_s):
            act()

    thread = threading.Thread(target=repeat, daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()


def _bar_stream() -> Any:
    """Return the stream for progress bars: stderr, which is a terminal or gets a line every minute."""
    return sys.stderr if sys.stderr.isatty() else _LoggedBar(sys.stderr)


def say(text: str, *, style: str = "") -> None:
    """Print a line on stderr: wrapped at words and coloured on a terminal, unchanged elsewhere."""
    text = printable(text)
    if not sys.stderr.isatty():
        print(text, file=sys.stderr, flush=True)
        return
    from rich.console import Console as RichConsole

    RichConsole(file=sys.stderr, highlight=False, markup=False, emoji=False).print(text, style=style)


def to_json(value: Mapping[str, Any]) -> str:
    """Return a result document as strict JSON, with the keys of every result file in front."""
    from ladderize import __version__

    document = {"schema_version": SCHEMA_VERSION, "ladderize_version": __version__, **value}
    return json.dumps(strict_json(document), indent=2, allow_nan=False)


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


def table(rows: Sequence[Mapping[str, Any]], *, right: Sequence[str] = ()) -> str:
    """Return rows with equal keys as an aligned text table; columns named in ``right`` are right-aligned."""
    cells = {key: [key, *(printable(str(row[key])) for row in rows)] for key in rows[0]}
    widths = {key: max(map(len, column)) for key, column in cells.items()}
    columns = [
        [text.rjust(widths[key]) if key in right else text.ljust(widths[key]) for text in column]
        for key, column in cells.items()
    ]
    head, *body = ("  ".join(line).rstrip() for line in zip(*columns, strict=True))
    return "\n".join([head, "  ".join("-" * width for width in widths.values()), *body])


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


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether Python, or torch's allocator of a GPU or the CPU (a plain RuntimeError), ran out of memory."""
    known = isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError"
    return known or (isinstance(error, RuntimeError) and "can't allocate memory" in str(error))


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
        # a copy that fills the disk names the file that it reads first
        path = (error.errno == errno.ENOSPC and error.filename2) or error.filename
        return f"{f'{path}: ' if path else ''}{error.strerror.lower()}"
    return " ".join(str(error).split()) or type(error).__name__
