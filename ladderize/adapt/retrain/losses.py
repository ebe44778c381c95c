"""Cross-entropy on the text, and the divergence from the dense teacher's predictions (Hinton et al., arXiv 1503.02531).

Both are sums over the tokens that count; the trainer divides by how many those are in the whole step, on all ranks.
"""

from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, kl_div, log_softmax
from torch.utils.checkpoint import checkpoint

from ladderize.adapt.data.packing import IGNORED_TARGET
from ladderize.adapt.retrain.metrics import loss_label
from ladderize.blocks import LOGITS_AT_ONCE
from ladderize.files.records import Record

Amount = TypeVar("Amount", Tensor, float)


@dataclass(frozen=True)
class Objective(Record):
    """loss = (1 - weight) * cross-entropy + weight * temperature^2 * KL(teacher || student); weight 0: no teacher."""

    distill_weight: float = 0.0
    temperature: float = 1.0

    @property
    def label(self) -> str:
        """What the loss is, in words."""
        return loss_label(self.distill_weight)

    def total(self, cross_entropy_sum: Amount, divergence_sum: Amount) -> Amount:
        """Of two sums (or means) the one to minimise. The factor keeps the gradient's scale at every temperature."""
        if not self.distill_weight:
            return cross_entropy_sum
        return (
            1 - self.distill_weight
        ) * cross_entropy_sum + self.distill_weight * self.temperature**2 * divergence_sum


def token_losses(
    logits: Tensor, targets: Tensor, teacher_logits: Tensor | None, temperature: float
) -> tuple[Tensor, Tensor]:
    """Summed cross-entropy and KL(teacher || student) in nats, computed in fp32: two scalars (the second 0 without a
    teacher).

    logits, teacher_logits: [tokens, vocab] of any float dtype; targets: [tokens]. Many tokens are taken part by part,
    and their fp32 copies made anew for the backward pass instead of kept: with a vocabulary of 128k they would be most
    of the memory.
    """
    at_once = max(1, LOGITS_AT_ONCE // logits.shape[-1])
    if len(logits) <= at_once:
        return _losses(logits, targets, teacher_logits, temperature)
    teachers = teacher_logits.split(at_once) if teacher_logits is not None else [None] * -(-len(logits) // at_once)
    parts = [
        checkpoint(_losses, part, target, teacher, temperature, use_reentrant=False)
        for part, target, teacher in zip(logits.split(at_once), targets.split(at_once), teachers, strict=True)
    ]
    return torch.stack([part[0] for part in parts]).sum(), torch.stack([part[1] for part in parts]).sum()


def _losses(
    logits: Tensor, targets: Tensor, teacher_logits: Tensor | None, temperature: float
) -> tuple[Tensor, Tensor]:
    logits = logits.float()
    entropy = cross_entropy(logits, targets, reduction="sum")
    if teacher_logits is None:
        return entropy, entropy.new_zeros(())
    student, teacher = (log_softmax(scores.float() / temperature, -1) for scores in (logits, teacher_logits))
    return entropy, kl_div(student, teacher, reduction="sum", log_target=True)


class ScoredLogits(nn.Module):
    """A causal language model whose logits are computed only where a target counts.

    The trainer wraps (DDP, FSDP2, autocast) this module, so everything that reads parameters lies within its
    ``forward``.
    """

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model = model

    def forward(self, input_ids: Tensor, position_ids: Tensor, targets: Tensor) -> Tensor:
        """[rows, tokens] each -> logits [tokens that count, vocab].

        ``use_cache=False`` and no mask: only so does transformers see from the positions where a packed text begins.
        """
        hidden = self.model.model(input_ids=input_ids, position_ids=position_ids, use_cache=False).last_hidden_state
        logits: Tensor = self.model.lm_head(hidden[targets != IGNORED_TARGET])
        return logits


class TrainedModel(nn.Module):
    """The model in training with its losses: what is wrapped, so that gradients and parameters are in one place."""

    def __init__(self, model: Any, temperature: float = 1.0) -> None:
        super().__init__()
        self.scored = ScoredLogits(model)
        self.temperature = temperature

    @property
    def model(self) -> Any:
        return self.scored.model

    def forward(
        self, input_ids: Tensor, position_ids: Tensor, targets: Tensor, teacher_logits: Tensor | None = None
    ) -> Tensor:
        """[rows, tokens] each, teacher_logits [tokens that count, vocab] -> the sums of cross-entropy and divergence:
        [2], fp32."""
        logits = self.scored(input_ids, position_ids, targets)
        return torch.stack(token_losses(logits, targets[targets != IGNORED_TARGET], teacher_logits, self.temperature))
