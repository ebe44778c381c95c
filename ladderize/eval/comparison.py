"""Comparisons in pairs: their documents, and the statistics of paired differences by scipy. Imports no torch.

Both models answered the same questions, so each question is a pair. Measured are the differences within the pairs:
other minus reference.

A bootstrap only resamples what was seen: where no answer changed, its interval has no width. So two imagined samples
are added to those of a metric between 0 and 1 before resampling, one that became as bad and one that became as good as
possible (after Agresti and Min, "Simple improved confidence intervals for comparing matched proportions", Statistics in
Medicine 24, 2005). They widen the interval of few samples, and hardly that of many.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from statistics import NormalDist
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from ladderize.files.records import Record

if TYPE_CHECKING:
    from numpy.typing import NDArray

    Floats = NDArray[np.float64]

CONFIDENCE = 0.95  # of every interval
POINT = 0.01  # of a metric between 0 and 1
TAIL = (1 - CONFIDENCE) / 2
POWER = 0.8  # the chance of showing a margin
BOOTSTRAP_RESAMPLES = 9999
SEED = 0  # of all resamples, so that the same answers have the same interval
NUMBERS_AT_ONCE = 1 << 22  # drawn at a time

# The answer to: is the other model at most the margin worse? "worse": the interval shows that it is more than the
# margin worse. "too few samples": with so few, equally good models would show it in fewer than four of five cases.
Verdict = Literal["shown", "not shown", "too few samples", "worse"]


# ---- documents ----


@dataclass(frozen=True)
class MeanComparison(Record):
    """The means of one metric of both models, on the same samples.

    difference: value minus reference_value.
    low, high: the ends of its interval; None for fewer than two samples or equal differences of a metric that is not
    between 0 and 1.
    verdict: None where a margin in points has no meaning: the metric is not between 0 and 1, or it is unknown if more
    is better.
    samples_needed: to show the margin with a chance of 80 % if the models are equally good; only with the verdict "too
    few samples".
    """

    samples: int
    reference_value: float
    value: float
    difference: float
    low: float | None
    high: float | None
    verdict: Verdict | None
    samples_needed: int | None


@dataclass(frozen=True)
class TaskComparison(MeanComparison):
    """One metric of one task.

    main: this metric stands for its task in the pooled comparison.
    right_to_wrong, wrong_to_right: the doc_id of the samples that flipped; of metrics that are 0 or 1, else None.
    mcnemar_p: of these flips.
    """

    task: str
    metric: str
    filter: str
    main: bool
    higher_is_better: bool | None
    mcnemar_p: float | None = None
    right_to_wrong: list[int] | None = None
    wrong_to_right: list[int] | None = None


@dataclass(frozen=True)
class PooledComparison(MeanComparison):
    """The mean over tasks of their main metrics.

    A group of lm-eval counts as one task, in which every sample has the same weight.
    """

    tasks: list[str]


@dataclass(frozen=True)
class PerplexityComparison(Record):
    """The perplexities of both models on the same windows.

    difference: value minus reference_value, with its standard error and interval; None for a single window.
    """

    windows: int
    tokens: int
    reference_value: float
    value: float
    difference: float
    stderr: float | None
    low: float | None
    high: float | None


@dataclass(frozen=True)
class Predictions(Record):
    """The distance of a model's predictions from the reference's, over the scored tokens of the perplexity's windows.

    reference: its name.
    mean_kl, p99_kl: mean and 99th percentile of KL(reference || model) in nats per token, over the whole vocabulary.
    low, high: the ends of the mean's interval over windows; None for a single window.
    same_top_share: of tokens where both models hold the same next token most likely.
    """

    reference: str
    mean_kl: float
    low: float | None
    high: float | None
    p99_kl: float
    same_top_share: float
    tokens: int


@dataclass(frozen=True)
class ComparisonDocument(Record):
    """One model against another.

    margin: in points.
    overall: None where nothing could be pooled.
    left_out: sentences that say what was not compared, and why.
    remarks: other differences between the evaluations.
    """

    reference: str
    other: str
    margin: float
    tasks: list[TaskComparison]
    overall: PooledComparison | None
    perplexity: PerplexityComparison | None
    predictions: Predictions | None
    left_out: list[str] = field(default_factory=list)
    remarks: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class Comparisons(Record):
    """Each later model against the first: the document that ``ladderize compare`` writes."""

    comparisons: list[ComparisonDocument]


# ---- intervals ----


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
    result = bootstrap(
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
    low, high = map(float, result.confidence_interval)
    if not (math.isfinite(low) and math.isfinite(high)) or low == high:
        return Estimate()
    return Estimate(low, high, float(result.standard_error))


def estimate_mean(strata: Sequence["Floats"], *, bounded: bool = True) -> Estimate:
    """Estimate the mean of the strata's means.

    strata: the differences of each task.
    bounded: no difference is beyond -1 and 1, so the imagined samples are known.
    """
    extremes = [-1.0, 1.0] if bounded else []
    columns = [np.concatenate([stratum, extremes]) for stratum in strata]
    return bootstrapped(
        lambda *parts, axis=-1: sum(part.mean(axis) for part in parts) / len(parts), *columns, paired=False
    )


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


def verdict_of(
    estimate: Estimate, weights: Sequence[float], margin: float, *, higher_is_better: bool = True
) -> tuple[Verdict, int | None]:
    """Return the verdict on an estimated difference, and the number of samples needed where these were too few.

    A margin is shown where the whole interval lies above its loss: a one-sided test that aims at 2.5 % (2 to 7 % where
    few answers changed, since the interval's end moves by whole answers). The samples needed show it with a chance of
    80 % if the models are equally good: n = (z0.975 + z0.8)**2 sigma**2 / margin**2, the usual formula for paired
    differences (Julious, "Sample sizes for clinical trials with Normal data", Statistics in Medicine 23, 2004), and at
    least ``least_samples``.

    weights: of each sample in the mean; their sum is 1.
    margin: in points.
    """
    samples, margin = len(weights), margin * POINT
    least = least_samples(margin)
    if estimate.low is None or estimate.high is None or estimate.stderr is None:
        return "too few samples", max(math.ceil(least), samples + 1)
    z = NormalDist().inv_cdf(1 - TAIL) + NormalDist().inv_cdf(POWER)
    evenness = 1 / sum(weight**2 for weight in weights)  # the number of samples where all weigh the same
    needed = math.ceil(max(samples * (z * estimate.stderr / margin) ** 2, least * samples / evenness))
    low, high = (estimate.low, estimate.high) if higher_is_better else (-estimate.high, -estimate.low)
    if high < -margin:
        return "worse", None
    verdict: Verdict = "shown" if low > -margin else "not shown"
    is_enough = evenness >= least if verdict == "shown" else samples >= needed
    return (verdict, None) if is_enough else ("too few samples", needed)
