"""Paired bootstrap of a mean of differences, with clusters and strata.

A resample gives every cluster a random weight, an exponential variable, and takes the weighted mean: Rubin's bootstrap
("The Bayesian Bootstrap", Annals of Statistics 9, 1981). Against drawing clusters with replacement it has no resample
in which a rare change is missing altogether.

What no sample showed is counted too: for the lower end of the interval one more cluster joins that changed for the
worse, for the upper end one that changed for the better, with a random weight as all have. This is Gaffke's bound for
the mean of bounded variables (Mathematical Methods of Statistics 14, 2005; Learned-Miller and Thomas,
arXiv:1905.06208). For 0/1 changes in one direction it is the exact bound of Clopper and Pearson: where none of n
samples changed, the interval reaches 3.7/n to both sides (1 - 0.025**(1/n)), so that it never claims more than n
samples can show.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from ladderize.eval.paired.statistics.terms import CONFIDENCE

if TYPE_CHECKING:
    from numpy.typing import NDArray

    Floats = NDArray[np.float64]

CHUNK_BYTES = 32 << 20  # of weights that are held at a time
TAILS = ((1 - CONFIDENCE) / 2, (1 + CONFIDENCE) / 2)


@dataclass(frozen=True)
class Stratum:
    """The clusters of one task. sums: of the differences in each cluster [C]; sizes: its samples [C]. span: the largest
    difference that one sample can have; None: unknown."""

    sums: "Floats"
    sizes: "Floats"
    span: float | None = None

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
    """A mean of differences. low, high: its interval; None where no interval can be had. variance: of ``mean``, with
    what clusters add; moved: see ``Ends``."""

    mean: float
    low: float | None
    high: float | None
    variance: float
    moved: float


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


@dataclass(frozen=True)
class Ends:
    """The resamples of which an interval takes the ends. worst, best: [resamples] of the mean, where the cluster that
    joins changed for the worse, and for the better. moved: by how much it moves the mean at most."""

    worst: "Floats"
    best: "Floats"
    moved: float


def estimate_mean(
    strata: Sequence[Stratum], weights: Sequence[float], draws: Sequence["Floats"], rng: np.random.Generator
) -> Estimate:
    """The weighted mean of strata with its interval, of resampled means that were drawn for each of them.

    weights: of each stratum, their sum is 1. draws: [resamples] of each stratum. There is no interval where a stratum
    has a single cluster, and where all differences are equal but their possible size is unknown.
    """
    shares = _shares(strata, weights)
    centred = [stratum.sums / stratum.sizes - stratum.mean for stratum in strata]
    mean = sum(weight * stratum.mean for weight, stratum in zip(weights, strata, strict=True))
    spread = sum(float((share * part) @ (share * part)) for share, part in zip(shares, centred, strict=True))
    clusters = sum(map(len, shares))
    variance = spread * clusters / max(1, clusters - len(strata))
    found = ends(strata, weights, draws, rng)
    if found is None:
        return Estimate(mean, None, None, variance, 0.0)
    low, high = float(np.quantile(found.worst, TAILS[0])), float(np.quantile(found.best, TAILS[1]))
    return Estimate(mean, low, high, variance, found.moved)


def ends(
    strata: Sequence[Stratum], weights: Sequence[float], draws: Sequence["Floats"], rng: np.random.Generator
) -> Ends | None:
    """The resamples of the weighted mean with the cluster that joins; None where there is no interval."""
    shares = _shares(strata, weights)
    mean = sum(weight * stratum.mean for weight, stratum in zip(weights, strata, strict=True))
    extremes = _extremes(strata, shares, mean) if min(map(len, shares)) > 1 else None
    if extremes is None:
        return None
    resampled = np.sum([weight * drawn for weight, drawn in zip(weights, draws, strict=True)], axis=0)
    effective = 1 / sum(float(share @ share) for share in shares)  # as many clusters of equal weight vary as much
    joining = rng.beta(1, effective, len(resampled))
    worst, best = ((1 - joining) * resampled + joining * extreme for extreme in extremes)
    return Ends(worst, best, (extremes[1] - extremes[0]) / 2 / effective)


def _shares(strata: Sequence[Stratum], weights: Sequence[float]) -> "list[Floats]":
    """The part of each cluster in the weighted mean: [C] of each stratum, 1 in all."""
    return [weight * stratum.sizes / stratum.samples for weight, stratum in zip(weights, strata, strict=True)]


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
