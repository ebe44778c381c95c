"""What commands share to print with: tables that fit, progress that a log can hold, colour only where it is wanted."""

import contextlib
import io
import os
import random
import signal
import subprocess
import sys

import pytest

from ladderize import console
from ladderize.boundary import error_boundary
from ladderize.console import Console, human_bytes, human_count, human_seconds, table
from ladderize.demo.inputs import MODEL
from tests.warm import wait_until


def random_rows(seed: int) -> list[dict[str, str]]:
    draw = random.Random(seed)
    columns = [f"{'x' * draw.randint(1, 9)} {i}" for i in range(draw.randint(2, 9))]
    words = ["ladder", "spd-all", "1.25x", "0.001", "a", "[b]", "insensitive"]
    return [{name: " ".join(draw.choices(words, k=draw.randint(1, 3))) for name in columns} for _ in range(4)]


@pytest.mark.parametrize("width", [40, 80, 120])
def test_a_table_fits_and_keeps_every_word(width):
    for _ in range(20):
        rows = random_rows(random.getrandbits(32))
        text = table(rows, right=list(rows[0])[1:], width=width)
        lines = [line for line in text.splitlines() if set(line) - {"-", " "}]
        heads = len(rows) if "\n\n" in text else 1  # stacked rows repeat them
        words = " ".join([*[*rows[0]] * heads, *(value for row in rows for value in row.values())]).split()
        assert max(map(len, lines)) <= width or heads > 1  # the terminal wraps the values of stacked rows
        assert sorted(" ".join(lines).split()) == sorted(words)


def test_a_table_of_any_width_is_not_wrapped():
    rows = [{"model": "two words " * 100, "value": "1"}]
    assert len(table(rows, right=["value"]).splitlines()) == 3


@pytest.mark.parametrize(
    ("done", "steps", "detail", "line"),
    [
        (0, 8, "loss 3.5", "steps: 8 of 100, 3.1 min left, loss 3.5"),
        (60, 8, "", "steps: 68 of 100, 64 s left"),  # what an earlier run did does not count for the time left
        (0, 0, "", "steps: 0 of 100"),
    ],
)
def test_a_line_of_progress(monkeypatch, done, steps, detail, line):
    now = 0.0
    monkeypatch.setattr(console.time, "monotonic", lambda: now)
    logged = console._LoggedProgress("steps", 100, done, False)
    for _ in range(steps):
        now += 2
        logged.advance(1, detail)
    assert logged.line() == line


def test_a_step_of_many_minutes_is_heard_of_where_there_is_no_terminal(monkeypatch):
    monkeypatch.setattr(console, "FIRST_LOG_S", 0.001)
    monkeypatch.setattr(console, "LOG_INTERVAL_S", 0.001)

    def heard(block):
        with contextlib.redirect_stderr(io.StringIO()) as stderr, block as advance, Console().contained():
            if advance is not None:
                advance(7)
            wait_until(lambda: stderr.getvalue().count("\n") > 3)
        return stderr.getvalue().splitlines()[-1]

    assert heard(Console().progress("layers", 9)).startswith("layers: 7 of 9, ")
    assert heard(Console().stage("loading the models")) == "loading the models: 1 s so far"


def test_short_work_says_nothing_of_its_progress():
    with contextlib.redirect_stderr(io.StringIO()) as stderr, Console().progress("steps", 3) as advance:
        advance(3)
    assert stderr.getvalue() == ""


def test_a_library_is_silent_but_for_its_progress_now_and_then(monkeypatch):
    now = 0.0
    monkeypatch.setattr(console.time, "monotonic", lambda: now)
    with contextlib.redirect_stderr(io.StringIO()) as stderr, Console().contained(bars=True):
        print("chatter")
        for percent in range(0, 100, 10):
            now += 10
            sys.stderr.write(f"\rrequests:  {percent}%|##  | {percent}/100")
    assert stderr.getvalue().splitlines() == ["requests:  10%|##  | 10/100", "requests:  70%|##  | 70/100"]


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


def test_a_closed_stdout_is_said():
    """Not where the next file that is opened would take its place."""
    command = [sys.executable, "-m", "ladderize", "inspect", str(MODEL)]
    closed = subprocess.run(["sh", "-c", 'exec "$@" >&-', "sh", *command], capture_output=True, text=True)
    assert (closed.returncode, closed.stdout) == (1, "")
    assert closed.stderr.startswith("Error: stdout is closed")
    assert closed.stderr.count("\n") == 1
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
