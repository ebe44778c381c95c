"""The outputs of sub-modules, kept while a model runs, and their distance between a student and its teacher.

An output is what a sub-module adds to the residual stream: its product summed over the ranks, with its bias. The
tensors belong to the graph of the pass, and all ranks have them alike, so that an error of them counts once.
"""

from collections.abc import Callable, Collection

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from ladderize.runtime.collectives.base import Collectives
from ladderize.runtime.collectives.differentiable import PendingSum, ShareOfGradient
from ladderize.runtime.step import join_parts
from ladderize.runtime.training.batch import Batch
from ladderize.runtime.training.vocab_losses import teacher_from_answers, vocab_parallel_losses


class SubModuleOutputs:
    """The outputs of sub-modules in one forward pass.

    layers: the layers that are compared.
    real: bool [rows, tokens], False for padding.
    kept: the output [rows, tokens, hidden] by (layer, sub-module), in the parts in which a schedule computes the pass.
    """

    def __init__(self, layers: Collection[int], real: Tensor) -> None:
        self.layers, self.real = frozenset(layers), real
        self.kept: dict[tuple[int, str], list[Tensor]] = {}

    def of(self, layer: int) -> "LayerOutputs | None":
        """Return the place for one layer's outputs in one walk; None if they are not compared."""
        return LayerOutputs(self, layer) if layer in self.layers else None

    def again(self) -> "SubModuleOutputs":
        """Return empty places for another model's pass over the same tokens."""
        return SubModuleOutputs(self.layers, self.real)

    def add(self, layer: int, sub_module: str, output: Tensor) -> None:
        """Add a part of an output. Parts come in their order, since walks take turns."""
        self.kept.setdefault((layer, sub_module), []).append(output)


class LayerOutputs:
    """The outputs of one layer in one walk.

    Under tensor parallelism the sum of a dropped attention takes a message of its own, which nothing else needs. The
    MLP's output is the sum of both less that one.
    """

    def __init__(self, outputs: SubModuleOutputs, layer: int) -> None:
        self.outputs, self.layer = outputs, layer
        self.dropped: PendingSum | None = None
        self.bias: Tensor | None = None

    def attention(self, output: Tensor) -> None:
        self.outputs.add(self.layer, "attention", output)

    def mlp(self, output: Tensor) -> None:
        if self.dropped is not None:
            partials, _ = self.dropped.wait()
            self.attention(partials if self.bias is None else partials + self.bias)
            output = output - partials
        self.outputs.add(self.layer, "mlp", output)

    def send_dropped(self, collectives: Collectives, partials: list[Tensor], bias: Tensor | None) -> None:
        """Send the sum of a dropped attention.

        Call it once the MLP's sum is sent: sums are waited for in the order in which they are sent.

        partials: of this rank's virtual ranks.
        bias: o_proj's; each rank knows a part of its gradient.
        """
        own = torch.stack(partials).sum(0)  # new memory: a message belongs to the backend, and the MLP reads these
        self.dropped = PendingSum(collectives, None, None, own)
        self.bias = None if bias is None else ShareOfGradient.apply(bias, 1 / collectives.ranks)


class LossModule(nn.Module):
    """A model in training, whose pass returns its losses.

    vocabulary: the ranks that share it, and this one's part, as ``vocab_parallel_losses`` takes them.
    scored_logits: returns a batch's logits [tokens that count, own vocab]; ``outputs`` receive what sub-modules add.
    """

    vocabulary: tuple[Collectives, int, int]
    scored_logits: Callable[..., Tensor]

    def forward(
        self,
        batch: Batch,
        teacher_logits: Tensor | None = None,
        teacher_outputs: SubModuleOutputs | None = None,
    ) -> Tensor:
        """Return the sums of cross-entropy, divergence and hidden error of a pass: [3], fp32, equal on all ranks.

        teacher_logits: [tokens that count, own vocab]; None: those of the batch's answers, if it has any.
        """
        outputs = None if teacher_outputs is None else teacher_outputs.again()
        logits = self.scored_logits(batch, outputs)
        if batch.likeliest is not None and batch.answers is not None:
            teacher_logits = teacher_from_answers(logits, batch.likeliest, batch.answers, *self.vocabulary)
        sums = vocab_parallel_losses(logits, batch.scored_targets, teacher_logits, *self.vocabulary)
        apart = sums[0].new_zeros(())
        if outputs is not None and teacher_outputs is not None:
            apart = hidden_error(outputs, teacher_outputs)
        return torch.stack((*sums, apart))


def hidden_error(student: SubModuleOutputs, teacher: SubModuleOutputs) -> Tensor:
    """Return the distance of the student's outputs from the teacher's: a scalar, fp32, differentiable in the student's.

    A sub-module's error in a row is the mean square of the difference over that of the teacher's output, on real
    tokens. The result is the mean over the sub-modules, summed over the rows with their numbers of real tokens as
    weights. So, divided by the tokens of a step, it does not depend on the cut into micro-batches.

    Where the teacher adds nothing, as in new blocks of an expanded model, the error is 0. The fp32 copies are made anew
    for the backward pass instead of kept.
    """
    real = teacher.real
    errors = []
    for place, others in teacher.kept.items():
        pairs = list(zip(student.kept[place], others, strict=True))
        distance = join_parts([checkpoint(_squares, *pair, use_reentrant=False) for pair in pairs], len(real))
        size = join_parts([other.float().square().sum(-1) for other in others], len(real))
        distance, size = ((squares * real).sum(-1) for squares in (distance, size))
        relative = distance / size.clamp_min(torch.finfo(size.dtype).tiny)
        errors.append(torch.where(size > 0, relative, 0))
    return (torch.stack(errors).mean(0) * real.sum(-1)).sum()


def _squares(one: Tensor, other: Tensor) -> Tensor:
    """Return the summed squares [...] of the difference of two tensors [..., hidden]."""
    return (one.float() - other.float()).square().sum(-1)
