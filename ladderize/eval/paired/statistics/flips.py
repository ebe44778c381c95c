"""Answers that changed, of metrics that are 0 or 1: an accuracy that stays equal can hide them. Imports no torch."""

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray


@dataclass(frozen=True)
class Flips:
    """The places of the samples that one model answers right and the other wrong. mcnemar_p: see ``mcnemar_exact``."""

    right_to_wrong: "NDArray[np.int64]"
    wrong_to_right: "NDArray[np.int64]"
    mcnemar_p: float

    @classmethod
    def of(cls, reference: "NDArray[np.float64]", other: "NDArray[np.float64]") -> "Flips":
        """reference, other: 0 or 1 of each sample [n]."""
        lost, gained = np.flatnonzero(reference > other), np.flatnonzero(reference < other)
        return cls(lost, gained, mcnemar_exact(len(lost), len(gained)))


def mcnemar_exact(lost: int, gained: int) -> float:
    """Two-sided p of McNemar's exact test: how likely so uneven flips are, were both directions equally likely.

    p = min(1, 2 P(X <= min(lost, gained))) for X of a binomial distribution with lost + gained trials of 1/2, summed in
    log space, since 0.5**n underflows from n = 1075 on. The test takes samples to be independent.
    """
    trials = lost + gained
    if trials == 0:
        return 1.0
    counts = range(min(lost, gained) + 1)
    logs = [math.lgamma(trials + 1) - math.lgamma(count + 1) - math.lgamma(trials - count + 1) for count in counts]
    top = max(logs)
    log_tail = top + math.log(math.fsum(math.exp(value - top) for value in logs)) - trials * math.log(2)
    return min(1.0, math.exp(math.log(2) + log_tail))
