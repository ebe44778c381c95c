"""What commands share to print with: tables that fit, progress that a log can hold, colour only where it is wanted."""

import contextlib
import io
import os
import random
import re
import signal
import subprocess
import sys

import pytest

from ladderize import console
from ladderize.boundary import error_boundary
from ladderize.console import Console, human_bytes, human_count, human_seconds, table
from ladderize.demo.inputs import MODEL


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


def test_a_table_of_any_width_is_not_wrapped():
    rows = [{"model": "two words " * 100, "value": "1"}, {"model": "a", "value": "12"}]
    text = table(rows, right=["value"])
    assert [line[-2:] for line in text.splitlines()] == ["ue", "--", " 1", "12"]


@pytest.mark.parametrize(
    ("done", "detail", "line"),
    [
        (0, "loss 3.5", "steps: 30 of 100, 2.3 min left, loss 3.5"),
        (60, "", "steps: 90 of 100, 20 s left"),  # the part of an earlier run does not count for the time left
    ],
)
def test_a_line_of_progress_every_minute_where_there_is_no_terminal(monkeypatch, done, detail, line):
    now = 0.0
    monkeypatch.setattr(console.time, "monotonic", lambda: now)
    with contextlib.redirect_stderr(io.StringIO()) as stderr, Console().progress("steps", 100, done=done) as advance:
        for _ in range(35):
            now += 2
            with Console().contained():
                advance(1, detail)
    assert stderr.getvalue().splitlines() == [line]


def test_short_work_says_nothing_of_its_progress():
    with contextlib.redirect_stderr(io.StringIO()) as stderr, Console().progress("steps", 3) as advance:
        advance(3)
    assert stderr.getvalue() == ""


def test_a_library_is_silent_but_for_its_progress_now_and_then(monkeypatch):
    now = 0.0
    monkeypatch.setattr(console.time, "monotonic", lambda: now)
    with contextlib.redirect_stderr(io.StringIO()) as stderr, Console().contained(bars=True):
        print("chatter")
        for percent in range(0, 100, 5):
            now += 10
            sys.stderr.write(f"\rrequests:  {percent}%|##  | {percent}/100")
    assert stderr.getvalue().splitlines() == [
        "requests:  25%|##  | 25/100",
        "requests:  55%|##  | 55/100",
        "requests:  85%|##  | 85/100",
    ]


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


@pytest.mark.parametrize(
    ("name", "shown"),
    [
        ("models/a", "`models/a`"),
        ("a`[d](http:x)`<b>", "`` a`[d](http:x)`<b> ``"),
        ("`` ` ```", "```` `` ` ``` ````"),
        ("a\u202eb\nc\x1b", "`a\\u202eb\\nc\\x1b`"),
    ],
)
def test_a_name_in_a_card_stays_code(name, shown):
    assert console.code_span(name) == shown


def test_closed_streams():
    """The next file that is opened does not take their place."""
    command = [sys.executable, "-m", "ladderize", "inspect", str(MODEL)]
    closed = subprocess.run(["sh", "-c", 'exec "$@" >&- 2>&-', "sh", *command], capture_output=True, text=True)
    assert closed.returncode == 0
    silent = subprocess.run(["sh", "-c", 'exec "$@" 2>&-', "sh", *command], capture_output=True, text=True)
    assert silent.returncode == 0
    assert "8 layers: dense" in silent.stdout


def test_ctrl_c_while_libraries_tidy_up_shows_no_traceback():
    code = """
import atexit, signal
from ladderize.boundary import error_boundary
atexit.register(signal.raise_signal, signal.SIGINT)
with error_boundary(debug=False):
    print("done")
"""
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (result.returncode, result.stdout, result.stderr) == (-signal.SIGINT, "done\n", "")


@pytest.mark.parametrize("colour", [True, False])
def test_errors_are_red_on_a_terminal_unless_no_color_is_set(tmp_path, colour):
    master, slave = os.openpty()
    environment = {key: value for key, value in os.environ.items() if key not in ("NO_COLOR", "FORCE_COLOR")}
    environment |= {"TERM": "xterm", "COLUMNS": "80"} | ({} if colour else {"NO_COLOR": "1"})
    command = [sys.executable, "-m", "ladderize", "inspect", str(tmp_path / ("no-such-model" * 10))]
    result = subprocess.run(command, env=environment, stderr=slave, check=False)
    os.close(slave)
    shown = os.read(master, 10_000).decode()
    os.close(master)
    assert result.returncode == 1
    assert ("\x1b[31m" in shown) == colour
    assert "Error: " in shown
    assert all(len(line) <= 100 for line in shown.splitlines() if "no-such" not in line)


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0.2, "1 s"), (89, "89 s"), (96, "1.6 min"), (6000, "1.7 h"), (70 * 3600, "70 h"), (24000 * 3600, "1,000 days")],
)
def test_times_are_said_in_a_unit_that_people_use(seconds, text):
    assert human_seconds(seconds) == text


@pytest.mark.parametrize(
    ("count", "in_bytes", "as_count"),
    [
        *((999, "999 B", "999"), (1000, "1 kB", "1k"), (999_499, "999 kB", "999k")),
        *((999_500, "1 MB", "1M"), (999_999_999, "1 GB", "1B"), (2.5e12, "2.5 TB", "2.5T")),
    ],
)
def test_three_digits_never_round_to_a_thousand(count, in_bytes, as_count):
    assert human_bytes(count) == in_bytes
    assert human_count(count) == as_count
