"""What the losses and the learning rates are."""

import pytest
import torch

from ladderize.adapt.train.options import Budget, Objective, RateSchedule, parse_count
from ladderize.errors import UserError
from ladderize.runtime.collectives.base import Collectives
from ladderize.runtime.training import vocab_losses


def test_losses_are_their_definitions(monkeypatch):
    logits, teacher = (torch.randn(11, 7, dtype=torch.float64, requires_grad=True) for _ in range(2))
    targets = torch.randint(7, (11,))
    entropy = sum(-torch.log(row.exp() / row.exp().sum())[target] for row, target in zip(logits, targets, strict=True))
    divergence = 0
    for own, dense in zip(logits, teacher, strict=True):
        p, q = dense.softmax(0), own.softmax(0)
        divergence += (p * (p / q).log()).sum()
    expected = torch.autograd.grad(0.3 * entropy + 0.7 * divergence, logits)[0]
    for at_once in (1 << 26, 3 * 7):  # whole, and three tokens at a time
        monkeypatch.setattr(vocab_losses, "LOGITS_AT_ONCE", at_once)
        parts = vocab_losses.vocab_parallel_losses(logits, targets, teacher.detach(), Collectives(), 0, 7)
        torch.testing.assert_close(parts[0].double(), entropy, rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(parts[1].double(), divergence, rtol=1e-5, atol=1e-5)
        loss = Objective(0.7).total(*parts, parts[0].new_zeros(()))
        gradient = torch.autograd.grad(loss, logits)[0]
        torch.testing.assert_close(gradient, expected, rtol=1e-4, atol=1e-5)
    assert vocab_losses.vocab_parallel_losses(logits, targets, None, Collectives(), 0, 7)[1] == 0


def test_schedules():
    cosine = RateSchedule("cosine", 2.0, warmup_steps=3)
    assert [cosine.rate(step, 0.0) for step in range(5)] == [0.5, 1.0, 1.5, 2.0, 2.0]
    assert cosine.rate(9, 0.5) == pytest.approx(1.0)
    assert cosine.rate(9, 1.0) == pytest.approx(0.0)
    wsd = RateSchedule("wsd", 1.0)
    assert [wsd.rate(0, share) for share in (0.0, 0.5, 0.8)] == [1.0, 1.0, pytest.approx(1.0)]
    assert wsd.rate(0, 0.9) == pytest.approx(0.5)
    assert RateSchedule("constant", 1.0).rate(5, 0.99) == 1.0
    assert Budget(tokens=100).share(3, 25) == 0.25
    assert Budget(steps=10).share(3, 25) == 0.3
    assert Budget(tokens=100).about_steps(30) == 4
    assert [parse_count(text, option="x") for text in ("3B", "20M", "1.5k", "7")] == [
        3_000_000_000,
        20_000_000,
        1500,
        7,
    ]
    for text in ("", "3 tokens", "-3", "0", "1e9"):
        with pytest.raises(UserError, match="not a number of tokens"):
            parse_count(text, option="--max-tokens")
