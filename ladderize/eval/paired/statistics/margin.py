"""Non-inferiority: is the other model at most a margin worse than the reference?

It is shown where the lower end of the 95 % interval of the gain lies above -margin: a one-sided test at 2.5 %. Imports
no torch.
"""

import math
from statistics import NormalDist

from ladderize.eval.paired.statistics.bootstrap import TAILS, Estimate
from ladderize.eval.paired.statistics.terms import Verdict

POWER = 0.8


def judge(low: float, high: float, margin: float, samples: int, needed: int) -> Verdict:
    """low, high: the interval of the gain (positive: the other model is better), in the unit of ``margin``."""
    if low > -margin:
        return "shown"
    if high < -margin:
        return "worse"
    return "too few samples" if samples < needed else "not shown"


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
