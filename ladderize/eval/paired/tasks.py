"""One task's metrics, question by question. Imports no torch."""

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from ladderize.errors import UserError
from ladderize.eval.paired.answers import Value, as_value, cluster_codes
from ladderize.eval.paired.document import POINT, CompareOptions, TaskComparison, Verdict
from ladderize.eval.paired.entry import ComparedModel
from ladderize.eval.paired.statistics import (
    AGGREGATIONS,
    ScaleName,
    Stratum,
    cluster_sums,
    estimate_mean,
    generator,
    mcnemar_exact,
    on_scale,
    resampled_means,
    scaled_difference,
    verdict_of,
)
from ladderize.eval.paired.words import metric_name

if TYPE_CHECKING:
    from numpy.typing import NDArray

    Floats = NDArray[np.float64]

MAIN_METRICS = ("acc_norm", "acc", "exact_match", "em", "f1")  # of several the first stands for its task
CLOSE = 1e-6  # relative: how exactly samples give the value in the results


@dataclass(frozen=True)
class Compared:
    """A metric of a task with what pooling needs; None where the metric cannot be pooled."""

    comparison: TaskComparison
    stratum: Stratum | None = None  # the differences of its clusters
    draws: "Floats | None" = None  # resampled means of these


class _NotComparable(Exception):
    """Why a metric is left out."""


@dataclass(frozen=True)
class _Pairs:
    """A metric's values on the documents that have it, each [n]."""

    task: str
    metric: str
    filter: str
    reference: "Floats"
    other: "Floats"
    weights: "Floats"  # of each value in the mean
    places: "NDArray[np.int64]"  # of the samples among all of the task

    @property
    def means(self) -> list[float]:
        return [float(values.sum() / self.weights.sum()) for values in (self.reference, self.other)]


def compare_task(
    reference: ComparedModel, other: ComparedModel, task: str, options: CompareOptions
) -> tuple[list[Compared], list[str]]:
    """All metrics of one task that both models answered alike (``comparable`` has checked it), and sentences about
    those that cannot be compared. Raises UserError where the samples are not those of the results."""
    found, left_out = [], []
    seen = set()
    for name, answers in reference.answers[task].items():
        clusters = cluster_codes(answers, options.cluster_by)
        for metric in answers.values:
            seen.add((metric, name))
            if options.metrics is not None and metric not in options.metrics:
                continue
            try:
                pairs = _pairs(reference, other, task, metric, name)
                scale = _scale(reference, other, pairs)
            except _NotComparable as reason:
                left_out.append(f"{task}: {metric_name(metric, name)} was not compared, since {reason}")
                continue
            doc_ids = np.asarray(answers.doc_ids)[pairs.places]
            codes = np.unique(clusters[pairs.places], return_inverse=True)[1].ravel()
            found.append(_compare(reference, pairs, scale, codes, doc_ids, options))
    for key in reference.object_of_task("results", task):
        metric, _, name = key.partition(",")
        wanted = options.metrics is None or metric in options.metrics
        if name and wanted and "_stderr" not in metric and (metric, name) not in seen:
            left_out.append(f"{task}: {metric_name(metric, name)} was not compared, since the samples do not have it")
    return _with_main(found), left_out


def _pairs(reference: ComparedModel, other: ComparedModel, task: str, metric: str, name: str) -> _Pairs:
    """The values of both models; raises _NotComparable."""
    ours, theirs = (entry.answers[task][name].values.get(metric, {}) for entry in (reference, other))
    if ours.keys() != theirs.keys():
        raise _NotComparable("the models do not have it on the same samples")
    doc_ids = sorted(ours)
    values = [[_weighted(known[doc_id]) for doc_id in doc_ids] for known in (ours, theirs)]
    if any(value is None for known in values for value in known):
        raise _NotComparable("its values in the samples are no finite numbers")
    first, second = (np.array(known, dtype=float) for known in values)
    if not np.array_equal(first[:, 1], second[:, 1]):
        raise _NotComparable("the models' samples count with other weights")
    places = np.searchsorted(reference.answers[task][name].doc_ids, doc_ids)
    return _Pairs(task, metric, name, first[:, 0], second[:, 0], first[:, 1], places)


def _weighted(value: Value) -> tuple[float, float] | None:
    return (value, 1.0) if isinstance(value, float) else value


def _scale(reference: ComparedModel, other: ComparedModel, pairs: _Pairs) -> ScaleName:
    """The scale on which the samples give the values that lm-eval has; raises _NotComparable."""
    key = f"{pairs.metric},{pairs.filter}"
    models = [
        (entry, entry.object_of_task("results", pairs.task).get(key), mean)
        for entry, mean in zip((reference, other), pairs.means, strict=True)
    ]
    for scale in dict.fromkeys(AGGREGATIONS.values()):
        if all(_is_close(value, float(on_scale(scale, mean))) for _, value, mean in models):
            return scale
    for entry, value, mean in models:
        if _aggregation(entry, pairs.task, pairs.metric) == "mean" and not _is_close(value, mean):
            raise UserError(
                f"the samples of {pairs.task} are not those of {entry.where}: {pairs.metric} is {value} there, but"
                f" {mean:.6g} by the samples; evaluate the model again"
            )
    raise _NotComparable("lm-eval does not take a mean of it")


def _is_close(value: Any, computed: float) -> bool:
    number = as_value(value)
    return isinstance(number, float) and abs(number - computed) <= CLOSE * max(1.0, abs(computed))


def _aggregation(entry: ComparedModel, task: str, metric: str) -> ScaleName | None:
    """What the task's configuration says; None for a metric that it does not name."""
    rows = entry.object_of_task("configs", task).get("metric_list")
    for row in rows if isinstance(rows, list) else []:
        if isinstance(row, dict) and row.get("metric") == metric:
            chosen = row.get("aggregation")
            return AGGREGATIONS.get(chosen) if isinstance(chosen, str) else None
    return None


def _compare(
    reference: ComparedModel,
    pairs: _Pairs,
    scale: ScaleName,
    clusters: "NDArray[np.int64]",
    doc_ids: "NDArray[np.int64]",
    options: CompareOptions,
) -> Compared:
    rng = generator(options.seed, f"{pairs.task} {pairs.metric} {pairs.filter}")
    better = reference.object_of_task("higher_is_better", pairs.task).get(pairs.metric)
    better = better if isinstance(better, bool) else None
    values = np.concatenate([pairs.reference, pairs.other])
    weighs_alike = bool((pairs.weights == 1).all()) and scale == "mean"
    bounded = weighs_alike and bool(((values >= 0) & (values <= 1)).all()) and better is not None
    stratum, draws, flips = None, None, _Flips()
    verdict: Verdict | None = None
    needed: int | None = None
    if weighs_alike:
        stratum = Stratum.of(pairs.other - pairs.reference, clusters, 1.0 if bounded else None)
        draws = resampled_means(stratum, options.resamples, rng)
        found = estimate_mean([stratum], [1.0], [draws], rng)
        difference, low, high = found.mean, found.low, found.high
        if bounded:
            verdict, needed = verdict_of(
                found, len(pairs.places), options.margin * POINT, higher_is_better=bool(better)
            )
            if np.isin(values, (0, 1)).all():
                flips = _Flips.of(pairs.other - pairs.reference, doc_ids, bool(better))
    else:
        before, after, sizes = (cluster_sums(part, clusters) for part in (pairs.reference, pairs.other, pairs.weights))
        shown = scaled_difference(scale, before, after, sizes, options.resamples, rng)
        difference, low, high = shown.difference, shown.low, shown.high
    comparison = TaskComparison(
        task=pairs.task,
        metric=pairs.metric,
        filter=pairs.filter,
        main=False,
        higher_is_better=better,
        samples=len(pairs.places),
        clusters=int(clusters.max()) + 1,
        reference_value=float(on_scale(scale, pairs.means[0])),
        value=float(on_scale(scale, pairs.means[1])),
        difference=difference,
        low=low,
        high=high,
        **vars(flips),
        verdict=verdict,
        samples_needed=needed,
    )
    return Compared(comparison, stratum, draws) if bounded else Compared(comparison)


@dataclass(frozen=True)
class _Flips:
    """Answers that changed, of a metric that is 0 or 1: an accuracy that stays equal can hide them."""

    mcnemar_p: float | None = None
    right_to_wrong: int | None = None
    wrong_to_right: int | None = None
    right_to_wrong_docs: list[int] | None = None
    wrong_to_right_docs: list[int] | None = None

    @classmethod
    def of(cls, differences: "Floats", doc_ids: "NDArray[np.int64]", higher_is_better: bool) -> "_Flips":
        gains = differences if higher_is_better else -differences
        lost, gained = (doc_ids[changed].tolist() for changed in (gains < 0, gains > 0))
        return cls(mcnemar_exact(len(lost), len(gained)), len(lost), len(gained), lost, gained)


def _with_main(found: list[Compared]) -> list[Compared]:
    """With that metric marked that stands for the task: one in which more is better, so that tasks can be pooled."""
    fit = [one for one in found if one.stratum is not None and one.comparison.higher_is_better]
    ranks = {metric: rank for rank, metric in enumerate(MAIN_METRICS)}
    chosen = min(fit, key=lambda one: ranks.get(one.comparison.metric, len(ranks)), default=None)
    return [replace(one, comparison=replace(one.comparison, main=one is chosen)) for one in found]
