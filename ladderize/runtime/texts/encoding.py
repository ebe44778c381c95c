"""Prompts and conversations to token ids."""

from collections.abc import Mapping, Sequence
from datetime import datetime
from functools import cached_property
from typing import Any

from ladderize.chat_template.renderer import ChatRenderer, RefusedConversation
from ladderize.console import is_text
from ladderize.errors import UserError
from ladderize.modeling import load_tokenizer
from ladderize.runtime.spec import ModelSpec


def tokenizer_of(spec: ModelSpec) -> Any:
    """The checkpoint's tokenizer; raises UserError where there is none."""
    tokenizer = load_tokenizer(spec.folder) if spec.folder is not None else None
    if tokenizer is None:
        raise UserError(f"{spec.name} has no tokenizer, and generate needs one")
    return tokenizer


class PromptEncoder:
    """Token ids of what a model is asked, checked against its vocabulary and its length.

    max_new_tokens: that have to fit behind them. date: what a chat template is told of today; None: the truth. The
    methods raise UserError, which names ``origin`` where there is one.
    """

    def __init__(self, spec: ModelSpec, max_new_tokens: int, *, date: datetime | None = None) -> None:
        self.spec, self.max_new_tokens, self.date = spec, max_new_tokens, date
        self.tokenizer = tokenizer_of(spec)

    @cached_property
    def _renderer(self) -> ChatRenderer | None:
        return ChatRenderer.of(self.tokenizer, date=self.date)

    def prompt(self, text: str, origin: str = "") -> list[int]:
        """A text to continue, with the tokenizer's own special tokens (for Llama: BOS before it)."""
        if not is_text(text):
            raise UserError(
                f"{_at(origin)}the prompt {text[:80]!a} holds half of a surrogate pair, which is not a character"
            )
        return self._checked(self.tokenizer(text, verbose=False)["input_ids"], origin)

    def conversation(self, messages: Sequence[Mapping[str, Any]], origin: str = "") -> list[int]:
        """A conversation up to where the assistant's answer begins; only the chat template gives it a BOS."""
        if self._renderer is None:
            raise UserError(
                f"{_at(origin)}{self.spec.name} has no chat template, which a conversation needs (and --chat); put a"
                " chat_template.jinja into its folder"
            )
        try:
            text, _ = self._renderer.render(messages, add_generation_prompt=True)
        except RefusedConversation as problem:
            raise UserError(f"{_at(origin)}{problem}") from None
        return self._checked(self.tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"], origin)

    def _checked(self, ids: list[int], origin: str) -> list[int]:
        vocabulary = self.spec.config["vocab_size"]
        if not ids:
            raise UserError(
                f"{_at(origin)}a prompt is empty and the tokenizer adds no BOS token, so there is nothing to continue"
            )
        if max(ids) >= vocabulary:
            raise UserError(
                f"{_at(origin)}{self.spec.name}: its tokenizer makes the token {max(ids)}, but the model has"
                f" {vocabulary} only"
            )
        if len(ids) + self.max_new_tokens > self.spec.positions:
            raise UserError(
                f"{_at(origin)}a prompt of {len(ids)} tokens and --max-new-tokens {self.max_new_tokens} exceed the"
                f" model's {self.spec.positions} positions"
            )
        return ids


def _at(origin: str) -> str:
    return f"{origin}: " if origin else ""
