"""A micro-batch on its device, with the figures that the host needs: asking the device for them would wait for it."""

import functools
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from ladderize.runtime.step import additive

LIKELIEST, ANSWERS = "likeliest", "answers"  # fields of Batch


@dataclass(frozen=True)
class Batch:
    """A micro-batch of packed texts. Each text's positions begin at 0. A negative target does not count.

    likeliest, answers: what a teacher, which is not there, has said of the n places (adapt/train/teacher_cache.py): its
    likeliest next tokens, integers [n, kept], and the logarithms of their probabilities, of the probability of all
    others together, and of the target's, [n, kept + 2].
    """

    input_ids: Tensor  # this and the next two: int64 [rows, tokens]
    position_ids: Tensor
    targets: Tensor
    scored: Tensor  # the places whose targets count, in all rows side by side, int64 [n]
    is_packed: bool  # a row holds several texts
    likeliest: Tensor | None = None
    answers: Tensor | None = None

    @classmethod
    def of(cls, tensors: Mapping[str, Tensor], device: torch.device) -> "Batch":
        """Return the batch of tensors on the host: ids, positions, targets, and perhaps a teacher's answers."""
        sent = {**tensors, "scored": (tensors["targets"].flatten() >= 0).nonzero()[:, 0]}
        if device.type == "cuda":  # from pinned memory the copy does not hold up the host
            sent = {name: tensor.pin_memory().to(device, non_blocking=True) for name, tensor in sent.items()}
        return cls(**sent, is_packed=bool((tensors["position_ids"][:, 1:] == 0).any()))

    @classmethod
    def random(cls, vocab: int, rows: int, tokens: int, seed: int, device: torch.device) -> "Batch":
        """Return random rows of one text each, of which every token counts."""
        numbers = torch.Generator().manual_seed(seed)
        ids, targets = torch.randint(0, vocab, (2, rows, tokens), generator=numbers)
        positions = torch.arange(tokens).repeat(rows, 1)
        return cls.of({"input_ids": ids, "position_ids": positions, "targets": targets}, device)

    @property
    def scored_targets(self) -> Tensor:
        return self.targets.flatten()[self.scored]

    def scored_states(self, states: Tensor) -> Tensor:
        return states.flatten(0, -2)[self.scored]

    @functools.cached_property
    def mask(self) -> Tensor | None:
        """The mask, bool [rows, 1, tokens, tokens]: a token sees its own text up to itself. None where every row is one
        text, which a causal kernel reads without a mask."""
        if not self.is_packed:
            return None
        tokens = self.position_ids.shape[1]
        text = (self.position_ids == 0).cumsum(-1)
        causal = torch.ones(tokens, tokens, dtype=torch.bool, device=text.device).tril()
        return ((text[:, :, None] == text[:, None, :]) & causal)[:, None]

    def additive_mask(self, dtype: torch.dtype) -> Tensor | None:
        return None if self.mask is None else additive(self.mask, dtype)
