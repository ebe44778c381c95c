"""What a paired comparison of two models says: the documents that ``ladderize compare`` and ``eval`` write. Imports no
torch.

Both models answered the same questions, so each question is a pair, and what is measured is the difference within the
pairs: other minus reference.
"""

from dataclasses import dataclass, field
from typing import Literal

from ladderize.choices import check_options, distinct_names, option
from ladderize.errors import UsageError
from ladderize.files.records import Record

CONFIDENCE = 0.95  # of every interval
POINT = 0.01  # of a metric between 0 and 1
ALL = "all"  # the name of what pools all tasks

# Is the other model at most the margin worse? "worse": it is more than the margin worse, and the interval shows that.
# "too few samples": with so few, an equally good model shows it less often than in four of five cases.
Verdict = Literal["shown", "not shown", "too few samples", "worse"]
TOO_FEW: Verdict = "too few samples"
Weighting = Literal["tasks", "samples"]  # of a mean over several tasks


@dataclass(frozen=True)
class CompareOptions(Record):
    """How to compare."""

    margin: float = option("Points that may be lost: 1 is 0.01 of acc.", 1.0)
    resamples: int = option("Bootstrap resamples.", 10_000, min=100, max=1_000_000)
    seed: int = option("Seed of the bootstrap.", 0, min=0)
    cluster_by: str | None = option(
        "Resample samples together that share this field of their document; none: each alone.",
        metavar="FIELD",
        shown="passage, context, article, story or paragraph",
    )
    metrics: tuple[str, ...] | None = option(
        "Metrics to compare.", metavar="A,B", shown="all", parse=distinct_names, flags="--metric"
    )
    common: bool = option("Compare the tasks that both have, where one has more.", False)

    def __post_init__(self) -> None:
        check_margin(self.margin)
        check_options(self)


def check_margin(margin: float) -> None:
    """Raise UsageError for a margin in points that none can be."""
    if not 0 < margin <= 100:
        raise UsageError(f"--margin must be above 0 and at most 100 points, not {margin:g}")


@dataclass(frozen=True)
class MeanComparison(Record):
    """A mean over the same samples of both models."""

    samples: int
    clusters: int  # groups of samples that were resampled together
    reference_value: float
    value: float  # of the other model
    difference: float  # value minus reference_value
    low: float | None  # the ends of its interval; None where so few clusters have none
    high: float | None
    # None where a margin in points has no meaning: the metric is not between 0 and 1, or it is unknown whether more is
    # better
    verdict: Verdict | None
    # to have shown the margin with a chance of 80 % if the models were equally good; only where these were too few
    samples_needed: int | None


@dataclass(frozen=True)
class TaskComparison(MeanComparison):
    """One metric of one task."""

    task: str
    metric: str
    filter: str
    main: bool  # whether this metric stands for its task in what is pooled
    higher_is_better: bool | None
    # of metrics that are 0 or 1; the documents by their doc_id
    mcnemar_p: float | None
    right_to_wrong: int | None
    wrong_to_right: int | None
    right_to_wrong_docs: list[int] | None
    wrong_to_right_docs: list[int] | None


@dataclass(frozen=True)
class PooledComparison(MeanComparison):
    """The main metrics of several tasks as one number. Each task's samples are resampled within the task."""

    name: str  # of a group of lm-eval, or ``all``
    # the mean over tasks (a group of lm-eval counts as one task, in which its tasks weigh as lm-eval's group says), or
    # over samples
    weights: Weighting
    tasks: list[str]


@dataclass(frozen=True)
class PerplexityComparison(Record):
    """Perplexity on the same windows. difference: other minus reference, with its standard error and interval; ratio:
    other over reference, with its interval. stderr and intervals are None for a single window."""

    windows: int
    tokens: int
    reference_value: float
    value: float
    difference: float
    stderr: float | None
    low: float | None
    high: float | None
    ratio: float
    ratio_low: float | None
    ratio_high: float | None


@dataclass(frozen=True)
class PredictionComparison(Record):
    """How far the other model's predictions are from the reference's: the mean (with its interval over windows) and
    99th percentile of KL(reference || other) in nats per token, and the share of tokens with the same most likely
    next token."""

    windows: int
    tokens: int
    mean_kl: float
    low: float | None
    high: float | None
    p99_kl: float
    same_top_share: float


@dataclass(frozen=True)
class ComparisonDocument(Record):
    """One model against another. margin, resamples, seed, cluster_by: as in CompareOptions."""

    reference: str
    other: str
    margin: float
    level: float  # of all intervals
    resamples: int
    seed: int
    cluster_by: str | None
    tasks: list[TaskComparison]
    pooled: list[PooledComparison]
    perplexity: PerplexityComparison | None
    predictions: PredictionComparison | None
    left_out: list[str] = field(default_factory=list)  # what was not compared, and why
    remarks: list[str] = field(default_factory=list)  # what else the evaluations differed in

    @property
    def overall(self) -> PooledComparison | None:
        """All tasks as one number, the mean over tasks; None where nothing could be pooled."""
        return next((one for one in self.pooled if (one.name, one.weights) == (ALL, "tasks")), None)

    @property
    def within_margin(self) -> bool:
        """Whether the interval shows that the other model is at most the margin worse, over all tasks together."""
        return self.overall is not None and self.overall.verdict == "shown"


@dataclass(frozen=True)
class Comparisons(Record):
    """Each later model against the first: what ``ladderize compare`` writes."""

    comparisons: list[ComparisonDocument]
