"""The help of every command."""

import pytest
import typer

from ladderize.cli import app
from tests.helpers import invoke, invoke_well

GROUP = typer.main.get_command(app)
COMMANDS = sorted(GROUP.commands)  # type: ignore[attr-defined]


@pytest.mark.parametrize("command", ["", *COMMANDS])
def test_help_fits_the_terminal_and_cuts_no_option(monkeypatch, command):
    for name in ("COLUMNS", "TERMINAL_WIDTH"):
        monkeypatch.setenv(name, "80")
    shown = invoke_well(*command.split(), "--help").stdout
    assert shown == invoke_well(*command.split(), "-h").stdout
    assert "Usage:" in shown
    assert max(map(len, shown.splitlines())) <= 80
    assert "…" not in shown


def test_nothing_given_shows_the_help():
    helped = invoke()
    assert helped.code == 2
    assert all(command in helped.stdout + helped.stderr for command in COMMANDS)
