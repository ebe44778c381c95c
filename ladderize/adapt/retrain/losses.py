"""Cross-entropy on the text, the divergence from the dense teacher's predictions (Hinton et al., arXiv 1503.02531), and
how far sub-modules are from the teacher's.

The first two are sums over the tokens that count, the third over all; the trainer divides by how many those are in the
whole step, on all ranks.
"""

import math
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, kl_div, log_softmax
from torch.utils.checkpoint import checkpoint

from ladderize.adapt.methods import FLASH
from ladderize.adapt.retrain.metrics import loss_label
from ladderize.blocks import LOGITS_AT_ONCE
from ladderize.errors import UsageError
from ladderize.files.records import Record
from ladderize.runtime.training.outputs import SubModuleOutputs, hidden_error

Amount = TypeVar("Amount", Tensor, float)
MOST_TEMPERATURE = 100.0


@dataclass(frozen=True)
class Objective(Record):
    """loss = (1 - w) * cross-entropy + w * temperature^2 * KL(teacher || student) + hidden_weight * hidden error, w
    being distill_weight. Without a weight above 0 there is no teacher.

    The hidden error is the mean squared error of what attention and MLP of each converted layer add to the residual
    stream, relative to what the teacher's add (runtime/training/outputs.py).
    """

    distill_weight: float = 0.0
    temperature: float = 1.0
    hidden_weight: float = 0.0

    @property
    def label(self) -> str:
        """What the loss is, in words."""
        return loss_label(self.distill_weight, self.hidden_weight)

    @property
    def has_teacher(self) -> bool:
        return bool(self.distill_weight or self.hidden_weight)

    def check(self) -> None:
        """Raise UsageError for impossible weights."""
        if not (math.isfinite(self.hidden_weight) and self.hidden_weight >= 0):
            raise UsageError(f"--hidden-weight must be a number of at least 0, not {self.hidden_weight:g}")
        if not 0 < self.temperature <= MOST_TEMPERATURE:
            raise UsageError(
                f"--temperature must be above 0 and at most {MOST_TEMPERATURE:g}, not {self.temperature:g}"
            )

    def total(self, cross_entropy: Amount, divergence: Amount, hidden: Amount) -> Amount:
        """Of three means the one to minimise. The square keeps the gradient's scale at every temperature."""
        loss = cross_entropy
        if self.distill_weight:
            loss = (1 - self.distill_weight) * cross_entropy + self.distill_weight * self.temperature**2 * divergence
        return loss + self.hidden_weight * hidden if self.hidden_weight else loss


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

    def forward(
        self, input_ids: Tensor, position_ids: Tensor, targets: Tensor, outputs: SubModuleOutputs | None = None
    ) -> Tensor:
        """[rows, tokens] each -> logits [tokens that count, vocab]. outputs: is given what the sub-modules add to the
        stream, by layers that are ``CollectingLayer``.

        ``use_cache=False`` and no mask: only so does transformers see from the positions where a packed text begins.
        """
        rows = {"input_ids": input_ids, "position_ids": position_ids}
        if self.model.config._attn_implementation == FLASH:  # which keeps packed texts apart in a single row only
            rows = {name: tensor.reshape(1, -1) for name, tensor in rows.items()}
        more = {} if outputs is None else {"sub_module_outputs": outputs}
        hidden = self.model.model(**rows, use_cache=False, **more).last_hidden_state
        logits: Tensor = self.model.lm_head(hidden.view(*targets.shape, -1)[targets >= 0])
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
        self,
        input_ids: Tensor,
        position_ids: Tensor,
        targets: Tensor,
        teacher_logits: Tensor | None = None,
        teacher_outputs: SubModuleOutputs | None = None,
    ) -> Tensor:
        """[rows, tokens] each, teacher_logits [tokens that count, vocab] -> the sums of cross-entropy, divergence and
        hidden error: [3], fp32."""
        outputs = None if teacher_outputs is None else teacher_outputs.again()
        logits = self.scored(input_ids, position_ids, targets, outputs)
        sums = token_losses(logits, targets[targets >= 0], teacher_logits, self.temperature)
        apart = sums[0].new_zeros(())
        if outputs is not None and teacher_outputs is not None:
            apart = hidden_error(outputs, teacher_outputs)
        return torch.stack((*sums, apart))
