"""Chat templates in lm-eval: its models render them with ours, which limits what a stranger's template can do."""

from typing import TYPE_CHECKING, Any

from ladderize.chat_template import ChatRenderer, RefusedConversation
from ladderize.errors import UserError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


def render_chats(harness: Any, name: str, tokenizer: "PreTrainedTokenizerBase") -> None:
    """Give ``harness``, an LM of lm-eval, an ``apply_chat_template`` with limits. name: of the model.

    Raises UserError where the tokenizer has no chat template.
    """
    renderer = ChatRenderer.of(tokenizer)
    if renderer is None:
        raise UserError(f"{name} has no chat template, so --apply-chat-template has nothing to apply")

    def apply(chat_history: list[dict[str, str]], add_generation_prompt: bool = True) -> str:
        """lm-eval's own method, with the limits of ours; it, too, leaves the system's turns out if they are
        refused."""
        given = {
            "add_generation_prompt": add_generation_prompt,
            "continue_final_message": not add_generation_prompt,
        }
        try:
            return renderer.render(chat_history, **given)[0]
        except RefusedConversation:
            return renderer.render([turn for turn in chat_history if turn["role"] != "system"], **given)[0]

    harness.apply_chat_template = apply
