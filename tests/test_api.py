"""The Python API: what ``import ladderize`` gives, that a call prints nothing, and the examples of docs/python.md."""

import contextlib
import io
import os
import re
import sys

import pytest

import ladderize
from tests import warm
from tests.helpers import ROOT

PACKAGE = ROOT / "ladderize"


def test_every_public_name_is_there_and_known_to_type_checkers():
    assert {"convert_checkpoint", "Recipe", "__version__"} <= set(ladderize.__all__) == set(dir(ladderize))
    for name in ladderize.__all__:
        assert getattr(ladderize, name).__doc__ or name in ("SILENT", "__version__"), f"{name} is not documented"
    assert (PACKAGE / "py.typed").is_file()
    with pytest.raises(AttributeError, match="convert_chekpoint"):
        ladderize.convert_chekpoint  # noqa: B018


WAYS = {
    "load": "import ladderize\ntokenizer = ladderize.load_tokenizer(OUT)\nmodel = ladderize.load(OUT)",
    "register": (
        "import ladderize\nladderize.register()\nfrom transformers import AutoModelForCausalLM, AutoTokenizer\n"
        "tokenizer = AutoTokenizer.from_pretrained(OUT)\nmodel = AutoModelForCausalLM.from_pretrained(OUT)"
    ),
    "trust_remote_code": (
        "from transformers import AutoModelForCausalLM, AutoTokenizer\n"
        "tokenizer = AutoTokenizer.from_pretrained(OUT, trust_remote_code=True)\n"
        "model = AutoModelForCausalLM.from_pretrained(OUT, trust_remote_code=True)"
    ),
}


@pytest.fixture(scope="module")
def ladder(tmp_path_factory):
    out = tmp_path_factory.mktemp("api") / "ladder"
    recipe = ladderize.Recipe(ladder="all")
    ladderize.convert_checkpoint(PACKAGE / "demo" / "model", out, recipe, verify=False)
    return out


@pytest.mark.parametrize("way", WAYS)
def test_a_tokenizer_loads_without_a_question_or_a_warning(ladder, tmp_path, way):
    code = f"OUT = {str(ladder)!r}\n{WAYS[way]}\nprint(tokenizer('a b')['input_ids'], type(model).__name__)"
    # no terminal: a question would fail
    outcome = warm.run([sys.executable, "-c", code], env={**os.environ, "HF_MODULES_CACHE": str(tmp_path)}, cwd=ROOT)
    assert outcome.returncode == 0, outcome.stderr
    assert outcome.stdout.endswith("LadderizedLlamaForCausalLM\n")
    assert "[y/N]" not in outcome.stdout
    said = [line for line in outcome.stderr.splitlines() if line and "Loading weights" not in line]
    assert said == []


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
