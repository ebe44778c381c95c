"""Chat templates are programs of strangers: whatever they do, it is one sentence, and soon."""

import os
import shutil
import signal
from datetime import datetime

import pytest
from transformers import AutoTokenizer

from ladderize import chat_template
from ladderize.chat_template import ChatRenderer, RefusedConversation
from ladderize.demo.inputs import MODEL
from ladderize.errors import UserError
from tests.helpers import invoke, one_sentence

TURNS = [{"role": "user", "content": "Hello"}]
TOKENS = {"bos_token": "<s>", "additional_special_tokens": ["<a>"]}
LOOP = "{% for a in range(99999) %}{% for b in range(99999) %}{{ '' }}{% endfor %}{% endfor %}"
RECURSION = "{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}"


@pytest.fixture(scope="module")
def renderer():
    """With a second instead of five. One for all: its process, which imports transformers, starts again where it
    ends."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(chat_template, "CPU_SECONDS", 1)
        yield ChatRenderer("", TOKENS)


@pytest.mark.parametrize(
    ("template", "refused", "message"),
    [
        ("{% if %}", False, "Expected an expression"),
        ("{{ messages | nothing }}", False, "No filter named"),
        ("{{ ''.__class__.__mro__ }}", False, "is unsafe"),
        ("{{ raise_exception('roles must alternate') }}", True, "refuses the conversation .roles must alternate"),
        ("{{ range(10000000) | list }}", True, "Range too big"),
        ("{{ 1 / 0 }}", True, "division by zero"),
        ("{{ messages.none.none }}", True, "has no attribute 'none'"),
        ("{{ messages[0].content + 1 }}", True, "can only concatenate str"),
        ("{{ 'x' * 10000000000 }}", False, "more than 2 GiB of memory"),
        (
            "{% set x = namespace(s='x') %}{% for i in range(60) %}{% set x.s = x.s + x.s %}{% endfor %}",
            False,
            "2 GiB|runs for more",
        ),
        (RECURSION, False, "calls itself without end"),
        (LOOP, False, "runs for more than 1 s"),
        ("{{ " + "(" * 5000 + "1" + ")" * 5000 + " }}", False, "nested too deeply"),
    ],
)
def test_templates_that_go_wrong(renderer, template, refused, message):
    renderer.template = template
    with pytest.raises(UserError, match=message) as error:
        renderer.render(TURNS)
    assert isinstance(error.value, RefusedConversation) == refused
    assert "\n" not in str(error.value)


def test_a_renderer_goes_on_after_an_error(renderer):
    renderer.template = "{% if messages[0].content == 'loop' %}" + LOOP
    renderer.template += "{% endif %}{{ bos_token }}{{ messages[0].content }}"
    for _ in range(2):
        assert renderer.render(TURNS) == "<s>Hello"
        with pytest.raises(UserError, match="runs for more than"):
            renderer.render([{"role": "user", "content": "loop"}])
    assert renderer.render([{"role": "user", "content": "\ud800"}]) == "<s>\ud800"


def test_the_same_text_as_transformers():
    tokenizer = AutoTokenizer.from_pretrained(MODEL)
    tokenizer.chat_template = (
        "{{ bos_token }}{% for m in messages %}[{{ m.role }}]{{ m.content }}{% if m.role == 'assistant' %}"
        "{% generation %}{{ m.content }}{% endgeneration %}{% endif %}{% endfor %}"
        "{% if add_generation_prompt %}[assistant]{% endif %}{{ messages | tojson }}"
    )
    renderer = ChatRenderer.of(tokenizer)
    turns = [*TURNS, {"role": "assistant", "content": "Grüße \U0001f642"}]
    for options in ({}, {"add_generation_prompt": True}, {"continue_final_message": True}):
        expected = tokenizer.apply_chat_template(turns, tokenize=False, **options)
        assert renderer.render(turns, **options) == expected
    tokenizer.chat_template = None
    assert ChatRenderer.of(tokenizer) is None


def test_the_day_that_a_template_is_told():
    renderer = ChatRenderer("{{ strftime_now('%d %b %Y') }}", {})
    assert renderer.render(TURNS).endswith(str(datetime.now().year))
    renderer.date = datetime(2024, 7, 26)
    assert renderer.render(TURNS) == "26 Jul 2024"
    pid = renderer._process.pid
    del renderer
    with pytest.raises(ProcessLookupError):  # its process ends with it
        os.kill(pid, signal.SIGCONT)


def test_generate_with_a_template(tmp_path):
    model = shutil.copytree(MODEL, tmp_path / "m")
    arguments = ("generate", model, "-p", "the cat", "--chat", "--max-new-tokens", 3)
    (model / "chat_template.jinja").write_text("{{ bos_token }}{{ messages[0].content }}")
    plain = invoke("generate", model, "-p", "the cat", "--max-new-tokens", 3)
    assert invoke(*arguments).stdout == plain.stdout
    (model / "chat_template.jinja").write_text("{{ raise_exception('never\nthis') }}")
    assert "the chat template refuses the conversation (never this)" in one_sentence(invoke(*arguments))
