"""The learning rate, the budget, and numbers of tokens in words."""

import pytest

from ladderize.adapt.options import AdaptOptions, parse_count
from ladderize.adapt.train.pace import Pace
from ladderize.errors import UserError

SIZES = {"hidden_size": 4096, "num_attention_heads": 32, "max_position_embeddings": 4096}


def pace_of(**options):
    return Pace.of(AdaptOptions(model="m", out="o", data=("hub:o/n:train",), **options), SIZES, 1)


def test_the_rate_rises_and_falls():
    pace = pace_of(lr=2.0, warmup_steps=3, max_steps=10)
    assert [pace.rate(step, 0.0) for step in range(5)] == [0.5, 1.0, 1.5, 2.0, 2.0]
    assert pace.rate(9, 0.5) == pytest.approx(1.0)
    assert pace.rate(9, 1.0) == pytest.approx(0.0)


@pytest.mark.parametrize(("left", "share"), [(0.15, 0.5), (7, 1), (0, 0.2)])
def test_the_peak_goes_with_the_root_of_what_an_alignment_left(left, share):
    """At least a fifth of it, and never more than all; the rise takes ten steps, or a fifth of a shorter training."""
    for steps, warmup in ((4, 0), (20, 4), (190, 10), (600, 30), (9000, 200)):
        usual = pace_of(max_steps=steps)
        aligned = usual.after_alignment(left)
        assert (aligned.lr, usual.lr) == (pytest.approx(2e-5 * share), pytest.approx(2e-5))
        assert (aligned.warmup_steps, usual.warmup_steps) == (warmup, min(200, steps // 20))


def test_budgets():
    tokens, steps = pace_of(max_tokens=100), pace_of(max_steps=10)
    assert (tokens.share(3, 25), steps.share(3, 25), steps.share(11, 0)) == (0.25, 0.3, 1.0)
    assert [parse_count(text) for text in ("3B", "20M", "1.5k", "7")] == [3_000_000_000, 20_000_000, 1500, 7]
    for text in ("", "3 tokens", "-3", "0", "0.2", "1e9", "1000000T", "9" * 5000):
        with pytest.raises(UserError, match="not a number of tokens"):
            parse_count(text)
