"""The statistics of a paired comparison. Imports no torch.

A resample gives every cluster a random weight, an exponential variable, and takes the weighted mean: Rubin's bootstrap
("The Bayesian Bootstrap", Annals of Statistics 9, 1981). Against drawing clusters with replacement it has no resample
in which a rare change is missing altogether.

What no sample showed is counted too: for the lower end of the interval one more cluster joins that changed for the
worse, for the upper end one that changed for the better, with a random weight as all have. This is Gaffke's bound for
the mean of bounded variables (Mathematical Methods of Statistics 14, 2005; Learned-Miller and Thomas,
arXiv:1905.06208). For 0/1 changes in one direction it is the exact bound of Clopper and Pearson: where none of n
samples changed, the interval reaches 3.7/n to both sides (1 - 0.025**(1/n)), so that it never claims more than n
samples can show. scipy and statsmodels have neither.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from statistics import NormalDist
from typing import TYPE_CHECKING, Literal

import numpy as np

from ladderize.eval.paired.document import CONFIDENCE, TOO_FEW, Verdict

if TYPE_CHECKING:
    from numpy.typing import NDArray

    Floats = NDArray[np.float64]

CHUNK_BYTES = 32 << 20  # of weights that are held at a time
TAILS = ((1 - CONFIDENCE) / 2, (1 + CONFIDENCE) / 2)
POWER = 0.8  # with which a margin is to be shown

ScaleName = Literal["mean", "perplexity", "bits"]
# lm-eval's aggregations, and the scale of each
AGGREGATIONS: Mapping[str, ScaleName] = {
    "mean": "mean",
    "perplexity": "perplexity",
    "weighted_perplexity": "perplexity",
    "bits_per_byte": "bits",
}


# ---- the mean of differences ----


@dataclass(frozen=True)
class Stratum:
    """The clusters of one task."""

    sums: "Floats"  # of the differences in each cluster [C]
    sizes: "Floats"  # samples of each [C]
    span: float | None = None  # the largest difference that one sample can have; None: unknown

    @classmethod
    def of(cls, differences: "Floats", clusters: "NDArray[np.int64]", span: float | None = None) -> "Stratum":
        """differences, clusters: of each sample [n]; clusters are numbered from 0 on."""
        return cls(cluster_sums(differences, clusters), np.bincount(clusters).astype(float), span)

    @property
    def samples(self) -> float:
        return float(self.sizes.sum())

    @property
    def mean(self) -> float:
        return float(self.sums.sum()) / self.samples


def cluster_sums(values: "Floats", clusters: "NDArray[np.int64]") -> "Floats":
    """The sum of the samples' values [n] in each cluster [C]."""
    return np.bincount(clusters, weights=values).astype(np.float64)


@dataclass(frozen=True)
class Estimate:
    """A mean of differences. variance: of it, with what clusters add. worst, best: [resamples] of it where the cluster
    that joins changed for the worse, and for the better; None where there is no interval. moved: by how much that
    cluster moves the mean at most."""

    mean: float
    variance: float
    worst: "Floats | None" = None
    best: "Floats | None" = None
    moved: float = 0.0

    @cached_property
    def low(self) -> float | None:
        """The lower end of the interval."""
        return None if self.worst is None else float(np.quantile(self.worst, TAILS[0]))

    @cached_property
    def high(self) -> float | None:
        return None if self.best is None else float(np.quantile(self.best, TAILS[1]))


def resampled_totals(columns: "Floats", resamples: int, rng: np.random.Generator) -> "Floats":
    """Weighted sums of each column in each resample: [resamples, K] of ``columns`` [C, K]. Clusters that are alike
    share one draw of the sum of their weights (a gamma variable), so that 0/1 metrics take no time."""
    kinds, counts = np.unique(columns, axis=0, return_counts=True)
    totals = np.empty((resamples, columns.shape[1]))
    chunk = max(1, CHUNK_BYTES // (8 * len(kinds)))
    for start in range(0, resamples, chunk):
        shape = (min(chunk, resamples - start), len(kinds))
        weights = rng.standard_exponential(shape) if counts.max() == 1 else rng.standard_gamma(counts, shape)
        totals[start : start + chunk] = weights @ kinds
    return totals


def resampled_means(stratum: Stratum, resamples: int, rng: np.random.Generator) -> "Floats":
    """The mean of the differences in each resample: [resamples]."""
    totals = resampled_totals(np.stack([stratum.sums, stratum.sizes], axis=1), resamples, rng)
    means: Floats = totals[:, 0] / totals[:, 1]
    return means


def estimate_mean(
    strata: Sequence[Stratum], weights: Sequence[float], draws: Sequence["Floats"], rng: np.random.Generator
) -> Estimate:
    """The weighted mean of strata with its interval, of resampled means that were drawn for each of them.

    weights: of each stratum, their sum is 1. draws: [resamples] of each stratum. There is no interval where a stratum
    has a single cluster, and where all differences are equal but their possible size is unknown.
    """
    # the part of each cluster in the weighted mean: [C] of each stratum, 1 in all
    shares = [weight * stratum.sizes / stratum.samples for weight, stratum in zip(weights, strata, strict=True)]
    mean = sum(weight * stratum.mean for weight, stratum in zip(weights, strata, strict=True))
    centred = [stratum.sums / stratum.sizes - stratum.mean for stratum in strata]
    spread = sum(float((share * part) @ (share * part)) for share, part in zip(shares, centred, strict=True))
    clusters = sum(map(len, shares))
    variance = spread * clusters / max(1, clusters - len(strata))
    extremes = _extremes(strata, shares, mean) if min(map(len, shares)) > 1 else None
    if extremes is None:
        return Estimate(mean, variance)
    resampled = np.sum([weight * drawn for weight, drawn in zip(weights, draws, strict=True)], axis=0)
    effective = 1 / sum(float(share @ share) for share in shares)  # as many clusters of equal weight vary as much
    joining = rng.beta(1, effective, len(resampled))
    worst, best = ((1 - joining) * resampled + joining * extreme for extreme in extremes)
    return Estimate(mean, variance, worst, best, (extremes[1] - extremes[0]) / 2 / effective)


def _extremes(strata: Sequence[Stratum], shares: Sequence["Floats"], mean: float) -> tuple[float, float] | None:
    """The mean difference within the cluster that joins, at its worst and at its best.

    Where differences are bounded it is the root mean square over the clusters that changed, of which the whole span is
    one: all of it for 0/1 metrics without clusters. Where they are not, a standard deviation to both sides of the mean.
    """
    values = np.concatenate([stratum.sums / stratum.sizes for stratum in strata])
    share = np.concatenate(shares)
    if any(stratum.span is None for stratum in strata):
        deviation = float(np.sqrt((share * (values - mean) ** 2).sum()))
        return None if deviation == 0 else (mean - deviation, mean + deviation)
    span = max(stratum.span for stratum in strata if stratum.span is not None)
    changed = values != 0
    typical = float(np.sqrt(((values[changed] ** 2).sum() + span**2) / (changed.sum() + 1)))
    return -typical, typical


def generator(seed: int, name: str) -> np.random.Generator:
    """Draws for one thing that has a name: the same whatever else is compared."""
    return np.random.default_rng([seed, *name.encode()])


# ---- scales that lm-eval shows a mean on ----


def on_scale(scale: ScaleName, means: "Floats | float") -> "Floats":
    """What the means are on a scale; the same shape. mean: themselves; perplexity, bits: of log-likelihoods in nats,
    exp(-mean) and -mean / log(2)."""
    values = np.asarray(means, dtype=float)
    with np.errstate(over="ignore"):  # infinite where a model is that bad
        if scale == "perplexity":
            return np.exp(-values)
        return -values / math.log(2) if scale == "bits" else values


@dataclass(frozen=True)
class ScaledDifference:
    """Difference and ratio, other to reference, with their intervals (None: there is none)."""

    difference: float
    low: float | None
    high: float | None
    ratio: float
    ratio_low: float | None
    ratio_high: float | None


def scaled_difference(
    scale: ScaleName, reference: "Floats", other: "Floats", sizes: "Floats", resamples: int, rng: np.random.Generator
) -> ScaledDifference:
    """Compare sums of log-likelihoods of each cluster on a scale. reference, other, sizes: [C], the clusters' sums and
    what these are divided by.

    A resample gives both models' means; the mean of the differences within the pairs is that of ``estimate_mean``.
    """
    total = float(sizes.sum())
    ours, theirs = (float(on_scale(scale, sums.sum() / total)) for sums in (reference, other))
    totals = resampled_totals(np.stack([reference, other - reference, sizes], axis=1), resamples, rng)
    base, moved = totals[:, 0] / totals[:, 2], totals[:, 1] / totals[:, 2]
    difference, ratio = theirs - ours, theirs / ours if ours else math.inf
    found = estimate_mean([Stratum(other - reference, sizes)], [1.0], [moved], rng)
    if found.worst is None or found.best is None:
        return ScaledDifference(difference, None, None, ratio, None, None)
    before, worst, best = (on_scale(scale, base + change) for change in (0.0, found.worst, found.best))
    low, high = (worst, best) if scale == "mean" else (best, worst)  # the others fall as the mean rises
    with np.errstate(invalid="ignore", divide="ignore"):  # of scores that are all 0, or of infinite ones
        differences = [float(np.quantile(one - before, tail)) for one, tail in zip((low, high), TAILS, strict=True)]
        ratios = [float(np.quantile(one / before, tail)) for one, tail in zip((low, high), TAILS, strict=True)]
    if not all(map(math.isfinite, differences + ratios)):
        return ScaledDifference(difference, None, None, ratio, None, None)
    return ScaledDifference(difference, differences[0], differences[1], ratio, ratios[0], ratios[1])


# ---- answers that changed ----


def mcnemar_exact(lost: int, gained: int) -> float:
    """Two-sided p of McNemar's exact test: how likely so uneven flips are, were both directions equally likely.

    p = min(1, 2 P(X <= min(lost, gained))) for X of a binomial distribution with lost + gained trials of 1/2. The test
    takes samples to be independent.
    """
    from scipy.special import bdtr  # its distribution function: scipy.stats, which has the test, takes a second to load

    return min(1.0, 2 * float(bdtr(min(lost, gained), lost + gained, 0.5)))


# ---- non-inferiority: is the other model at most a margin worse than the reference? ----


def verdict_of(
    found: Estimate, samples: int, margin: float, *, higher_is_better: bool = True
) -> tuple[Verdict, int | None]:
    """What an estimated difference shows, and how many samples it takes where these were too few."""
    needed = samples_needed(found, samples, margin)
    if found.low is None or found.high is None:
        return TOO_FEW, max(needed, samples + 1)
    gain = (found.low, found.high) if higher_is_better else (-found.high, -found.low)
    verdict = judge(*gain, margin, samples, needed)
    return verdict, needed if verdict == TOO_FEW else None


def judge(low: float, high: float, margin: float, samples: int, needed: int) -> Verdict:
    """What the 95 % interval of the gain (positive: the other model is better) shows, in the unit of ``margin``: it is
    shown where the lower end lies above -margin, a one-sided test at 2.5 %."""
    if low > -margin:
        return "shown"
    if high < -margin:
        return "worse"
    return TOO_FEW if samples < needed else "not shown"


def samples_needed(found: Estimate, samples: int, margin: float) -> int:
    """Samples with which the margin is shown with a chance of 80 %, if the models are equally good.

    The lower end of the interval lies about (z0.975 sigma / sqrt(n) + e / n) below the difference, where e / n is what
    the joining cluster moves it; so n is the root of margin sqrt(n)**2 - (z0.975 + z0.8) sigma sqrt(n) - e = 0. Without
    e it is the usual formula for paired differences, n = (z0.975 + z0.8)**2 sigma**2 / margin**2 (Julious, "Sample
    sizes for clinical trials with Normal data", Statistics in Medicine 23, 2004). sigma**2 is the variance of a
    sample's difference, as far as these samples and their clusters show it, with one more change than was seen: of few
    samples without any change it must not be taken to be 0. The least n is that with which no change at all shows
    the margin, log(0.025) / log(1 - margin).
    """
    normal = NormalDist()
    z = normal.inv_cdf(TAILS[1]) + normal.inv_cdf(POWER)
    sigma = math.sqrt(samples * (found.variance + found.moved**2))
    extreme = samples * found.moved
    root = (z * sigma + math.sqrt((z * sigma) ** 2 + 4 * margin * extreme)) / (2 * margin)
    least = math.log(TAILS[0]) / math.log1p(-margin) if margin < 1 else 1.0
    return math.ceil(max(root**2, least * extreme))
