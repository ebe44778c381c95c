"""One training step of one variant on one rank: what is timed, checked, counted and traced."""

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from ladderize.runtime.collectives.base import Collectives
from ladderize.runtime.schedule import Schedule
from ladderize.runtime.spec import ModelSpec

STEP_PASSES = ("forward", "backward")


class TrainingStep(Protocol):
    """A model with a batch: ``forward()`` gives the mean loss [] (float32), ``backward(loss)`` fills the gradients,
    those that several ranks hold in part among them. It begins with no gradients."""

    def forward(self) -> Tensor: ...

    def backward(self, loss: Tensor) -> None: ...

    def gradients(self) -> Mapping[str, Tensor]:
        """Of this rank's part of each trained tensor, by name."""
        ...

    def clear(self) -> None:
        """Drop the gradients."""
        ...

    def messages(self) -> dict[str, Counter[int]]:
        """By pass: bytes -> how many messages of this size its collectives send."""
        ...

    @property
    def own_bytes(self) -> int:
        """Bytes of this rank's weights."""
        ...


@dataclass(frozen=True)
class Batch:
    """ids [rows, tokens], and what should follow each of them, alike on all ranks."""

    ids: Tensor
    targets: Tensor

    @classmethod
    def random(cls, vocab: int, rows: int, tokens: int, seed: int, device: torch.device) -> "Batch":
        numbers = torch.Generator().manual_seed(seed)
        ids, targets = torch.randint(0, vocab, (2, rows, tokens), generator=numbers).to(device)
        return cls(ids, targets)


OpenStep = Callable[[ModelSpec, Schedule, Collectives, Batch], TrainingStep]
