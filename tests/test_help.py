"""The help of every command."""

import re

import pytest
import typer

from ladderize.cli import app
from tests.helpers import invoke

GROUP = typer.main.get_command(app)
COMMANDS = sorted(GROUP.commands)  # type: ignore[attr-defined]
MANY = 20  # options; of a command with more -h shows only some
LONG = [
    name
    for name, command in GROUP.commands.items()  # type: ignore[attr-defined]
    if sum(known.param_type_name == "option" for known in command.params) > MANY
]


def shown(command: str, *how: str) -> str:
    helped = invoke(*command.split(), *how)
    assert helped.code == 0
    assert "Usage:" in helped.stdout
    assert max(map(len, helped.stdout.splitlines())) <= 80
    assert "…" not in helped.stdout
    assert "<bool>" not in helped.stdout  # a switch takes no value
    return helped.stdout


@pytest.fixture(autouse=True)
def narrow(monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setenv("TERMINAL_WIDTH", "80")


@pytest.mark.parametrize("command", ["", *sorted({*COMMANDS} - {*LONG})])
def test_help_fits_the_terminal_and_cuts_no_option(command):
    assert shown(command, "-h") == shown(command, "--help")
    assert invoke(*command.split(), "--help-all").code == 2


@pytest.mark.parametrize("command", LONG)
def test_help_of_many_options_has_a_short_form(command):
    whole, short = shown(command, "--help"), shown(command, "-h")
    assert whole == shown(command, "--help-all")
    for text in (whole, short):  # each says how to see the other
        assert "--help,--help-all" in text
        assert "Show all options, and exit." in text
    parameters = GROUP.commands[command].params  # type: ignore[attr-defined]
    required = {known.opts[0] for known in parameters if known.required and known.param_type_name == "option"}
    assert required <= options_in(short) < options_in(whole)
    assert len(options_in(short)) <= MANY + 5


def options_in(text: str) -> set[str]:
    """Where the lines begin with an option: not in the column of its explanation."""
    return set(re.findall(r"^│ [ *]? {0,2}(--[\w-]+)", text, re.MULTILINE))


def test_nothing_given_shows_the_help():
    helped = invoke()
    assert helped.code == 2
    assert all(command in helped.stdout + helped.stderr for command in COMMANDS)
