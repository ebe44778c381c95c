"""Cross-entropy and divergence of logits that lie in vocabulary-parallel parts: no rank ever holds all of them.

One all-gather of a few numbers of each token makes all ranks compute the same losses, bit for bit (Megatron-LM, arXiv
1909.08053, section 3). With Z_r = log sum exp of rank r's scores, Z = log sum exp of the Z_r, and v_r = exp(Z_r - Z)
this rank's share of the probability (w_r the teacher's), for a token with target y:

    log q(y) = log q_r(y) + Z_r - Z     on the rank r that has y
    KL       = sum_r w_r (KL_r + log w_r - log v_r)
"""

import math
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from ladderize.blocks import LOGITS_AT_ONCE
from ladderize.runtime.collectives.base import Collectives
from ladderize.runtime.training.batch import Batch

STATISTICS_BYTES = 32  # of a token, that each rank sends at most


class LossModule(nn.Module):
    """A model in training, whose pass returns its losses."""

    vocabulary: tuple[Collectives, int, int]  # the last arguments of ``vocab_parallel_losses``
    scored_logits: Callable[[Batch], Tensor]  # [tokens that count, own vocab]

    def forward(self, batch: Batch, teacher_logits: Tensor | None = None) -> Tensor:
        """Return the sums of cross-entropy and divergence of a pass: [2], fp32, equal on all ranks.
        teacher_logits: [tokens that count, own vocab]; None: those of the batch's answers, if it has any."""
        logits = self.scored_logits(batch)
        if batch.likeliest is not None and batch.answers is not None:
            teacher_logits = teacher_from_answers(logits, batch.likeliest, batch.answers, *self.vocabulary)
        return torch.stack(vocab_parallel_losses(logits, batch.scored_targets, teacher_logits, *self.vocabulary))


def vocab_parallel_losses(
    logits: Tensor,
    targets: Tensor,
    teacher_logits: Tensor | None,
    collectives: Collectives,
    vocab_start: int,
    vocab: int,
) -> tuple[Tensor, Tensor]:
    """Return the summed cross-entropy and KL(teacher || student) in nats, two fp32 scalars; the second is 0 without a
    teacher. They are equal on all ranks, and differentiable in ``logits``.

    logits, teacher_logits: [tokens, own_vocab], this rank's columns ``vocab_start`` and on; columns from ``vocab`` on
    are padding, which counts for nothing.
    targets: [tokens], in the whole vocabulary; a target that is not in it makes the cross-entropy NaN.

    One all-gather of [tokens, 2] float64 (4 with a teacher) is sent; without tokens nothing.
    """
    width = max(0, min(vocab - vocab_start, logits.shape[1]))
    owner = targets.clamp(0, vocab - 1)[:, None] // max(1, logits.shape[1])  # the rank that has the target
    if width < logits.shape[1]:  # the gradient of a slice is a copy
        logits = logits[:, :width]
    teacher = None if teacher_logits is None else teacher_logits[:, :width]
    column = targets - vocab_start
    here = (column >= 0) & (column < width)
    column = (column * here)[:, None]  # 0 where a target is another rank's
    with torch.no_grad():
        # of each token: log sum exp, log q of the target, and with a teacher its log sum exp and the divergence
        columns = 2 if teacher is None else 4
        statistics = torch.zeros((len(logits), columns), device=logits.device, dtype=torch.float64)
        statistics[:, ::2] = -math.inf  # of a rank that has nothing but padding
        for rows in _chunks(logits) if width else ():
            scores = logits[rows].float()
            logs = scores.log_softmax(-1)
            statistics[rows, 0] = _log_sum(scores)
            statistics[rows, 1] = logs.gather(1, column[rows])[:, 0].where(here[rows], 0)
            if teacher is not None:
                scores = teacher[rows].float()
                statistics[rows, 2] = _log_sum(scores)
                likely = scores.log_softmax(-1)
                statistics[rows, 3] = (likely.exp() * (likely - logs)).sum(-1)
        gathered = collectives.all_gather(statistics) if len(logits) else statistics
        sums, log_targets, *of_teacher = gathered.unflatten(-1, (-1, columns)).unbind(-1)
        log_shares = sums - sums.logsumexp(-1, keepdim=True)
        is_known = (targets >= 0) & (targets < vocab)
        log_target = log_targets.sum(-1) + log_shares.gather(1, owner)[:, 0]
        entropy = -log_target.where(is_known, math.nan).sum()
        divergence, shares = torch.zeros_like(entropy), [statistics[:, 0] - sums.logsumexp(-1)]
        if teacher is not None:
            sums, divergences = of_teacher
            teacher_shares = sums - sums.logsumexp(-1, keepdim=True)
            weighted = teacher_shares.exp() * (divergences + teacher_shares - log_shares)
            divergence = weighted.where(teacher_shares > -math.inf, 0).sum()  # 0 times infinite is 0 here
            shares.append(statistics[:, 2] - sums.logsumexp(-1))
    shares = [share.exp().float() for share in shares]
    return _WithGradient.apply(logits, (entropy.float(), divergence.float()), teacher, column, here, *shares)


@torch.no_grad()
def teacher_from_answers(
    logits: Tensor, likeliest: Tensor, answers: Tensor, collectives: Collectives, vocab_start: int, vocab: int
) -> Tensor:
    """Return logits of a teacher of whom only the likeliest tokens are known, fp32 [tokens, own_vocab without padding].

    The rest of its probability is shared out among all other tokens as the student does it. The divergence from this
    teacher is that of the known outcomes, with all other tokens as one more outcome, and so is its gradient: with p the
    teacher, q the student, K the known tokens, and r their complement,

        KL = sum over K of p_j log(p_j / q_j) + p_r log(p_r / q_r),
        dKL / ds_j = q_j - p_j in K, else q_j - p_r q_j / q_r.

    All ranks call it; one all-gather of [tokens, 1] float32 is sent. likeliest, answers: as in ``Batch``.
    """
    width = max(0, min(vocab - vocab_start, logits.shape[1]))
    outcomes = answers[:, :-1].float().log_softmax(-1)  # 16 bits have rounded them
    column = likeliest.long() - vocab_start
    column = column.where((column >= 0) & (column < width), width)  # other ranks' go to a column that nobody reads
    result = logits.new_full((len(logits), width + 1), -math.inf, dtype=torch.float32)
    result[:, :width] = logits[:, :width]
    result.scatter_(1, column, -math.inf)
    if len(logits):  # all ranks have the same tokens, so all come here or none
        rest = torch.cat([result[rows].logsumexp(-1, keepdim=True) for rows in _chunks(result)])
        result += outcomes[:, -1:] - collectives.all_gather(rest).logsumexp(-1, keepdim=True)
    return result.scatter_(1, column, outcomes[:, :-1])[:, :width]


class _WithGradient(torch.autograd.Function):
    """The losses, with the gradients of their sums: softmax(s) - one-hot(y), and softmax(s) - softmax(t)."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, losses: tuple[Tensor, Tensor], *saved: Tensor | None) -> Any:
        ctx.save_for_backward(logits, *saved)
        return losses

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, entropy_grad: Tensor, divergence_grad: Tensor) -> tuple[Tensor | None, ...]:
        logits, teacher, column, here, share, *teacher_share = ctx.saved_tensors
        grad = torch.empty_like(logits)
        both = entropy_grad if teacher is None else entropy_grad + divergence_grad
        for rows in _chunks(logits) if logits.shape[1] else ():
            result = logits[rows].float().softmax(-1).mul_((both * share[rows])[:, None])
            if teacher is not None:
                likely = teacher[rows].float().softmax(-1)
                result.sub_(likely.mul_((divergence_grad * teacher_share[0][rows])[:, None]))
            result.scatter_add_(1, column[rows], -entropy_grad * here[rows, None])
            grad[rows] = result
        return (grad, *[None] * (len(ctx.saved_tensors)))


def _log_sum(scores: Tensor) -> Tensor:
    """Return log sum exp of each row, fp64: in fp32 large scores would leave nothing of how ranks share a token."""
    top = scores.amax(-1, keepdim=True)
    return top[:, 0].double() + (scores - top).exp().sum(-1).double().log()


def _chunks(logits: Tensor) -> Iterator[slice]:
    """Return slices of the tokens whose fp32 copies are held at once."""
    at_once = max(1, LOGITS_AT_ONCE // max(1, logits.shape[1]))
    return (slice(start, start + at_once) for start in range(0, len(logits), at_once))
