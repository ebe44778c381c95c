"""Paired statistics: intervals that cover, McNemar's test, non-inferiority, clusters, strata, windows."""

import math

import numpy as np
import pytest
import scipy.stats
from statsmodels.stats.contingency_tables import mcnemar

from ladderize.errors import UsageError
from ladderize.eval.paired.compare import paired_stderr
from ladderize.eval.paired.document import POINT, CompareOptions
from ladderize.eval.paired.statistics import (
    Estimate,
    Stratum,
    estimate_mean,
    judge,
    mcnemar_exact,
    resampled_means,
    samples_needed,
    scaled_difference,
)

REPEATS = 1200  # simulated evaluations for a coverage
RESAMPLES = 1000


def fresh() -> np.random.Generator:
    return np.random.default_rng(np.random.randint(1 << 31))


def estimated(
    rng: np.random.Generator,
    differences: np.ndarray,
    clusters: np.ndarray | None = None,
    *,
    span: float | None = 1.0,
    resamples: int = RESAMPLES,
) -> Estimate:
    codes = np.arange(len(differences)) if clusters is None else clusters
    stratum = Stratum.of(differences, codes, span)
    return estimate_mean([stratum], [1.0], [resampled_means(stratum, resamples, rng)], rng)


def answers(rng: np.random.Generator, samples: int, worse: float, better: float) -> np.ndarray:
    """Differences of 0/1 answers, of which some changed."""
    return rng.choice([-1.0, 0.0, 1.0], samples, p=[worse, 1 - worse - better, better])


# ---- the interval ----


@pytest.mark.parametrize(
    ("samples", "worse", "better"), [(50, 0.02, 0.02), (100, 0.3, 0.1), (400, 0.01, 0.0), (400, 0.1, 0.1)]
)
def test_the_interval_of_answers_that_changed_covers(samples, worse, better):
    """Each end misses in at most 2.5 % of evaluations: of 1200, six standard errors are 2.7 %."""
    rng = fresh()
    found = [estimated(rng, answers(rng, samples, worse, better)) for _ in range(REPEATS)]
    true = better - worse
    assert sum(one.low > true for one in found) / REPEATS < 0.055
    assert sum(one.high < true for one in found) / REPEATS < 0.055
    # and it is not wide for nothing: at most half as wide again as the normal interval that knows the variance
    normal = 2 * 1.96 * math.sqrt((worse + better - true**2) / samples)
    excess = 2 * 3.69 / samples  # what samples without a change cannot exclude
    assert np.mean([one.high - one.low for one in found]) < 1.1 * normal + excess


def test_the_interval_of_clustered_answers_covers():
    """Half of the passages turn as a whole: samples as they come would give an interval that is far too narrow."""
    rng = fresh()
    covered = naive = 0
    for _ in range(REPEATS):
        whole = rng.random(60) < 0.5
        alone, together = answers(rng, 300, 0.1, 0.1).reshape(60, 5), answers(rng, 60, 0.1, 0.1)[:, None]
        differences = np.where(whole[:, None], together, alone).ravel()
        clusters = np.arange(60).repeat(5)
        shuffled = rng.permutation(300)
        found = estimated(rng, differences[shuffled], clusters[shuffled])
        covered += found.low <= 0 <= found.high
        found = estimated(rng, differences)
        naive += found.low <= 0 <= found.high
    assert covered / REPEATS > 0.91
    assert naive / REPEATS < 0.90


def test_the_interval_of_real_differences_covers():
    rng = fresh()
    found = [estimated(rng, rng.normal(0.2, 0.3, 40), span=None) for _ in range(REPEATS)]
    assert 0.91 < sum(one.low <= 0.2 <= one.high for one in found) / REPEATS < 0.985


def test_the_interval_is_close_to_scipys_bootstrap():
    rng = fresh()
    differences = rng.beta(0.5, 0.5, 500) - rng.beta(0.5, 0.4, 500)
    ours = estimated(rng, differences, resamples=20_000)
    theirs = scipy.stats.bootstrap((differences,), np.mean, n_resamples=20_000, method="percentile", rng=rng)
    width = ours.high - ours.low
    assert ours.low == pytest.approx(theirs.confidence_interval.low, abs=0.05 * width)
    assert ours.high == pytest.approx(theirs.confidence_interval.high, abs=0.05 * width)


@pytest.mark.parametrize("samples", [1, 2, 20, 300])
def test_no_change_at_all_claims_no_more_than_the_samples_allow(samples):
    """A share p of changes stays unseen with probability (1-p)^n: the exact bound at 2.5 %, which scipy has too."""
    found = estimated(fresh(), np.zeros(samples), resamples=200_000)
    if samples == 1:
        assert (found.low, found.high) == (None, None)
        return
    exact = scipy.stats.binomtest(0, samples).proportion_ci(0.95).high
    assert found.high == pytest.approx(exact, rel=0.03)
    assert found.low == pytest.approx(-exact, rel=0.03)


def test_changes_in_one_direction_have_the_exact_bound():
    lost, samples = 3, 150
    found = estimated(fresh(), np.repeat([-1.0, 0.0], [lost, samples - lost]), resamples=200_000)
    exact = scipy.stats.binomtest(lost, samples).proportion_ci(0.95)
    assert found.low == pytest.approx(-exact.high, rel=0.03)


def test_differences_of_unknown_range_that_are_all_equal_have_no_interval():
    found = estimated(fresh(), np.full(30, 0.25), span=None)
    assert (found.mean, found.low, found.high) == (0.25, None, None)


def test_alike_clusters_that_share_a_draw_are_resampled_as_others():
    """The quick way of 0/1 metrics against an obvious one: a weight for each cluster."""
    rng = fresh()
    differences = answers(rng, 80, 0.2, 0.1)
    stratum = Stratum.of(differences, np.arange(80), 1.0)
    quick = resampled_means(stratum, 100_000, rng)
    weights = rng.standard_exponential((100_000, 80))
    slow = weights @ differences / weights.sum(1)
    assert scipy.stats.ks_2samp(quick, slow).pvalue > 1e-8


def test_strata_are_resampled_within_and_weighted():
    """Three tasks of different sizes: the variance of the mean over tasks, against the formula."""
    rng = fresh()
    parts = [answers(rng, samples, 0.2, 0.1) for samples in (100, 200, 400)]
    strata = [Stratum.of(part, np.arange(len(part)), 1.0) for part in parts]
    weights = [0.5, 0.3, 0.2]
    found = estimate_mean(strata, weights, [resampled_means(stratum, 40_000, rng) for stratum in strata], rng)
    assert found.mean == pytest.approx(sum(w * part.mean() for w, part in zip(weights, parts, strict=True)))
    formula = sum(w**2 * part.var() / len(part) for w, part in zip(weights, parts, strict=True))
    assert found.variance == pytest.approx(formula, rel=0.02)
    assert found.high - found.low == pytest.approx(2 * 1.96 * math.sqrt(formula), rel=0.1)


# ---- McNemar's test ----


def test_mcnemars_p_is_that_of_scipy_and_statsmodels():
    rng = fresh()
    for lost, gained in [(0, 0), (1, 0), (5, 5), (0, 40), *rng.integers(0, 60, (40, 2)).tolist()]:
        ours = mcnemar_exact(lost, gained)
        assert ours == pytest.approx(mcnemar([[9, lost], [gained, 9]], exact=True).pvalue, rel=1e-9)
        if lost + gained:
            assert ours == pytest.approx(scipy.stats.binomtest(lost, lost + gained).pvalue, rel=1e-9)


def test_mcnemars_p_of_thousands_does_not_underflow():
    for lost, gained in [(3000, 3100), (20_000, 20_500), (0, 1000)]:
        ours = mcnemar_exact(lost, gained)
        assert ours == pytest.approx(scipy.stats.binomtest(lost, lost + gained).pvalue, rel=1e-6)
        assert 0 < ours < 1


# ---- the margin ----


@pytest.mark.parametrize(
    ("low", "high", "samples", "verdict"),
    [
        (-0.009, 0.02, 500, "shown"),
        (-0.01, 0.02, 1000, "not shown"),  # the end on the margin is not above it
        (-0.02, 0.02, 999, "too few samples"),
        (-0.02, 0.02, 1000, "not shown"),
        (-0.03, -0.011, 10, "worse"),
        (0.001, 0.03, 10, "shown"),
    ],
)
def test_the_verdict_says_what_the_interval_shows(low, high, samples, verdict):
    assert judge(low, high, 0.01, samples, 1000) == verdict


@pytest.mark.parametrize(("flips", "margin", "together"), [(0.1, 0.05, 1), (0.2, 0.05, 1), (0.1, 0.1, 4)])
def test_with_the_samples_needed_four_of_five_equal_models_pass(flips, margin, together):
    rng = fresh()

    def drawn(samples: int) -> tuple[Estimate, int]:
        count = samples // together
        whole = answers(rng, count, flips / 2, flips / 2).repeat(together)
        return estimated(rng, whole, np.arange(count).repeat(together)), len(whole)

    needed = samples_needed(*drawn(100_000), margin)
    shown = sum(drawn(needed)[0].low > -margin for _ in range(800)) / 800
    assert (
        0.65 < shown < 0.9
    )  # 0.75 with passages of four, of which there are few; of 800, six standard errors are 0.09
    # a third of the samples tell about the same number
    assert np.median([samples_needed(*drawn(needed // 3), margin) for _ in range(200)]) == pytest.approx(
        needed, rel=0.5
    )


def test_no_change_at_all_needs_as_many_samples_as_exclude_one():
    """369 answers without a change exclude 1 % at 97.5 %; a few do not promise that there is none."""
    rng = fresh()
    assert estimated(rng, np.zeros(400), resamples=50_000).low > -0.01
    assert estimated(rng, np.zeros(340), resamples=50_000).low < -0.01
    assert samples_needed(estimated(rng, np.zeros(100_000)), 100_000, POINT) == math.ceil(
        math.log(0.025) / math.log(0.99)
    )
    assert samples_needed(estimated(rng, np.zeros(20)), 20, POINT) > 1000


# ---- perplexity ----


def windows(rng: np.random.Generator, count: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Nats of two models that agree about which windows are hard."""
    tokens = rng.integers(60, 130, count).astype(float)
    hard = rng.gamma(20, 0.1, count)
    return tokens * hard, tokens * (hard + rng.normal(0.05, 0.02, count)), tokens


def test_the_paired_error_of_perplexity_is_what_a_jackknife_finds():
    reference, other, tokens = windows(fresh(), 200)
    left = [
        math.exp((other.sum() - other[i]) / (tokens.sum() - tokens[i]))
        - math.exp((reference.sum() - reference[i]) / (tokens.sum() - tokens[i]))
        for i in range(200)
    ]
    jackknife = math.sqrt(199 * np.var(left))
    paired = paired_stderr(reference, other, tokens)
    assert paired == pytest.approx(jackknife, rel=0.05)
    alone = paired_stderr(np.zeros(200), other, tokens)
    assert paired < 0.5 * alone
    assert paired_stderr(reference[:1], other[:1], tokens[:1]) is None


def test_the_interval_of_perplexities_covers():
    rng = fresh()
    covered = ratio = 0
    everything = windows(rng, 400_000)
    true = [math.exp(part.sum() / everything[2].sum()) for part in everything[:2]]
    for _ in range(REPEATS):
        reference, other, tokens = windows(rng, 50)
        found = scaled_difference("perplexity", -reference, -other, tokens, RESAMPLES, rng)
        covered += found.low <= true[1] - true[0] <= found.high
        ratio += found.ratio_low <= true[1] / true[0] <= found.ratio_high
        assert found.low < found.difference < found.high
    assert covered / REPEATS > 0.9
    assert 0.9 < ratio / REPEATS < 0.985


def test_a_ratio_of_perplexities_has_the_ends_of_its_logarithm():
    """Eight windows, so that the window that joins shows: log(other / reference) is a mean of differences."""
    rng = fresh()
    reference, other, tokens = windows(rng, 8)
    ratio = scaled_difference("perplexity", -reference, -other, tokens, 100_000, rng)
    stratum = Stratum(other - reference, tokens)
    mean = estimate_mean([stratum], [1.0], [resampled_means(stratum, 100_000, rng)], rng)
    ends = np.log([ratio.ratio_low, ratio.ratio_high])
    assert ends == pytest.approx([mean.low, mean.high], abs=0.03 * (mean.high - mean.low))


# ---- options ----


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"margin": 0.0}, "--margin must be above 0"),
        ({"margin": math.nan}, "--margin must be above 0"),
        ({"margin": 101.0}, "at most 100 points"),
        ({"resamples": 10}, "--resamples must be an integer of at least 100"),
        ({"resamples": 10**7}, "--resamples must be at most 1000000"),
        ({"seed": -1}, "--seed must be an integer of at least 0"),
    ],
)
def test_options_that_make_no_comparison(given, message):
    with pytest.raises(UsageError, match=message):
        CompareOptions(**given)
