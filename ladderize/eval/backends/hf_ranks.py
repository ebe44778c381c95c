"""lm-eval's HF backend on several processes, each with the whole model and its share of the questions."""

from typing import Any

import torch
from lm_eval.models.huggingface import HFLM

from ladderize.ranks.group import Ranks


class SharedHFLM(HFLM):
    """lm-eval's own asks Accelerate who it is and how to gather, but only where it has loaded the model itself; this
    one asks the ranks, around a model that is loaded already."""

    def __init__(self, ranks: Ranks, **given: Any) -> None:
        super().__init__(**given)
        self.ranks = ranks
        self._rank, self._world_size = ranks.rank, ranks.size

    def all_gather(self, tensor: torch.Tensor) -> torch.Tensor:
        """A number of each rank, in order: [ranks]."""
        return torch.stack(self.ranks.gather(tensor.detach().cpu()))

    def gather_object(self, obj: Any, dst: int = 0) -> list[Any] | None:
        found = self.ranks.gather(obj)
        return found if self.rank == dst else None

    def barrier(self) -> None:
        self.ranks.barrier()
