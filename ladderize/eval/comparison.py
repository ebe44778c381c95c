"""The documents of a comparison in pairs, as ``ladderize compare`` and ``eval`` write them. Imports no torch.

Both models answered the same questions, so each question is a pair. Measured are the differences within the pairs:
other minus reference.
"""

from dataclasses import dataclass, field
from typing import Literal

from ladderize.choices import check_options, option
from ladderize.errors import UsageError
from ladderize.files.records import Record

CONFIDENCE = 0.95  # of every interval
POINT = 0.01  # of a metric between 0 and 1

# The answer to: is the other model at most the margin worse? "worse": the interval shows that it is more than the
# margin worse. "too few samples": with so few, equally good models would show it in fewer than four of five cases.
Verdict = Literal["shown", "not shown", "too few samples", "worse"]


@dataclass(frozen=True)
class CompareOptions(Record):
    """Options of ``ladderize compare``."""

    margin: float = option("Points that may be lost: 1 is 0.01 of acc.", 1.0)

    def __post_init__(self) -> None:
        check_margin(self.margin)
        check_options(self)


def check_margin(margin: float) -> None:
    """Raise UsageError for an impossible margin in points."""
    if not 0 < margin <= 100:
        raise UsageError(f"--margin must be above 0 and at most 100 points, not {margin:g}")


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
    mcnemar_p, right_to_wrong, wrong_to_right: of metrics that are 0 or 1, else None.
    right_to_wrong_docs, wrong_to_right_docs: the doc_id of these samples, else None.
    """

    task: str
    metric: str
    filter: str
    main: bool
    higher_is_better: bool | None
    mcnemar_p: float | None
    right_to_wrong: int | None
    wrong_to_right: int | None
    right_to_wrong_docs: list[int] | None
    wrong_to_right_docs: list[int] | None


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
    ratio: value over reference_value.
    """

    windows: int
    tokens: int
    reference_value: float
    value: float
    difference: float
    stderr: float | None
    low: float | None
    high: float | None
    ratio: float


@dataclass(frozen=True)
class PredictionComparison(Record):
    """The distance of the other model's predictions from the reference's.

    mean_kl, p99_kl: mean and 99th percentile of KL(reference || other) in nats per token.
    low, high: the ends of the mean's interval over windows.
    same_top_share: the share of tokens with the same most likely next token.
    """

    windows: int
    tokens: int
    mean_kl: float
    low: float | None
    high: float | None
    p99_kl: float
    same_top_share: float


@dataclass(frozen=True)
class ComparisonDocument(Record):
    """One model against another.

    margin: in points.
    level: of all intervals.
    overall: None where nothing could be pooled.
    left_out: sentences that say what was not compared, and why.
    remarks: other differences between the evaluations.
    """

    reference: str
    other: str
    margin: float
    level: float
    tasks: list[TaskComparison]
    overall: PooledComparison | None
    perplexity: PerplexityComparison | None
    predictions: PredictionComparison | None
    left_out: list[str] = field(default_factory=list)
    remarks: list[str] = field(default_factory=list)

    @property
    def within_margin(self) -> bool:
        """True if the interval shows that the other model is at most the margin worse, over all tasks together."""
        return self.overall is not None and self.overall.verdict == "shown"


@dataclass(frozen=True)
class Comparisons(Record):
    """Each later model against the first: the document that ``ladderize compare`` writes."""

    comparisons: list[ComparisonDocument]
