"""lm-eval's model classes around models that are already open."""

from typing import Any

import torch
from lm_eval.models.huggingface import HFLM

from ladderize.ranks.group import Ranks


class SharedHFLM(HFLM):
    """lm-eval's HF backend on several processes, each with the whole model and its share of the questions.

    lm-eval asks Accelerate for rank and gathering only where it has loaded the model itself; this class asks the ranks.
    Its logits_cache is off: with it lm-eval 0.4.13 scores a continuation of one token at a wrong position, where
    context and continuation together are another request's context.
    """

    def __init__(self, ranks: Ranks, **given: Any) -> None:
        super().__init__(**given, logits_cache=False)
        self.ranks = ranks
        self._rank, self._world_size = ranks.rank, ranks.size

    def all_gather(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return the numbers of all ranks, in order: [ranks]."""
        return torch.stack(self.ranks.gather(tensor.detach().cpu()))

    def gather_object(self, obj: Any, dst: int = 0) -> list[Any] | None:
        gathered = self.ranks.gather(obj)
        return gathered if self.rank == dst else None

    def barrier(self) -> None:
        self.ranks.barrier()
