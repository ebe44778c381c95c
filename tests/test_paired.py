"""Paired statistics: intervals that cover, McNemar's test, non-inferiority."""

import math

import numpy as np
import pytest
import scipy.stats

from ladderize.eval import compare as comparing
from ladderize.eval.compare import bootstrapped, estimate_mean, verdict_of
from tests.helpers import fresh_rng

REPEATS = 400  # simulated evaluations for a coverage


@pytest.fixture(autouse=True)
def _few_resamples(monkeypatch):
    monkeypatch.setattr(comparing, "BOOTSTRAP_RESAMPLES", 999)


def answers(rng: np.random.Generator, samples: int, worse: float, better: float) -> np.ndarray:
    return rng.choice([-1.0, 0.0, 1.0], samples, p=[worse, 1 - worse - better, better])


@pytest.mark.parametrize(("samples", "worse", "better"), [(50, 0.02, 0.02), (100, 0.3, 0.1)])
def test_the_interval_of_answers_that_changed_covers(samples, worse, better):
    """Each end aims at missing in 2.5 % of evaluations; of 400, five standard errors are 4 %."""
    rng = fresh_rng()
    low, high, _ = np.array([estimate_mean([answers(rng, samples, worse, better)]) for _ in range(REPEATS)]).T
    true = better - worse
    assert np.mean(low > true) < 0.07
    assert np.mean(high < true) < 0.07
    normal = 2 * 1.96 * math.sqrt((worse + better - true**2) / samples)
    assert np.mean(high - low) < 1.2 * normal + 6 / samples


@pytest.mark.parametrize("samples", [370, 500, 600, 1000])
def test_a_lost_margin_is_rarely_shown(samples, monkeypatch):
    """A model that loses a margin of 1 point, and wins nothing, is "shown" to lose less in 2 to 7 % of evaluations: few
    answers change, so the interval's end moves in large steps. The chance is a sum over how many answers were lost."""
    monkeypatch.setattr(comparing, "BOOTSTRAP_RESAMPLES", 9999)
    chance = 0.0
    for lost in range(samples // 100):
        low, high, _ = estimate_mean([np.repeat([-1.0, 0.0], [lost, samples - lost])])
        if verdict_of(low, high, 1.0, samples) == "shown":
            chance += float(scipy.stats.binom.pmf(lost, samples, 0.01))
    assert 0.01 < chance < 0.07


@pytest.mark.parametrize("samples", [2, 20, 300, 340, 400])
def test_no_change_at_all_does_not_mean_that_there_is_none(samples, monkeypatch):
    """The exact bound at 2.5 % is that of Clopper and Pearson; this one is within a third of it. 369 answers without
    a change exclude 1 % at 97.5 %."""
    monkeypatch.setattr(comparing, "BOOTSTRAP_RESAMPLES", 9999)
    low, high, _ = estimate_mean([np.zeros(samples)])
    exact = scipy.stats.binomtest(0, samples).proportion_ci(0.95).high
    assert 0.6 * exact < high < 1.35 * exact
    assert -1.35 * exact < low < -0.6 * exact
    assert verdict_of(low, high, 1.0, samples) == ("shown" if samples == 400 else "not shown")


def test_tasks_are_resampled_within_and_weigh_alike():
    """Three tasks of different sizes: the standard error of the mean over tasks, against the formula."""
    rng = fresh_rng()
    tasks = [answers(rng, samples, 0.2, 0.1) for samples in (100, 200, 400)]
    low, high, stderr = estimate_mean(tasks)
    formula = math.sqrt(sum(values.var() / len(values) for values in tasks)) / 3
    assert stderr == pytest.approx(formula, rel=0.15)
    assert high - low == pytest.approx(2 * 1.96 * formula, rel=0.2)
    assert (low, high, stderr) == estimate_mean(tasks)  # seeded


@pytest.mark.parametrize(
    ("low", "high", "verdict"),
    [
        (-0.009, 0.02, "shown"),
        (-0.01, 0.02, "not shown"),  # the end on the margin is not above it
        (-0.03, -0.009, "not shown"),
        (-0.03, -0.011, "worse"),
    ],
)
def test_the_verdict_says_what_the_interval_shows(low, high, verdict):
    assert verdict_of(low, high, 1.0, 1000) == verdict


def test_the_interval_of_a_ratio_of_sums_covers():
    """As of a perplexity or a KL over windows of several lengths."""
    rng = fresh_rng()

    def mean(sums, tokens, axis=-1):
        return sums.sum(axis) / tokens.sum(axis)

    covered = 0
    for _ in range(REPEATS):
        tokens = rng.integers(60, 130, 50).astype(float)
        sums = tokens * rng.normal(0.05, 0.02, 50)
        low, high, stderr = bootstrapped(mean, sums, tokens)
        left = [(sums.sum() - sums[i]) / (tokens.sum() - tokens[i]) for i in range(50)]
        assert stderr == pytest.approx(math.sqrt(49 * np.var(left)), rel=0.2)  # the jackknife's
        covered += low <= 0.05 <= high
    assert covered / REPEATS > 0.88
