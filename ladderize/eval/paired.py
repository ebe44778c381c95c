"""Statistics of paired differences: scipy's bootstrap and exact binomial test, and non-inferiority. Imports no torch.

A bootstrap only resamples what was seen: where no answer changed, its interval has no width. So two imagined samples
are added to those of a metric between 0 and 1 before resampling, one that became as bad and one that became as good as
possible (after Agresti and Min, "Simple improved confidence intervals for comparing matched proportions", Statistics in
Medicine 24, 2005). They widen the interval of few samples, and hardly that of many.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import NormalDist
from typing import TYPE_CHECKING, Any

import numpy as np

from ladderize.eval.comparison import CONFIDENCE, POINT, Verdict

if TYPE_CHECKING:
    from numpy.typing import NDArray

    Floats = NDArray[np.float64]

BOOTSTRAP_RESAMPLES = 9999
SEED = 0  # of all resamples, so that the same answers have the same interval
NUMBERS_AT_ONCE = 1 << 22  # drawn at a time
TAIL = (1 - CONFIDENCE) / 2
POWER = 0.8  # the chance of showing a margin


@dataclass(frozen=True)
class Estimate:
    """The interval and the standard error of a number; None where the samples give none."""

    low: float | None = None
    high: float | None = None
    stderr: float | None = None


def bootstrapped(statistic: Callable[..., Any], *columns: "Floats", paired: bool = True) -> Estimate:
    """Estimate ``statistic(*columns, axis=...)`` by the percentiles of its resamples.

    paired: the columns are resampled together; otherwise separately, as the samples of several tasks.
    """
    from scipy.stats import bootstrap

    if min(map(len, columns)) < 2:
        return Estimate()
    total = len(columns[0]) if paired else sum(map(len, columns))
    found = bootstrap(
        columns,
        statistic,
        n_resamples=BOOTSTRAP_RESAMPLES,
        batch=max(1, NUMBERS_AT_ONCE // total),
        vectorized=True,
        paired=paired,
        confidence_level=CONFIDENCE,
        method="percentile",
        rng=np.random.default_rng(SEED),
    )
    low, high = map(float, found.confidence_interval)
    if not (math.isfinite(low) and math.isfinite(high)) or low == high:
        return Estimate()
    return Estimate(low, high, float(found.standard_error))


def estimate_mean(strata: Sequence["Floats"], *, bounded: bool = True) -> Estimate:
    """Estimate the mean of the strata's means.

    strata: the differences of each task.
    bounded: no difference is beyond -1 and 1, so the imagined samples are known.
    """
    extremes = [-1.0, 1.0] if bounded else []
    columns = [np.concatenate([stratum, extremes]) for stratum in strata]

    def mean_of_means(*parts: "Floats", axis: int = -1) -> Any:
        return sum(part.mean(axis) for part in parts) / len(parts)

    return bootstrapped(mean_of_means, *columns, paired=False)


def mcnemar_p(lost: int, gained: int) -> float:
    """Return McNemar's exact two-sided p: the probability of flips at least this uneven if both directions are equally
    likely."""
    from scipy.stats import binomtest

    return float(binomtest(lost, lost + gained).pvalue) if lost + gained else 1.0


# ---- non-inferiority: is the other model at most a margin worse than the reference? ----


def least_samples(margin: float) -> float:
    """Return the number of unchanged samples that excludes a loss of ``margin`` (0.01 is a point): (1 - margin)**n is
    0.025."""
    return math.log(TAIL) / math.log1p(-margin) if margin < 1 else 1.0


def samples_needed(samples: int, weights: Sequence[float], stderr: float, margin: float) -> int:
    """Return the number of samples that shows the margin with a chance of 80 %, if the models are equally good.

    It is the usual formula for paired differences, n = (z0.975 + z0.8)**2 sigma**2 / margin**2 (Julious, "Sample sizes
    for clinical trials with Normal data", Statistics in Medicine 23, 2004).

    samples: the number that gave ``stderr``.
    weights: of each sample in the mean; their sum is 1.
    stderr: of the mean difference.
    """
    normal = NormalDist()
    z = normal.inv_cdf(1 - TAIL) + normal.inv_cdf(POWER)
    largest_share = samples * sum(weight**2 for weight in weights)  # 1 where all weigh the same
    return math.ceil(max(samples * (z * stderr / margin) ** 2, least_samples(margin) * largest_share))


def judge(low: float, high: float, margin: float, *, enough: bool = True) -> Verdict:
    """Return the verdict that the interval of the gain allows (positive: the other model is better), in the unit of
    ``margin``.

    A margin is shown where the lower end lies above -margin: a one-sided test at 2.5 %.

    enough: there are as many samples as would show the margin if the models were equally good.
    """
    if high < -margin:
        return "worse"
    if low > -margin:
        return "shown"
    return "not shown" if enough else "too few samples"


def verdict_of(
    found: Estimate, weights: Sequence[float], margin: float, *, higher_is_better: bool = True
) -> tuple[Verdict, int | None]:
    """Return the verdict on an estimated difference, and the number of samples needed where these were too few.

    weights: of each sample in the mean; their sum is 1.
    margin: in points.
    """
    samples, margin = len(weights), margin * POINT
    if found.low is None or found.high is None or found.stderr is None:
        return "too few samples", max(math.ceil(least_samples(margin)), samples + 1)
    needed = samples_needed(samples, weights, found.stderr, margin)
    gain = (found.low, found.high) if higher_is_better else (-found.high, -found.low)
    verdict = judge(*gain, margin, enough=samples >= needed)
    if verdict == "shown" and 1 / sum(weight**2 for weight in weights) < least_samples(margin):
        verdict = "too few samples"
    return verdict, needed if verdict == "too few samples" else None
