"""How far the rounds of a measurement disagree, and what that leaves of a speed-up.

Intervals are 95 % intervals of a paired bootstrap: rounds are drawn with replacement, and a round's times of both
variants stay together, since a slow moment of the machine hits both.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np

LEAST_ROUNDS = 3  # below, an interval says nothing
DRAWN_ROUNDS = 2000
LEVEL = (2.5, 97.5)  # percentiles


def speedup_interval(reference: Sequence[float], times: Sequence[float]) -> list[float]:
    """Interval [low, high] of median(reference) / median(times); both have one time for each round."""
    drawn = _drawn_medians(reference, times)
    return _percentiles(drawn[0] / drawn[1])


def difference_interval(times: Sequence[float], less: Sequence[float]) -> list[float]:
    """Interval [low, high] of median(times) - median(less), in their unit."""
    drawn = _drawn_medians(times, less)
    return _percentiles(drawn[0] - drawn[1])


def quartiles(times: Sequence[float]) -> tuple[float, float]:
    """The first and the third."""
    low, high = np.percentile(times, (25, 75))
    return float(low), float(high)


def _drawn_medians(*series: Sequence[float]) -> "np.ndarray[Any, Any]":
    """[series, resamples]: the median of each series in each resample of the rounds."""
    values = np.asarray(series, dtype=float)
    # always the same draws, so that the same samples give the same interval
    rounds = np.random.default_rng(0).integers(0, values.shape[1], (DRAWN_ROUNDS, values.shape[1]))
    medians: np.ndarray[Any, Any] = np.median(values[:, rounds], axis=-1)
    return medians


def _percentiles(values: "np.ndarray[Any, Any]") -> list[float]:
    return [float(value) for value in np.percentile(values, LEVEL)]
