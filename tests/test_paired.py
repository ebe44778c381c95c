"""Paired statistics: intervals that cover, McNemar's test, non-inferiority."""

import math

import numpy as np
import pytest
import scipy.stats

from ladderize.eval import comparison
from ladderize.eval.comparison import Estimate, bootstrapped, estimate_mean, least_samples, verdict_of
from tests.helpers import fresh_rng

REPEATS = 400  # simulated evaluations for a coverage


@pytest.fixture(autouse=True)
def _few_resamples(monkeypatch):
    monkeypatch.setattr(comparison, "BOOTSTRAP_RESAMPLES", 999)


def answers(rng: np.random.Generator, samples: int, worse: float, better: float) -> np.ndarray:
    """Differences of 0/1 answers, of which some changed."""
    return rng.choice([-1.0, 0.0, 1.0], samples, p=[worse, 1 - worse - better, better])


def even(samples: int) -> list[float]:
    return [1 / samples] * samples


# ---- the interval ----


@pytest.mark.parametrize(("samples", "worse", "better"), [(50, 0.02, 0.02), (100, 0.3, 0.1)])
def test_the_interval_of_answers_that_changed_covers(samples, worse, better):
    """Each end aims at missing in 2.5 % of evaluations; of 400, five standard errors are 4 %."""
    rng = fresh_rng()
    estimates = [estimate_mean([answers(rng, samples, worse, better)]) for _ in range(REPEATS)]
    true = better - worse
    assert sum(one.low > true for one in estimates) / REPEATS < 0.07
    assert sum(one.high < true for one in estimates) / REPEATS < 0.07
    normal = 2 * 1.96 * math.sqrt((worse + better - true**2) / samples)
    assert np.mean([one.high - one.low for one in estimates]) < 1.2 * normal + 6 / samples


@pytest.mark.parametrize("samples", [370, 500, 600, 1000])
def test_a_lost_margin_is_rarely_shown(samples, monkeypatch):
    """A model that loses a margin of 1 point, and wins nothing, is "shown" to lose less in 2 to 7 % of evaluations: few
    answers change, so the interval's end moves in large steps. The chance is a sum over how many answers were lost."""
    monkeypatch.setattr(comparison, "BOOTSTRAP_RESAMPLES", 9999)
    chance = 0.0
    for lost in range(samples // 100):
        estimate = estimate_mean([np.repeat([-1.0, 0.0], [lost, samples - lost])])
        if verdict_of(estimate, even(samples), 1.0)[0] == "shown":
            chance += float(scipy.stats.binom.pmf(lost, samples, 0.01))
    assert 0.01 < chance < 0.07


@pytest.mark.parametrize("samples", [2, 20, 300])
def test_no_change_at_all_does_not_mean_that_there_is_none(samples):
    """The exact bound at 2.5 % is that of Clopper and Pearson; this one is within a third of it."""
    estimate = estimate_mean([np.zeros(samples)])
    exact = scipy.stats.binomtest(0, samples).proportion_ci(0.95).high
    assert 0.6 * exact < estimate.high < 1.35 * exact
    assert -1.35 * exact < estimate.low < -0.6 * exact


def test_tasks_are_resampled_within_and_weigh_alike():
    """Three tasks of different sizes: the standard error of the mean over tasks, against the formula."""
    rng = fresh_rng()
    parts = [answers(rng, samples, 0.2, 0.1) for samples in (100, 200, 400)]
    estimate = estimate_mean(parts)
    formula = math.sqrt(sum(part.var() / len(part) for part in parts)) / 3
    assert estimate.stderr == pytest.approx(formula, rel=0.15)
    assert estimate.high - estimate.low == pytest.approx(2 * 1.96 * formula, rel=0.2)
    assert estimate == estimate_mean(parts)  # seeded


# ---- the margin ----


@pytest.mark.parametrize(
    ("low", "high", "stderr", "verdict"),
    [
        (-0.009, 0.02, 0.1, "shown"),
        (-0.01, 0.02, 0.0001, "not shown"),  # the end on the margin is not above it
        (-0.02, 0.02, 0.1, "too few samples"),
        (-0.03, -0.011, 0.1, "worse"),
    ],
)
def test_the_verdict_says_what_the_interval_shows(low, high, stderr, verdict):
    assert verdict_of(Estimate(low, high, stderr), even(1000), 1.0)[0] == verdict
    assert verdict_of(Estimate(-high, -low, stderr), even(1000), 1.0, higher_is_better=False)[0] == verdict


def test_with_the_samples_needed_four_of_five_equal_models_pass():
    rng = fresh_rng()
    flips, margin = 0.2, 5.0
    first = answers(rng, 2000, flips / 2, flips / 2)
    stderr = estimate_mean([first]).stderr
    _, needed = verdict_of(Estimate(-1.0, 1.0, stderr * 4), even(125), margin)
    assert needed == pytest.approx((1.96 + 0.84) ** 2 * flips / 0.05**2, rel=0.15)
    shown = [
        verdict_of(estimate_mean([answers(rng, needed, flips / 2, flips / 2)]), even(needed), margin)[0] == "shown"
        for _ in range(REPEATS)
    ]
    assert 0.68 < np.mean(shown) < 0.92


def test_no_change_at_all_needs_as_many_samples_as_exclude_one():
    """369 answers without a change exclude 1 % at 97.5 %; a few do not promise that there is none."""
    assert math.ceil(least_samples(0.01)) == 368
    for count, verdict in ((400, "shown"), (340, "too few samples")):
        assert verdict_of(estimate_mean([np.zeros(count)]), even(count), 1.0)[0] == verdict
    verdict, needed = verdict_of(estimate_mean([np.zeros(20)]), even(20), 1.0)
    assert verdict == "too few samples"
    assert needed > 368
    assert verdict_of(Estimate(), even(1), 1.0) == ("too few samples", 368)


# ---- perplexity ----


def test_the_interval_of_a_ratio_of_sums_covers():
    """As of a perplexity or a KL over windows of several lengths."""
    rng = fresh_rng()

    def mean(sums, tokens, axis=-1):
        return sums.sum(axis) / tokens.sum(axis)

    covered = 0
    for _ in range(REPEATS):
        tokens = rng.integers(60, 130, 50).astype(float)
        sums = tokens * rng.normal(0.05, 0.02, 50)
        estimate = bootstrapped(mean, sums, tokens)
        left = [(sums.sum() - sums[i]) / (tokens.sum() - tokens[i]) for i in range(50)]
        assert estimate.stderr == pytest.approx(math.sqrt(49 * np.var(left)), rel=0.2)  # the jackknife's
        covered += estimate.low <= 0.05 <= estimate.high
    assert covered / REPEATS > 0.88
