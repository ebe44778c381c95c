"""Chat templates are programs of strangers, which transformers renders in a sandbox: what one raises is a sentence."""

import pytest
from transformers import AutoTokenizer

from ladderize.chat_template import chat_template_of, render_prompt
from ladderize.demo.inputs import MODEL
from ladderize.errors import UserError

TURNS = [{"role": "user", "content": "Hello"}]


@pytest.fixture
def tokenizer():
    return AutoTokenizer.from_pretrained(MODEL)


@pytest.mark.parametrize(
    ("template", "message"),
    [
        ("{{ ''.__class__.__mro__ }}", "is unsafe"),
        ("{{ raise_exception('roles must\\nalternate') }}", "refuses the conversation .roles must alternate"),
        ("{{ range(10000000) | list }}", "Range too big"),
        ("{{ 1 / 0 }}", "division by zero"),
        ("{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}", "maximum recursion depth"),
    ],
)
def test_templates_that_go_wrong(tokenizer, template, message):
    tokenizer.chat_template = template
    with pytest.raises(UserError, match=message) as error:
        render_prompt(tokenizer, TURNS)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("template", [None, {"a": "x", "b": "y"}])
def test_no_template_or_none_that_is_the_default(tokenizer, template):
    tokenizer.chat_template = template
    with pytest.raises(UserError, match="^model has no chat template, which a conversation needs"):
        chat_template_of(tokenizer, "model")
