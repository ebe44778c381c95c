"""From the mean over samples to the value that lm-eval shows: the mean itself, a perplexity, bits per byte. Imports no
torch."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import numpy as np

from ladderize.eval.paired.statistics.bootstrap import TAILS, Stratum, ends, resampled_totals

if TYPE_CHECKING:
    from numpy.typing import NDArray

    Floats = NDArray[np.float64]

ScaleName = Literal["mean", "perplexity", "bits"]
# lm-eval's aggregations, and the scale of each
AGGREGATIONS: Mapping[str, ScaleName] = {
    "mean": "mean",
    "perplexity": "perplexity",
    "weighted_perplexity": "perplexity",
    "bits_per_byte": "bits",
}


@dataclass(frozen=True)
class Scale:
    """name: mean: a mean of a metric; perplexity, bits: of log-likelihoods in nats, exp(-mean) and -mean / log(2)."""

    name: ScaleName

    def __call__(self, means: "Floats | float") -> "Floats":
        """What the means are on this scale; the same shape."""
        values = np.asarray(means, dtype=float)
        with np.errstate(over="ignore"):  # infinite where a model is that bad
            if self.name == "perplexity":
                return np.exp(-values)
            return -values / math.log(2) if self.name == "bits" else values


SCALES = tuple(Scale(name) for name in dict.fromkeys(AGGREGATIONS.values()))
PERPLEXITY_SCALE = Scale("perplexity")


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
    scale: Scale, reference: "Floats", other: "Floats", sizes: "Floats", resamples: int, rng: np.random.Generator
) -> ScaledDifference:
    """Compare sums of log-likelihoods of each cluster on a scale. reference, other, sizes: [C], the clusters' sums and
    what these are divided by.

    A resample gives both models' means; the mean of the differences within the pairs is that of ``ends``.
    """
    total = float(sizes.sum())
    ours, theirs = (float(scale(sums.sum() / total)) for sums in (reference, other))
    totals = resampled_totals(np.stack([reference, other - reference, sizes], axis=1), resamples, rng)
    base, moved = totals[:, 0] / totals[:, 2], totals[:, 1] / totals[:, 2]
    difference, ratio = theirs - ours, theirs / ours if ours else math.inf
    found = ends([Stratum(other - reference, sizes)], [1.0], [moved], rng)
    if found is None:
        return ScaledDifference(difference, None, None, ratio, None, None)
    before, worst, best = scale(base), scale(base + found.worst), scale(base + found.best)
    low, high = (worst, best) if scale.name == "mean" else (best, worst)  # the others fall as the mean rises
    with np.errstate(invalid="ignore", divide="ignore"):  # of scores that are all 0, or of infinite ones
        differences = [float(np.quantile(one - before, tail)) for one, tail in zip((low, high), TAILS, strict=True)]
        ratios = [float(np.quantile(one / before, tail)) for one, tail in zip((low, high), TAILS, strict=True)]
    if not all(map(math.isfinite, differences + ratios)):
        return ScaledDifference(difference, None, None, ratio, None, None)
    return ScaledDifference(difference, differences[0], differences[1], ratio, ratios[0], ratios[1])
