"""How the next token is chosen. Imports no torch until it draws."""

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ladderize.errors import UsageError

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class Sampling:
    """temperature 0: greedy. top_k 0 and top_p 1: no limit. The draws depend on ``seed``, row and step only, not on
    tp_size. Raises UsageError for values that make no distribution."""

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    seed: int = 0

    def __post_init__(self) -> None:
        if not (self.temperature >= 0 and math.isfinite(self.temperature)):
            raise UsageError(f"--temperature must be finite and at least 0, not {self.temperature}")
        if self.top_k < 0:
            raise UsageError(f"--top-k must be at least 0 (no limit), not {self.top_k}")
        if not 0 <= self.top_p <= 1:
            raise UsageError(f"--top-p must be between 0 and 1, not {self.top_p}")
        if self.temperature == 0 and (self.top_k or self.top_p < 1):
            option = "top-k" if self.top_k else "top-p"
            raise UsageError(f"--{option} has no effect with --temperature 0; give a temperature")

    def draws(self, batch: int, steps: int, first_row: int = 0) -> "Tensor":
        """Uniform numbers [batch, steps] of the rows from ``first_row`` on; a row's do not depend on how many rows and
        steps there are."""
        import torch

        seeds = (self.seed + row * 0x9E3779B1 for row in range(first_row, first_row + batch))
        return torch.stack([torch.rand(steps, generator=torch.Generator().manual_seed(seed)) for seed in seeds])
