"""The options of commands: one dataclass each, which the command line, --config, a sweep and Python fill, and help."""

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import pytest
import typer

from ladderize.choices import check_options, distinct_names, identity, option, option_words, options_from
from ladderize.cli import app
from ladderize.commands.parser import add
from ladderize.console import Console
from ladderize.errors import UsageError, UserError
from tests.helpers import fresh_rng, invoke, invoke_well, refusal

MOST_OPTIONS = 170


@dataclass(frozen=True)
class Example:
    model: str = option("A model.", ..., metavar="MODEL", positional=True)
    data: tuple[str, ...] = option("Files.", ..., metavar="FILE")
    sizes: tuple[int, ...] = option("Sizes.", (1,), flags="--size", parse=lambda text: tuple(map(int, text.split(","))))
    names: tuple[str, ...] = option("Names.", (), parse=distinct_names)
    rate: float | None = option("A rate.", max=1.0)
    count: int = option("A count.", 8, min=2)
    color: Literal["red", "blue"] = option("A color.", "red", needs="names")
    verify: bool = option("Do not verify.", True, flags="--no-verify", decides=False)
    out: Path | None = option("A file.", decides=False)

    def __post_init__(self) -> None:
        check_options(self)


LEAST = {"model": "m", "data": "d"}


def from_line(*words: str) -> Example:
    made: list[Example] = []

    def run(options: Example, console: Console) -> None:
        made.append(options)

    line = typer.Typer()
    add(line, "", run, config=True)
    line(list(words), standalone_mode=False)
    return made[0]


def test_the_command_line_a_mapping_and_python_make_the_same(tmp_path):
    python = Example("m", ("a", "b"), (1, 8), ("x", "y"), 0.5, 3, "blue", False, Path("o"))
    values = {"model": "m", "data": ["a", "b"], "size": [1, 8], "names": "x,y,x", "rate": 0.5, "count": "3"}
    values |= {"color": "blue", "no-verify": True, "out": "o"}
    assert options_from(Example, values) == python
    assert from_line(*option_words(python)) == python
    assert option_words(Example("m", ("d",))) == ["m", "--data", "d"]
    file = tmp_path / "config.yaml"
    file.write_text("data: [c]\nsize: [1, 8]\ncount: 7\nno_verify: true\nrate:\n")
    assert from_line("m", "--config", str(file), "--count", "9") == Example("m", ("c",), (1, 8), count=9, verify=False)


def test_what_decides_nothing_is_no_identity():
    count = int(fresh_rng().integers(2, 100))
    first, second = (Example("m", ("d",), count=count, verify=verify) for verify in (True, False))
    assert identity(first) == identity(second) == {**identity(Example("m", ("d",))), "count": count}


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"data": "d"}, "Missing argument 'MODEL'"),
        ({"model": "m"}, "Missing option '--data'"),
        ({**LEAST, "cuont": 1}, r"'cuont' \(did you mean 'count'\?\)"),
        ({**LEAST, "count": 1}, "--count must be an integer of at least 2"),
        ({**LEAST, "count": "many"}, "--count 'many' is not an integer"),
        ({**LEAST, "rate": "nan"}, "--rate must be a finite number"),
        ({**LEAST, "rate": 1.5}, "--rate must be at most 1"),
        ({**LEAST, "color": "green"}, "--color green is not one of red, blue"),
        ({**LEAST, "color": "blue"}, "--color has no effect without --names"),
        ({**LEAST, "no_verify": 1}, "--no-verify is 1, but it is a switch: write true or false"),
        ({**LEAST, "rate": {"a": 1}}, "write one value, or a list of them"),
    ],
)
def test_a_bad_value_is_one_sentence(values, message):
    """From a file with its place."""
    with pytest.raises((UsageError, UserError), match=message):
        options_from(Example, values)
    with pytest.raises(UserError, match=f"^file.yaml: .*{message}"):
        options_from(Example, values, "file.yaml")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("lr: 0.1\nlearning_rat: 3", "there is no option 'learning_rat'"),
        ("schedule: linear", "--config .*: --schedule linear is not one of sequential, domino"),
        ("config: other.yaml", "there is no option 'config'"),
        ("- lr", "holds no options"),
    ],
)
def test_a_bad_file_is_one_sentence(text, message, tmp_path):
    (tmp_path / "c.yaml").write_text(text)
    stderr = refusal("adapt", "in", "out", "--data", "x", "--config", tmp_path / "c.yaml", code=1)
    assert re.search(message, stderr)


def test_the_options_are_few_and_explained():
    """Without --json and --config, which the parser gives to each command."""
    commands = typer.main.get_command(app).commands  # type: ignore[attr-defined]
    parameters = [parameter for command in commands.values() for parameter in command.params]
    options = [parameter for parameter in parameters if parameter.param_type_name == "option"]
    assert len([parameter for parameter in options if parameter.name not in ("json", "config")]) <= MOST_OPTIONS
    assert all(parameter.help for parameter in parameters)


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
