"""A conversation -> token ids through the tokenizer's chat template, and which of them the assistant wrote.

transformers' own ``return_assistant_tokens_mask`` is not used: where a turn begins or ends in a space, and the
tokenizer's offsets leave spaces out (Llama 3's do), it scores nothing or all the rest. Here every token that begins in
an assistant's turn is scored.
"""

import re
from typing import TYPE_CHECKING, Any

import numpy as np

from ladderize.chat_template.renderer import DATE_OF_DATA, ChatRenderer, RefusedConversation, Span
from ladderize.errors import UserError
from ladderize.rows.formats import BadRow

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

MARKERS = re.compile(r"\{%-?\s*generation\s*-?%\}")


class ChatTemplate:
    """A tokenizer's chat template. Raises UserError if there is none, or if the tokenizer cannot say which characters a
    token stands for.

    Where the template has ``{% generation %}`` markers, they say what is scored. Else it is what the template adds
    after the prompt for an answer: the turn and what ends it.
    """

    def __init__(self, tokenizer: "PreTrainedTokenizerBase", origin: str) -> None:
        renderer = ChatRenderer.of(tokenizer, date=DATE_OF_DATA)
        if renderer is None:
            raise UserError(
                f"{origin}: a conversation, but the tokenizer has no chat template; put a chat_template.jinja into the"
                " model's folder"
            )
        if not tokenizer.is_fast:
            raise UserError(
                f"{origin}: a conversation, but the tokenizer is not a fast one, so token positions are unknown"
            )
        self.tokenizer = tokenizer
        self.renderer = renderer
        self.has_markers = MARKERS.search(renderer.template) is not None

    def encode(self, messages: list[dict[str, Any]], origin: str) -> tuple[np.ndarray, np.ndarray]:
        """int64 ids and bool scored, [tokens] each. The text is tokenised as a whole, and only the template gives it a
        BOS.

        Raises BadRow if the template refuses the conversation, UserError if the template does not show where the turns
        are.
        """
        text, spans = self._marked(messages, origin) if self.has_markers else self._by_prefixes(messages, origin)
        encoding = self.tokenizer(text, add_special_tokens=False, return_offsets_mapping=True, verbose=False)
        offsets = np.asarray(encoding["offset_mapping"], dtype=np.int64).reshape(-1, 2)
        return np.asarray(encoding["input_ids"], dtype=np.int64), _inside(offsets, spans)

    def _render(self, messages: list[dict[str, Any]], origin: str, **options: Any) -> tuple[str, list[Span]]:
        try:
            return self.renderer.render(messages, **options)
        except RefusedConversation as problem:
            raise BadRow(f"{origin}: {problem}") from None
        except UserError as problem:
            raise UserError(f"{origin}: {problem}") from None

    def _marked(self, messages: list[dict[str, Any]], origin: str) -> tuple[str, list[Span]]:
        return self._render(messages, origin, return_assistant_tokens_mask=True)

    def _by_prefixes(self, messages: list[dict[str, Any]], origin: str) -> tuple[str, list[Span]]:
        text, _ = self._render(messages, origin)
        spans = []
        for number, message in enumerate(messages):
            if message["role"] != "assistant":
                continue
            before, _ = self._render(messages[:number], origin, add_generation_prompt=True)
            after, _ = self._render(messages[: number + 1], origin)
            if not text.startswith(after) or not after.startswith(before):
                raise UserError(
                    f"{origin}: turn {number + 1}: the chat template rewrites earlier turns, so"
                    " the assistant's text cannot be located; put {% generation %} and {% endgeneration %} around"
                    " it in the"
                    " template"
                )
            spans.append((len(before), len(after)))
        return text, spans


def _inside(offsets: np.ndarray, spans: list[Span]) -> np.ndarray:
    """Whether each token begins inside a span. offsets: [tokens, 2], of characters."""
    begins = offsets[:, 0].copy()
    # a token of spaces alone may have lost them all: it begins where the token before it ended
    empty = np.flatnonzero(offsets[:, 0] == offsets[:, 1])
    begins[empty[empty > 0]] = offsets[empty[empty > 0] - 1, 1]
    inside = np.zeros(len(offsets), dtype=bool)
    for begin, end in spans:
        inside |= (begins >= begin) & (begins < end)
    return inside
