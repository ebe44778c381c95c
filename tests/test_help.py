"""The help of every command."""

import pytest
import typer

from ladderize.cli import app
from tests.helpers import invoke

COMMANDS = sorted(typer.main.get_command(app).commands)  # type: ignore[attr-defined]


@pytest.mark.parametrize("command", COMMANDS)
def test_help_fits_the_terminal_and_cuts_no_option(command, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setenv("TERMINAL_WIDTH", "80")
    helped = invoke(command, "-h")
    assert helped.code == 0
    assert helped == invoke(command, "--help")
    assert max(map(len, helped.stdout.splitlines())) <= 80
    assert "…" not in helped.stdout
    assert "<bool>" not in helped.stdout  # a switch takes no value


def test_nothing_given_shows_the_help():
    shown = invoke()
    assert shown.code == 2
    assert all(command in shown.stdout + shown.stderr for command in COMMANDS)
