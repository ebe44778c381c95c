"""Conversations rendered to text by a tokenizer's chat template, in the sandbox of Jinja that transformers uses."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import date
from functools import lru_cache
from string import ascii_letters
from typing import TYPE_CHECKING, Any

from ladderize.console import sentence
from ladderize.errors import UserError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Span = tuple[int, int]  # [begin, end) in characters
# The day that templates get for today where data are made or read, whatever the real one: Llama 3.2's own default.
DATE_OF_DATA = date(2024, 7, 26)


@dataclass(frozen=True)
class Conversation:
    """A conversation as chat templates take it."""

    messages: Sequence[Mapping[str, Any]]  # OpenAI's form: a role, a content, and what else a template may read
    scored: Sequence[bool] = ()  # of each message, whether the loss counts it
    tools: Sequence[Mapping[str, Any]] | None = None  # JSON schemas of functions that may be called
    variables: Mapping[str, Any] = field(default_factory=dict)  # of the template

    def until(self, count: int) -> "Conversation":
        """Return the conversation up to its message ``count``, which is left out."""
        return replace(self, messages=self.messages[:count], scored=self.scored[:count])


def said_by_user(text: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": text}]


def chat_template_of(
    tokenizer: "PreTrainedTokenizerBase", name: str = "the tokenizer", tools: Sequence[Mapping[str, Any]] | None = None
) -> str:
    """Return a tokenizer's chat template, maybe another one for tools. Raises UserError where none is the default."""
    schemas: Any = tools
    try:
        return str(tokenizer.get_chat_template(tools=schemas))
    except ValueError:
        raise UserError(
            f"{name} has no chat template, which a conversation needs; put a chat_template.jinja into the model's"
            " folder"
        ) from None


@lru_cache
def _with_fixed_date(template: str) -> str:
    """Return a template for which today is ``DATE_OF_DATA``: by ``date_string``, and by ``strftime_now``."""
    directives = [f"%{flag}{letter}" for flag in ("", "-") for letter in ascii_letters]
    dates = {directive: DATE_OF_DATA.strftime(directive) for directive in directives}
    return (
        f"{{%- set date_string = date_string | default({DATE_OF_DATA.strftime('%d %b %Y')!r}) -%}}"
        f"{{%- macro strftime_now(format) -%}}{{%- set text = namespace(value=format) -%}}"
        f"{{%- for directive, value in {dates!r}.items() -%}}"
        f"{{%- set text.value = text.value.replace(directive, value) -%}}{{%- endfor -%}}"
        f"{{{{- text.value -}}}}{{%- endmacro %}}\n{template}"  # the sandbox drops a line's end behind a block
    )


def render(
    tokenizer: "PreTrainedTokenizerBase",
    conversation: Conversation,
    *,
    as_data: bool,
    add_generation_prompt: bool = False,
    marked: bool = False,
) -> tuple[str, list[Span]]:
    """Return the text of a conversation, and with ``marked`` the spans between ``{% generation %}`` markers. as_data:
    today is ``DATE_OF_DATA``. Raises UserError where the template refuses it."""
    from transformers.utils import chat_template_utils as templates

    to_text: Any = templates.render_jinja_template  # it returns a tuple, but is annotated as a string
    template = chat_template_of(tokenizer, tools=conversation.tools)
    variables = {**tokenizer.special_tokens_map, **conversation.variables}
    try:
        texts, spans = to_text(
            conversations=[[*conversation.messages]],
            tools=conversation.tools,
            chat_template=_with_fixed_date(template) if as_data else template,
            add_generation_prompt=add_generation_prompt,
            return_assistant_tokens_mask=marked,
            **variables,
        )
    except Exception as error:  # a template may raise whatever Python can
        raise UserError(f"the chat template refuses the conversation ({sentence(error)[:200]})") from None
    return texts[0], spans[0] if spans else []
