"""The help of every command."""

import pytest
import typer

from ladderize.cli import app
from tests.helpers import invoke, invoke_well

GROUP = typer.main.get_command(app)
COMMANDS = sorted(GROUP.commands)  # type: ignore[attr-defined]


def shown(command: str, *how: str) -> str:
    helped = invoke_well(*command.split(), *how)
    assert "Usage:" in helped.stdout
    assert max(map(len, helped.stdout.splitlines())) <= 80
    assert "…" not in helped.stdout
    return helped.stdout


@pytest.fixture(autouse=True)
def narrow(monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setenv("TERMINAL_WIDTH", "80")


@pytest.mark.parametrize("command", ["", *COMMANDS])
def test_help_fits_the_terminal_and_cuts_no_option(command):
    assert shown(command, "-h") == shown(command, "--help")


def test_nothing_given_shows_the_help():
    helped = invoke()
    assert helped.code == 2
    assert all(command in helped.stdout + helped.stderr for command in COMMANDS)
