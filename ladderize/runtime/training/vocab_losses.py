"""Cross-entropy and divergence of logits that lie in vocabulary-parallel parts: no rank ever holds all of them.

Both follow from a few sums over the vocabulary for each token (Megatron-LM, arXiv 1909.08053, section 3: the same idea
for the cross-entropy alone). Each rank takes them over its own columns, relative to its own maxima, and one all-gather
makes them known to all; every rank then computes the same losses from the same numbers, bit for bit. The backward pass
needs no message.

Of a token's student scores s (with target y) and teacher scores t:

    cross-entropy = log sum exp(s - m) - (s_y - m)                                  m = max s
    divergence    = D / Z - log Z + log sum exp(s - m)                              n = max t
        with Z = sum exp(t - n), D = sum exp(t - n) ((t - n) - (s - m))
"""

import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from ladderize.blocks import LOGITS_AT_ONCE
from ladderize.runtime.collectives.base import Collectives
from ladderize.runtime.training.batch import Batch

# Columns of a rank's statistics of one token.
STUDENT_MAX, STUDENT_SUM, TARGET, TEACHER_MAX, TEACHER_SUM, PRODUCT = range(6)
STATISTICS_BYTES = 24  # of a token, that each rank sends at most


class LossModule(nn.Module):
    """A model in training, whose pass returns its losses.

    vocabulary: the ranks that share it, and this one's part, as ``vocab_parallel_losses`` takes them.
    scored_logits: returns a batch's logits [tokens that count, own vocab].
    """

    vocabulary: tuple[Collectives, int, int]
    scored_logits: Callable[[Batch], Tensor]

    def forward(self, batch: Batch, teacher_logits: Tensor | None = None) -> Tensor:
        """Return the sums of cross-entropy and divergence of a pass: [2], fp32, equal on all ranks.

        teacher_logits: [tokens that count, own vocab]; None: those of the batch's answers, if it has any.
        """
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
    teacher.

    They are equal on all ranks, and differentiable in ``logits``.

    logits, teacher_logits: [tokens, own_vocab] of any float dtype, this rank's columns ``vocab_start`` and on; columns
    from ``vocab`` on are padding, which counts for nothing.
    targets: [tokens], in the whole vocabulary, equal on all ranks; a target that is not in it makes the cross-entropy
    NaN.

    One all-gather of [tokens, 3] float32 (6 with a teacher) is sent: not more bytes than a residual stream of these
    tokens has from a hidden size of 6 on (12 in 16 bits). Without tokens nothing is sent: all ranks of a group see the
    same targets. In fp32 there are never more than LOGITS_AT_ONCE numbers of the logits at once.
    """
    own = max(0, min(vocab - vocab_start, logits.shape[1]))
    place = targets - vocab_start
    here = (place >= 0) & (place < own)
    place = place * here  # 0 where a target is another rank's
    columns = 3 if teacher_logits is None else 6
    with torch.no_grad():
        statistics = logits.new_zeros((len(logits), columns), dtype=torch.float32)
        for part in _parts(logits):
            teacher = None if teacher_logits is None else teacher_logits[part, :own]
            _measure(statistics[part], logits[part, :own], place[part], here[part], teacher)
        if len(logits):  # all ranks have the same tokens, so all come here or none
            statistics = collectives.all_gather(statistics)
        known = (targets >= 0) & (targets < vocab)
        losses, scales = _combined(statistics.unflatten(-1, (-1, columns)).unbind(-1), known)
    entropy, divergence = _WithGradient.apply(logits, losses, own, teacher_logits, place, here, scales)
    return entropy, divergence


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

    Under tensor parallelism all ranks call it; one all-gather of [tokens, 1] float32 is sent.

    logits: the student's, as ``vocab_parallel_losses`` takes them.
    likeliest, answers: as in ``Batch``.
    """
    own = max(0, min(vocab - vocab_start, logits.shape[1]))
    outcomes = answers[:, :-1].float().log_softmax(-1)  # 16 bits have rounded them
    place = likeliest.long() - vocab_start
    place = place.where((place >= 0) & (place < own), own)  # what other ranks have goes to a column that nobody reads
    result = logits.new_full((len(logits), own + 1), -math.inf, dtype=torch.float32)
    result[:, :own] = logits[:, :own]
    result.scatter_(1, place, -math.inf)
    if len(logits):  # all ranks have the same tokens, so all come here or none
        rest = torch.cat([result[part].logsumexp(-1, keepdim=True) for part in _parts(result)])
        result += outcomes[:, -1:] - collectives.all_gather(rest).logsumexp(-1, keepdim=True)
    return result.scatter_(1, place, outcomes[:, :-1])[:, :own]


class _WithGradient(torch.autograd.Function):
    """The losses, with the gradients of their sums: softmax(s) - one-hot(y), and softmax(s) - softmax(t)."""

    @staticmethod
    def forward(
        ctx: Any, logits: Tensor, losses: tuple[Tensor, Tensor], own: int, *known: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        ctx.own = own
        ctx.save_for_backward(logits, *known)
        return losses

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, entropy_grad: Tensor, divergence_grad: Tensor) -> tuple[Tensor | None, ...]:
        logits, teacher_logits, place, here, scales = ctx.saved_tensors
        own, grad = ctx.own, torch.empty_like(logits)
        grad[:, own:] = 0
        for part in _parts(logits) if own else ():
            maximum, inverse, teacher_maximum, teacher_inverse = scales[part].unbind(-1)
            both = entropy_grad * inverse
            if teacher_logits is not None:
                both = both + divergence_grad * inverse
            result = (logits[part, :own].float() - maximum[:, None]).exp_().mul_(both[:, None])
            if teacher_logits is not None:
                teacher = (teacher_logits[part, :own].float() - teacher_maximum[:, None]).exp_()
                result.sub_(teacher.mul_((divergence_grad * teacher_inverse)[:, None]))
            column = place[part, None]
            result.scatter_(1, column, result.gather(1, column) - entropy_grad * here[part, None])
            grad[part, :own] = result
        return (grad, *[None] * 6)


def _parts(logits: Tensor) -> Iterator[slice]:
    """Return slices of the tokens whose fp32 copies are held at once."""
    at_once = max(1, LOGITS_AT_ONCE // max(1, logits.shape[1]))
    return (slice(start, start + at_once) for start in range(0, len(logits), at_once))


def _measure(statistics: Tensor, logits: Tensor, place: Tensor, here: Tensor, teacher_logits: Tensor | None) -> None:
    """Fill ``statistics`` [tokens, 3 or 6], which are 0, from this rank's real columns [tokens, own].

    The column TARGET is the target's score, 0 where it is another rank's.
    """
    if not logits.shape[1]:  # a rank that has nothing but padding
        statistics[:, STUDENT_MAX :: TEACHER_MAX - STUDENT_MAX] = -math.inf
        return
    scores = logits.float()
    statistics[:, STUDENT_MAX] = maximum = scores.amax(-1)
    statistics[:, TARGET] = scores.gather(1, place[:, None])[:, 0].where(here, 0)
    centred = scores - maximum[:, None]
    statistics[:, STUDENT_SUM] = centred.exp().sum(-1)
    if teacher_logits is None:
        return
    scores = teacher_logits.float()
    statistics[:, TEACHER_MAX] = maximum = scores.amax(-1)
    teacher_centred = scores - maximum[:, None]
    share = teacher_centred.exp()
    statistics[:, TEACHER_SUM] = share.sum(-1)
    statistics[:, PRODUCT] = teacher_centred.sub_(centred).mul_(share).sum(-1)


def _combined(ranks: Sequence[Tensor], known: Tensor) -> tuple[tuple[Tensor, Tensor], Tensor]:
    """Return the two losses, and the factors that the gradients need, [tokens, 4].

    The factors are the student's maximum and 1 / its sum, the teacher's maximum and 1 / its sum.

    ranks: the statistics of all ranks, by column, [tokens, ranks] each.
    """
    maximum = ranks[STUDENT_MAX].amax(-1, keepdim=True)
    behind = ranks[STUDENT_MAX] - maximum
    total = (behind.exp() * ranks[STUDENT_SUM]).sum(-1)
    entropy = total.log() - (ranks[TARGET].sum(-1) - maximum[:, 0])
    entropy = entropy.where(known, math.nan).sum()
    if len(ranks) == TEACHER_MAX:  # no teacher
        unused = torch.zeros_like(total)
        return (entropy, entropy.new_zeros(())), torch.stack((maximum[:, 0], 1 / total, unused, unused), -1)
    teacher_maximum = ranks[TEACHER_MAX].amax(-1, keepdim=True)
    teacher_behind = ranks[TEACHER_MAX] - teacher_maximum
    share = teacher_behind.exp()
    mass = share * ranks[TEACHER_SUM]
    teacher_total = mass.sum(-1)
    # a rank's product was taken relative to its own maxima; where it has no mass, 0 times an infinite shift is 0
    shift = mass * (teacher_behind - behind)
    product = (share * ranks[PRODUCT] + shift.where(mass != 0, 0)).sum(-1)
    divergence = (product / teacher_total - teacher_total.log() + total.log()).sum()
    return (entropy, divergence), torch.stack((maximum[:, 0], 1 / total, teacher_maximum[:, 0], 1 / teacher_total), -1)
