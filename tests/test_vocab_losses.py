"""Losses over a vocabulary that several ranks share, against the whole logits in one place; the ranks are threads."""

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch.nn.functional import cross_entropy, kl_div, log_softmax

from ladderize.adapt.train import teacher_cache
from ladderize.runtime.collectives.base import Collectives
from ladderize.runtime.training import vocab_losses
from ladderize.runtime.training.vocab_losses import teacher_from_answers, vocab_parallel_losses
from tests.warm import PATIENCE


class Meeting:
    def __init__(self, ranks):
        self.barrier, self.messages = threading.Barrier(ranks, timeout=PATIENCE), [None] * ranks


class Threads(Collectives):
    """A rank of a group whose ranks are threads; it notes the bytes of what it sends."""

    def __init__(self, meeting, rank):
        super().__init__(len(meeting.messages))
        self.meeting, self.rank, self.sent = meeting, rank, []

    def all_gather(self, x):
        self.sent.append(x.nbytes)
        self.meeting.messages[self.rank] = x.detach().clone()
        self.meeting.barrier.wait()
        gathered = torch.cat(self.meeting.messages, -1)
        self.meeting.barrier.wait()
        return gathered


def draw(low, high):
    return int(torch.randint(low, high, ()))


def on_ranks(ranks, own, vocab, logits, targets, teacher, weights):
    """Each rank's two losses and its gradient of their weighted sum; what each sent. ``teacher`` may be a function."""
    meeting = Meeting(ranks)

    def pad(whole, rank):  # what padding holds must not matter
        padded = torch.full((len(whole), ranks * own), 3e4, dtype=whole.dtype)
        padded[:, :vocab] = whole
        return padded[:, rank * own : (rank + 1) * own].clone()

    def work(rank):
        part = pad(logits, rank).requires_grad_()
        collectives = Threads(meeting, rank)
        own_teacher = pad(teacher, rank) if isinstance(teacher, torch.Tensor) else teacher
        if callable(teacher):
            own_teacher = teacher(part.detach(), collectives, rank * own)
        losses = vocab_parallel_losses(part, targets, own_teacher, collectives, rank * own, vocab)
        (weights[0] * losses[0] + weights[1] * losses[1]).backward()
        return [loss.detach() for loss in losses], part.grad, collectives.sent

    with ThreadPoolExecutor(ranks) as pool:
        results = list(pool.map(work, range(ranks)))
    losses, grads, sent = zip(*results, strict=True)
    bits = [torch.stack(own).view(torch.int32) for own in losses]
    assert all(torch.equal(other, bits[0]) for other in bits)
    grads = torch.cat(grads, -1)
    assert not grads[:, vocab:].any()
    return losses[0], grads[:, :vocab], sent


def expected(logits, targets, teacher, weights):
    """In fp64, with the whole vocabulary."""
    logits = logits.detach().double().requires_grad_()
    entropy = cross_entropy(logits, targets, reduction="sum")
    divergence = entropy.new_zeros(())
    if teacher is not None:
        student, dense = (log_softmax(scores.double(), -1) for scores in (logits, teacher))
        divergence = kl_div(student, dense, reduction="sum", log_target=True)
    (weights[0] * entropy + weights[1] * divergence).backward()
    return (entropy.detach(), divergence.detach()), logits.grad


@pytest.mark.parametrize("kind", ["plain", "in parts", "ranks of padding", "large", "bfloat16"])
@pytest.mark.parametrize("with_teacher", [True, False])
@pytest.mark.parametrize("ranks", [1, 4])
def test_losses_and_gradients_are_those_of_the_whole_vocabulary(ranks, with_teacher, kind, monkeypatch):
    """In parts: of the tokens. Large: one rank's scores lie far above the others', and the teacher's on another."""
    vocab, tokens, weights = draw(20, 150), draw(1, 40), torch.rand(2)
    own = -(-vocab // ranks) + draw(0, 3)
    if kind == "in parts":
        monkeypatch.setattr(vocab_losses, "LOGITS_AT_ONCE", 100)
    if kind == "ranks of padding":  # of 4 ranks: 2, 2, 1 and 0 columns
        vocab, own = 5, 5 if ranks == 1 else 2
    logits, teacher = torch.randn(2, tokens, vocab) * (1e3 if kind == "large" else 4)
    if kind == "large":
        logits[:, : vocab // 4] += 2e4
        teacher[:, -vocab // 4 :] += 3e4
    if kind == "bfloat16":
        logits, teacher = logits.bfloat16(), teacher.bfloat16()
    problem = (logits, torch.randint(vocab, (tokens,)), teacher if with_teacher else None, weights)
    losses, grad, sent = on_ranks(ranks, own, vocab, *problem)
    right, right_grad = expected(*problem)
    near = {"rtol": 1e-5, "atol": 1e-3 if kind == "large" else 1e-5}
    torch.testing.assert_close(torch.stack(losses).double(), torch.stack(right), **near)
    rtol, atol = {"large": (1e-3, 1e-3), "bfloat16": (torch.finfo(torch.bfloat16).eps, 1e-6)}.get(kind, (2e-5, 2e-6))
    torch.testing.assert_close(grad.double(), right_grad, rtol=rtol, atol=atol)
    assert grad.dtype == logits.dtype
    assert all(sizes == [tokens * (4 if with_teacher else 2) * 8] for sizes in sent)  # one message, and a small one


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("ranks", [1, 4])
def test_kept_answers_teach_their_outcomes_and_all_others_as_one(ranks, dtype, monkeypatch):
    """By definition in fp64, from the answers as they are kept. Of 4 ranks one has only padding."""
    kept, vocab, tokens, own, weights = draw(1, 9), 40, draw(1, 30), 40 if ranks == 1 else 15, torch.rand(2)
    monkeypatch.setattr(teacher_cache, "KEPT", kept)
    logits, teacher = (torch.randn(2, tokens, vocab) * 3).to(dtype)
    teacher[:, 15:30] -= 20  # one of 4 ranks has no likely token
    targets = torch.randint(vocab, (tokens,))
    likeliest, answers = teacher_cache.answer(teacher, targets)
    top = teacher.double().softmax(-1).topk(kept, -1)
    assert torch.equal(teacher.gather(1, likeliest.long()), teacher.gather(1, top.indices))
    right = cross_entropy(teacher.double(), targets, reduction="none")
    torch.testing.assert_close(-answers[:, -1].double(), right, rtol=2e-3, atol=1e-5)
    rest = 1 - top.values.sum(-1, keepdim=True)
    shares = torch.cat([top.values, rest], -1)
    torch.testing.assert_close(answers[:, :-1].double().exp(), shares, rtol=2e-2, atol=1e-6)

    student = logits.double().requires_grad_()
    known = student.softmax(-1).gather(1, likeliest.long())
    outcomes = torch.cat([known, 1 - known.sum(-1, keepdim=True)], -1).log()
    entropy = cross_entropy(student, targets, reduction="sum")
    divergence = kl_div(outcomes, answers[:, :-1].double().log_softmax(-1), reduction="sum", log_target=True)
    (weights[0] * entropy + weights[1] * divergence).backward()

    def taught(part, collectives, start):
        return teacher_from_answers(part, likeliest, answers, collectives, start, vocab)

    losses, grad, _ = on_ranks(ranks, own, vocab, logits, targets, taught, weights)
    right = torch.stack([entropy, divergence]).detach()
    torch.testing.assert_close(torch.stack(losses).double(), right, rtol=1e-4, atol=1e-4)
    near = {"rtol": 1e-3, "atol": 1e-5} if dtype == torch.float32 else {"rtol": 1e-2, "atol": 1e-4}
    torch.testing.assert_close(grad.double(), student.grad, **near)


@pytest.mark.parametrize("ranks", [1, 2])
def test_without_tokens_the_sums_are_0_and_have_a_graph(ranks):
    empty, targets = torch.empty(0, 20), torch.empty(0, dtype=torch.long)
    losses, grad, sent = on_ranks(ranks, 20 // ranks, 20, empty, targets, empty, torch.ones(2))
    assert losses == [torch.tensor(0.0)] * 2
    assert grad.shape == (0, 20)
    assert not any(sent)


def test_nan_and_unknown_targets_show():
    logits, targets = torch.randn(4, 20), torch.randint(20, (4,))
    for bad in (20, -1, -100):
        wrong = targets.clone()
        wrong[2] = bad
        assert vocab_parallel_losses(logits, wrong, None, Collectives(), 0, 20)[0].isnan()
    logits[1, 3] = torch.nan
    losses, _, _ = on_ranks(2, 10, 20, logits, targets, torch.randn(4, 20), torch.ones(2))
    assert losses[0].isnan()
    assert losses[1].isnan()
