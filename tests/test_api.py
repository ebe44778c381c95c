"""The Python API: what ``import ladderize`` gives, and that a call prints nothing."""

import os
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


def test_options_check_themselves():
    for made, message in (
        ({"prompt": ("a",), "dtype": "int8"}, "dtype int8 is not one of"),
        ({}, "give one of --prompt"),
    ):
        with pytest.raises(ladderize.UsageError, match=message):
            ladderize.GenerateOptions(model="m", **made)


def test_a_gpu_that_is_not_there(made_llama, tmp_path, monkeypatch):
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    (tmp_path / "a.txt").write_text("text")
    for call in (
        lambda: ladderize.generate(ladderize.GenerateOptions(model=str(made_llama), prompt=("a",), device="cuda")),
        lambda: ladderize.evaluate(
            ladderize.EvalOptions((made_llama,), perplexity=str(tmp_path / "a.txt"), device="cuda:1")
        ),
        lambda: ladderize.bench(ladderize.BenchOptions((str(made_llama),), device="cuda")),
    ):
        with pytest.raises(ladderize.UserError, match=r"--device cuda(:1)?, but torch sees no GPUs here"):
            call()


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
