"""Conversations rendered to text by a tokenizer's chat template, in the sandbox of Jinja that transformers uses."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from ladderize.console import sentence
from ladderize.errors import UserError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

# The date that templates get for today where data are made or read, whatever the real one: Llama 3.2's own default.
DATE_OF_DATA = "26 Jul 2024"


def chat_template_of(tokenizer: "PreTrainedTokenizerBase", name: str) -> str:
    """Return a tokenizer's chat template.

    name: of the model or the data, for the message.
    Raises UserError where there is none, or several of which none is the default.
    """
    try:
        return str(tokenizer.get_chat_template())
    except ValueError:
        raise UserError(
            f"{name} has no chat template, which a conversation needs; put a chat_template.jinja into the model's"
            " folder"
        ) from None


def render_prompt(tokenizer: "PreTrainedTokenizerBase", messages: Sequence[dict[str, Any]], **given: Any) -> str:
    """Return the text of a conversation up to the beginning of the assistant's answer.

    given: more variables of the template.
    Raises UserError where the template refuses it.
    """
    try:
        return str(tokenizer.apply_chat_template([*messages], tokenize=False, add_generation_prompt=True, **given))
    except Exception as error:  # a template may raise whatever Python can
        raise refused_conversation(error) from None


def refused_conversation(error: Exception) -> UserError:
    """Return an error of a template as a UserError with one sentence."""
    return UserError(f"the chat template refuses the conversation ({sentence(error)[:200]})")
