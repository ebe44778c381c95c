"""``--config``: the same options from a file."""

import re

import pytest
import typer

from ladderize.commands import parser
from ladderize.runtime.bench.options import BenchOptions
from tests.helpers import refusal


def test_the_command_line_wins(tmp_path):
    file = tmp_path / "config.yaml"
    file.write_text("models: [in]\nbatch-size: [1, 4]\nseed: 7\ntp_size: 2\nreplicate_vocab: true\nlink:\n")
    app, filled = typer.Typer(), []

    def bench(options: BenchOptions) -> None:
        filled.append(options)

    parser.add(app, "", bench, config=True)
    app(["--config", str(file), "--seed", "8"], standalone_mode=False)
    assert filled == [BenchOptions(("in",), tp_size=2, batch_sizes=(1, 4), seed=8, replicate_vocab=True)]


@pytest.mark.parametrize(
    ("text", "code", "message"),
    [
        ("lr: 0.1\nlearning_rat: 3", 1, "there is no option 'learning_rat'"),
        ("schedule: linear", 1, "--config .*: --schedule linear is not one of sequential"),
        ("overwrite: 1", 1, "overwrite is 1, but it is a switch: write true or false"),
        ("data: {a: 1}", 1, "write one value, or a list of them"),
        ("config: other.yaml", 1, "there is no option 'config'"),
    ],
)
def test_a_bad_file_is_one_sentence(text, code, message, tmp_path):
    (tmp_path / "c.yaml").write_text(text)
    given = ("--data", "x", "--config", tmp_path / "c.yaml")
    assert re.search(message, refusal("adapt", "in", "out", *given, code=code))
