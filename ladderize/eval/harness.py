"""lm-eval's model classes around models that are open already."""

from functools import cached_property
from typing import Any

import torch
from lm_eval.models.huggingface import HFLM

from ladderize.chat_template import ChatRenderer, RefusedConversation
from ladderize.errors import UserError
from ladderize.ranks.group import Ranks


class LimitedChats:
    """Renders conversations in a process with limits: a chat template is a stranger's program.

    name: of the model, for messages. tokenizer: has the template.
    """

    name: str
    tokenizer: Any

    @cached_property
    def renderer(self) -> ChatRenderer:
        """Raises UserError where the tokenizer has no chat template."""
        renderer = ChatRenderer.of(self.tokenizer)
        if renderer is None:
            raise UserError(f"{self.name} has no chat template, so --apply-chat-template has nothing to apply")
        return renderer

    def apply_chat_template(self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True) -> str:
        """Return the text of a conversation. As lm-eval's own it leaves the system's turns out where they are
        refused."""
        how = {"add_generation_prompt": add_generation_prompt, "continue_final_message": not add_generation_prompt}
        try:
            return self.renderer.render(chat_history, **how)
        except RefusedConversation:
            return self.renderer.render([turn for turn in chat_history if turn["role"] != "system"], **how)


class SharedHFLM(LimitedChats, HFLM):
    """lm-eval's HF backend on several processes, each with the whole model and its share of the questions.

    lm-eval's own asks Accelerate who it is and how to gather, but only where it has loaded the model itself; this one
    asks the ranks. Its logits_cache is off: lm-eval 0.4.13 scores a continuation of one token at a wrong position with
    it, where context and continuation together are another request's context.
    """

    def __init__(self, name: str, ranks: Ranks, **given: Any) -> None:
        super().__init__(**given, logits_cache=False)
        self.name, self.ranks = name, ranks
        self._rank, self._world_size = ranks.rank, ranks.size

    def all_gather(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return the number of each rank, in order: [ranks]."""
        return torch.stack(self.ranks.gather(tensor.detach().cpu()))

    def gather_object(self, obj: Any, dst: int = 0) -> list[Any] | None:
        gathered = self.ranks.gather(obj)
        return gathered if self.rank == dst else None

    def barrier(self) -> None:
        self.ranks.barrier()
