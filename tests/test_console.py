"""What commands share to print with: tables that fit, progress that a log can hold, colour only where it is wanted."""

import contextlib
import io
import random
import re
import signal

import pytest

from ladderize import console
from ladderize.boundary import error_boundary
from ladderize.console import Console
from tests.warm import wait_until


def test_a_table_on_a_terminal_fits_and_keeps_every_word(monkeypatch):
    rows = [{f"{'x' * random.randint(1, 6)} {i}": "two words [b]" for i in range(9)}] * 3
    monkeypatch.setenv("COLUMNS", "80")
    stream = io.StringIO()
    stream.isatty = lambda: True
    with contextlib.redirect_stdout(stream):
        Console().table(rows, right=list(rows[0])[1:])
    plain = re.sub(r"\x1b\[\d+m", "", stream.getvalue())
    assert max(map(len, plain.splitlines())) <= 80
    shown = "".join(plain.split())
    assert all(shown.count(part) == 27 for part in ("two", "[b]"))


def test_progress_is_a_line_every_minute_where_there_is_no_terminal(monkeypatch):
    monkeypatch.setattr(console, "LOG_INTERVAL_S", 0.01)
    with contextlib.redirect_stderr(io.StringIO()) as stderr, Console().progress("steps", 100, done=60) as advance:
        for _ in range(3):
            with Console().contained():
                advance(1, "loss 3.5")
        wait_until(lambda: "63%" in stderr.getvalue())
    assert re.search(r"steps:  63% \(63 of 100\), 1 s, 1 s left, loss 3\.5\n", stderr.getvalue())


def test_sigterm_ends_a_command_as_ctrl_c_does():
    before = signal.getsignal(signal.SIGTERM)
    cleaned = []

    def command():
        with error_boundary(debug=False):
            try:
                signal.raise_signal(signal.SIGTERM)
            finally:
                cleaned.append(True)

    with contextlib.redirect_stderr(io.StringIO()) as stderr, pytest.raises(SystemExit) as ended:
        command()
    assert (ended.value.code, stderr.getvalue(), cleaned) == (143, "Stopped by SIGTERM.\n", [True])
    assert signal.getsignal(signal.SIGTERM) == before
