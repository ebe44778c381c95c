"""Conversations to text by a tokenizer's chat template, which transformers renders in Jinja's sandbox."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from ladderize.errors import UserError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

# The date that templates are told where data are made or read, whenever that is: Llama 3.2's own default.
DATE_OF_DATA = "26 Jul 2024"


def chat_template_of(tokenizer: "PreTrainedTokenizerBase", name: str) -> str:
    """Return the template. Raises UserError where there is none, or several of which none is the default.

    name: of the model or of the data, for the message.
    """
    try:
        return str(tokenizer.get_chat_template())
    except ValueError:
        raise UserError(
            f"{name} has no chat template, which a conversation needs; put a chat_template.jinja into the model's"
            " folder"
        ) from None


def render_prompt(tokenizer: "PreTrainedTokenizerBase", messages: Sequence[dict[str, Any]], **given: Any) -> str:
    """Return the text of a conversation up to where the assistant's answer begins.

    Raises UserError where the template refuses it. given: further variables of the template.
    """
    try:
        return str(tokenizer.apply_chat_template([*messages], tokenize=False, add_generation_prompt=True, **given))
    except Exception as error:  # a template may raise whatever Python can
        raise refused_conversation(error) from None


def refused_conversation(error: Exception) -> UserError:
    """Return the error of a template as a sentence."""
    problem = " ".join(str(error).split())[:200] or type(error).__name__
    return UserError(f"the chat template refuses the conversation ({problem})")
