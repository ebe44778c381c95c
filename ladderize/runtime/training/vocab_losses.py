"""Cross-entropy and divergence of logits that lie in vocabulary-parallel parts: no rank ever holds all of them.

Both follow from a few sums over the vocabulary for each token (Megatron-LM, arXiv 1909.08053, section 3: the same idea
for the cross-entropy alone). Each rank takes them over its own columns, relative to its own maxima, and one all-gather
makes them known to all; every rank then computes the same losses from the same numbers, bit for bit. The backward pass
needs no message.

Of a token's student scores s (with target y) and teacher scores t at temperature T:

    cross-entropy = log sum exp(s - m) - (s_y - m)                                  m = max s
    divergence    = D / Z - log Z + log sum exp((s - m) / T)                        n = max t
        with Z = sum exp((t - n) / T), D = sum exp((t - n) / T) ((t - n) - (s - m)) / T
"""

import math
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from ladderize.blocks import LOGITS_AT_ONCE
from ladderize.runtime.collectives.base import Collectives

# Columns of a rank's statistics of one token.
STUDENT_MAX, STUDENT_SUM, TARGET, TEACHER_MAX, TEACHER_SUM, PRODUCT, WARM_SUM = range(7)


def vocab_parallel_losses(
    logits: Tensor,
    targets: Tensor,
    teacher_logits: Tensor | None,
    temperature: float,
    collectives: Collectives,
    vocab_start: int,
    vocab: int,
) -> tuple[Tensor, Tensor]:
    """Return the summed cross-entropy and KL(teacher || student) in nats, two fp32 scalars; the second is 0 without a
    teacher.

    They are equal on all ranks, and differentiable in ``logits``.

    The meaning is that of ``adapt.train.student.token_losses`` on the whole vocabulary.

    logits, teacher_logits: [tokens, own_vocab] of any float dtype, this rank's columns ``vocab_start`` and on; columns
    from ``vocab`` on are padding, which counts for nothing.
    targets: [tokens], in the whole vocabulary, equal on all ranks; a target that is not in it makes the cross-entropy
    NaN.

    One all-gather of [tokens, 3] float32 (7 with a teacher) is sent: not more bytes than a residual stream of these
    tokens has from a hidden size of 7 on (14 in 16 bits). Without tokens nothing is sent: all ranks of a group see the
    same targets. In fp32 there are never more than LOGITS_AT_ONCE numbers of the logits at once.
    """
    own = max(0, min(vocab - vocab_start, logits.shape[1]))
    place = targets - vocab_start
    here = (place >= 0) & (place < own)
    place = place * here  # 0 where a target is another rank's
    with_teacher = teacher_logits is not None
    with torch.no_grad():
        statistics = logits.new_empty((len(logits), 7 if with_teacher else 3), dtype=torch.float32)
        for part in _parts(logits):
            teacher = None if teacher_logits is None else teacher_logits[part, :own]
            _measure(statistics[part], logits[part, :own], place[part], here[part], teacher, temperature)
        if len(logits):  # all ranks have the same tokens, so all come here or none
            statistics = collectives.all_gather(statistics)
        known = (targets >= 0) & (targets < vocab)
        losses, scales = _combined(statistics, known, temperature, with_teacher=with_teacher)
    entropy, divergence = _WithGradient.apply(logits, losses, own, temperature, teacher_logits, place, here, scales)
    return entropy, divergence


class _WithGradient(torch.autograd.Function):
    """The losses, with the gradients of their sums: softmax(s) - one-hot(y), and (softmax(s / T) - softmax(t / T)) /
    T."""

    @staticmethod
    def forward(
        ctx: Any, logits: Tensor, losses: tuple[Tensor, Tensor], own: int, temperature: float, *known: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        ctx.own, ctx.temperature = own, temperature
        ctx.save_for_backward(logits, *known)
        return losses

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, entropy_grad: Tensor, divergence_grad: Tensor) -> tuple[Tensor | None, ...]:
        logits, teacher_logits, place, here, scales = ctx.saved_tensors
        own, temperature = ctx.own, ctx.temperature
        grad = torch.empty_like(logits)
        grad[:, own:] = 0
        if own:
            for part in _parts(logits):
                maximum, inverse, warm_inverse, teacher_maximum, teacher_inverse = scales[part].unbind(-1)
                weight = divergence_grad / temperature
                centred = logits[part, :own].float() - maximum[:, None]
                warm = None if teacher_logits is None else weight * warm_inverse
                if warm is not None and temperature == 1:
                    result = centred.exp_().mul_((entropy_grad * inverse + warm)[:, None])
                else:
                    result = centred.exp().mul_((entropy_grad * inverse)[:, None])
                    if warm is not None:
                        result.add_(centred.div_(temperature).exp_().mul_(warm[:, None]))
                if teacher_logits is not None:
                    teacher = (teacher_logits[part, :own].float() - teacher_maximum[:, None]).div_(temperature).exp_()
                    result.sub_(teacher.mul_((weight * teacher_inverse)[:, None]))
                column = place[part, None]
                result.scatter_(1, column, result.gather(1, column) - entropy_grad * here[part, None])
                grad[part, :own] = result
        return (grad, *[None] * 7)


def _parts(logits: Tensor) -> Iterator[slice]:
    """Return slices of the tokens whose fp32 copies are held at once."""
    at_once = max(1, LOGITS_AT_ONCE // max(1, logits.shape[1]))
    return (slice(start, start + at_once) for start in range(0, len(logits), at_once))


def _measure(
    statistics: Tensor,
    logits: Tensor,
    place: Tensor,
    here: Tensor,
    teacher_logits: Tensor | None,
    temperature: float,
) -> None:
    """Fill ``statistics`` [tokens, 3 or 7] from this rank's real columns [tokens, own].

    The column TARGET is the target's score, 0 where it is another rank's.
    """
    statistics.zero_()
    if not logits.shape[1]:  # a rank that has nothing but padding
        statistics[:, STUDENT_MAX] = -math.inf
        if teacher_logits is not None:
            statistics[:, TEACHER_MAX] = -math.inf
        return
    scores = logits.float()
    maximum = scores.amax(-1)
    statistics[:, STUDENT_MAX] = maximum
    statistics[:, TARGET] = scores.gather(1, place[:, None])[:, 0].where(here, 0)
    centred = scores - maximum[:, None]
    statistics[:, STUDENT_SUM] = centred.exp().sum(-1)
    if teacher_logits is None:
        return
    scores = teacher_logits.float()
    maximum = scores.amax(-1)
    teacher_centred = scores - maximum[:, None]
    share = (teacher_centred / temperature).exp_()
    statistics[:, WARM_SUM] = (centred / temperature).exp_().sum(-1)
    statistics[:, TEACHER_MAX] = maximum
    statistics[:, TEACHER_SUM] = share.sum(-1)
    statistics[:, PRODUCT] = teacher_centred.sub_(centred).mul_(share).sum(-1) / temperature


def _combined(
    statistics: Tensor, known: Tensor, temperature: float, *, with_teacher: bool
) -> tuple[tuple[Tensor, Tensor], Tensor]:
    """Return the two losses, and the factors that the gradients need, [tokens, 5].

    The factors are the student's maximum, 1 / its sums at temperatures 1 and T, the teacher's maximum, and 1 / its sum.

    statistics: of all ranks, [tokens, ranks * (3 or 7)].
    """
    ranks = statistics.unflatten(-1, (-1, 7 if with_teacher else 3)).unbind(-1)
    own_maximum = ranks[STUDENT_MAX]
    maximum = own_maximum.amax(-1, keepdim=True)
    behind = own_maximum - maximum
    total = (behind.exp() * ranks[STUDENT_SUM]).sum(-1)
    entropy = total.log() - (ranks[TARGET].sum(-1) - maximum[:, 0])
    entropy = entropy.where(known, math.nan).sum()
    if not with_teacher:
        unused = torch.zeros_like(total)
        return (entropy, entropy.new_zeros(())), torch.stack((maximum[:, 0], 1 / total, unused, unused, unused), -1)
    warm_total = ((behind / temperature).exp() * ranks[WARM_SUM]).sum(-1)
    teacher_maximum = ranks[TEACHER_MAX].amax(-1, keepdim=True)
    teacher_behind = ranks[TEACHER_MAX] - teacher_maximum
    share = (teacher_behind / temperature).exp()
    mass = share * ranks[TEACHER_SUM]
    teacher_total = mass.sum(-1)
    # a rank's product was taken relative to its own maxima; where it has no mass, 0 times an infinite shift is 0
    shift = mass * (teacher_behind - behind) / temperature
    product = (share * ranks[PRODUCT] + shift.where(mass != 0, 0)).sum(-1)
    divergence = (product / teacher_total - teacher_total.log() + warm_total.log()).sum()
    scales = (maximum[:, 0], 1 / total, 1 / warm_total, teacher_maximum[:, 0], 1 / teacher_total)
    return (entropy, divergence), torch.stack(scales, -1)
