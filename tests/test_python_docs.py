"""docs/python.md: its examples run, one after the other, and no function prints."""

import contextlib
import io
import re

import ladderize
from tests.helpers import ROOT

PAGE = (ROOT / "docs" / "python.md").read_text()
BLOCKS = re.findall(r"^```python\n(.*?)^```", PAGE, flags=re.M | re.S)


def test_the_page_shows_every_function():
    functions = {name for name in ladderize.__all__ if callable(getattr(ladderize, name)) and name[0].islower()}
    missing = {name for name in functions if not re.search(rf"\b{name}\b", PAGE)}
    assert not missing
    assert functions >= {"convert_checkpoint", "evaluate", "spd", "adapt_checkpoint", "adapt_layers", "merge", "bench"}


def test_the_examples_run_and_functions_are_silent(tmp_path, monkeypatch, capfd):
    monkeypatch.chdir(tmp_path)
    shown: list[str] = []
    namespace = {"show": lambda *values: shown.append(" ".join(map(str, values)))}
    assert len(BLOCKS) > 10
    for block in BLOCKS:
        bars = re.search(r"from_pretrained|load\(", block)  # transformers', which are not ours
        quiet = re.sub(r"(?<![\w.])print\(", "show(", block)  # but what functions print
        with contextlib.redirect_stderr(io.StringIO()) if bars else contextlib.nullcontext():
            exec(compile(quiet, "docs/python.md", "exec"), namespace)
        assert capfd.readouterr() == ("", ""), block
    for line, comment in re.findall(r"^print\((?:.*)\)  # (.*?)(;.*)?$", PAGE, flags=re.M):
        assert line in shown, f"{line!r} is not among what was printed: {shown} {comment}"
