"""One task's metrics, question by question. Imports no torch."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from ladderize.errors import UserError
from ladderize.eval.paired.answers import Value, as_value
from ladderize.eval.paired.clusters import cluster_codes
from ladderize.eval.paired.document import POINT, CompareOptions, TaskComparison
from ladderize.eval.paired.entry import ComparedModel
from ladderize.eval.paired.statistics.bootstrap import (
    Estimate,
    Stratum,
    cluster_sums,
    estimate_mean,
    generator,
    resampled_means,
)
from ladderize.eval.paired.statistics.flips import Flips
from ladderize.eval.paired.statistics.margin import judge, samples_needed
from ladderize.eval.paired.statistics.scale import AGGREGATIONS, SCALES, Scale, scaled_difference
from ladderize.eval.paired.statistics.terms import TOO_FEW

if TYPE_CHECKING:
    from numpy.typing import NDArray

    Floats = NDArray[np.float64]

MAIN_METRICS = (
    "acc_norm",
    "acc",
    "exact_match",
    "em",
    "f1",
)  # which of several stands for its task, the first there is
CLOSE = 1e-6  # relative: how exactly samples give the value in the results


@dataclass(frozen=True)
class Compared:
    """A metric of a task with what pooling needs: the clusters' differences and the resampled means of these; None
    where the metric cannot be pooled."""

    comparison: TaskComparison
    stratum: Stratum | None = None
    draws: "Floats | None" = None


@dataclass(frozen=True)
class _Pairs:
    """A metric's values on the documents that have it. reference, other, weights: [n]; a value counts as weight in the
    mean. places: of the samples among all of the task."""

    task: str
    metric: str
    filter: str
    reference: "Floats"
    other: "Floats"
    weights: "Floats"
    places: "NDArray[np.int64]"


def compare_task(
    reference: ComparedModel, other: ComparedModel, task: str, options: CompareOptions
) -> tuple[list[Compared], list[str]]:
    """All metrics of one task that both models answered alike (``comparable`` has checked it), and sentences about
    those that cannot be compared. Raises UserError where the samples are not those of the results."""
    found, left_out = [], []
    for name, answers in reference.answers[task].items():
        clusters = cluster_codes(answers, options.cluster_by)
        for metric in answers.values:
            if options.metrics is not None and metric not in options.metrics:
                continue
            pairs = _pairs(reference, other, task, metric, name)
            scale = _scale(reference, other, pairs) if isinstance(pairs, _Pairs) else pairs
            if isinstance(scale, str) or isinstance(pairs, str):
                left_out.append(f"{task}: {metric}{_of_filter(name)} was not compared, since {scale}")
            else:
                doc_ids = np.asarray(answers.doc_ids)[pairs.places]
                codes = np.unique(clusters[pairs.places], return_inverse=True)[1].ravel()
                found.append(_compare(reference, pairs, scale, codes, doc_ids, options))
    seen = {(metric, name) for name, answers in reference.answers[task].items() for metric in answers.values}
    for key in reference.object_of_task("results", task):
        metric, _, name = key.partition(",")
        wanted = options.metrics is None or metric in options.metrics
        if name and wanted and "_stderr" not in metric and (metric, name) not in seen:
            left_out.append(f"{task}: {metric}{_of_filter(name)} was not compared, since the samples do not have it")
    return _with_main(found), left_out


def _pairs(reference: ComparedModel, other: ComparedModel, task: str, metric: str, name: str) -> _Pairs | str:
    """The values of both models; or why there are none."""
    ours, theirs = (entry.answers[task][name].values.get(metric, {}) for entry in (reference, other))
    if ours.keys() != theirs.keys():
        return "the models do not have it on the same samples"
    doc_ids = sorted(ours)
    values = [[_weighted(known[doc_id]) for doc_id in doc_ids] for known in (ours, theirs)]
    if any(value is None for known in values for value in known):
        return "its values in the samples are no finite numbers"
    first, second = (np.array(known, dtype=float) for known in values)
    if not np.array_equal(first[:, 1], second[:, 1]):
        return "the models' samples count with other weights"
    places = np.searchsorted(reference.answers[task][name].doc_ids, doc_ids)
    return _Pairs(task, metric, name, first[:, 0], second[:, 0], first[:, 1], places)


def _weighted(value: Value) -> tuple[float, float] | None:
    return (value, 1.0) if isinstance(value, float) else value


def _scale(reference: ComparedModel, other: ComparedModel, pairs: _Pairs) -> Scale | str:
    """The scale on which the samples give the values that lm-eval has; or why there is none."""
    shown = [
        entry.object_of_task("results", pairs.task).get(f"{pairs.metric},{pairs.filter}")
        for entry in (reference, other)
    ]
    means = [float(sums.sum() / pairs.weights.sum()) for sums in (pairs.reference, pairs.other)]
    for scale in SCALES:
        if all(_is_close(value, float(scale(mean))) for value, mean in zip(shown, means, strict=True)):
            return scale
    for entry, value, mean in zip((reference, other), shown, means, strict=True):
        if _aggregation(entry, pairs.task, pairs.metric) == "mean" and not _is_close(value, mean):
            raise UserError(
                f"the samples of {pairs.task} are not those of {entry.where}: {pairs.metric} is {value} there, but"
                f" {mean:.6g} by the samples; evaluate the model again"
            )
    return "lm-eval does not take a mean of it"


def _is_close(value: Any, computed: float) -> bool:
    number = as_value(value)
    return isinstance(number, float) and abs(number - computed) <= CLOSE * max(1.0, abs(computed))


def _aggregation(entry: ComparedModel, task: str, metric: str) -> str | None:
    """What the task's configuration says; a metric that it does not name is none that we know."""
    rows = entry.object_of_task("configs", task).get("metric_list")
    named = (
        [row for row in rows if isinstance(row, dict) and row.get("metric") == metric] if isinstance(rows, list) else []
    )
    chosen = named[0].get("aggregation") if named else None
    return AGGREGATIONS.get(chosen) if isinstance(chosen, str) else None


def _compare(
    reference: ComparedModel,
    pairs: _Pairs,
    scale: Scale,
    clusters: "NDArray[np.int64]",
    doc_ids: "NDArray[np.int64]",
    options: CompareOptions,
) -> Compared:
    rng = generator(options.seed, f"{pairs.task} {pairs.metric} {pairs.filter}")
    better = reference.object_of_task("higher_is_better", pairs.task).get(pairs.metric)
    values = np.concatenate([pairs.reference, pairs.other])
    weighs_alike = bool((pairs.weights == 1).all()) and scale.name == "mean"
    bounded = weighs_alike and bool(((values >= 0) & (values <= 1)).all()) and isinstance(better, bool)
    binary = bounded and bool(np.isin(values, (0, 1)).all())
    right = (pairs.reference, pairs.other) if better else (1 - pairs.reference, 1 - pairs.other)
    flips = Flips.of(*right) if binary else None
    comparison = TaskComparison(
        task=pairs.task,
        metric=pairs.metric,
        filter=pairs.filter,
        main=False,
        higher_is_better=better if isinstance(better, bool) else None,
        samples=len(values) // 2,
        clusters=int(clusters.max()) + 1,
        reference_value=float(scale(pairs.reference.sum() / pairs.weights.sum())),
        value=float(scale(pairs.other.sum() / pairs.weights.sum())),
        difference=0.0,
        low=None,
        high=None,
        mcnemar_p=flips.mcnemar_p if flips else None,
        right_to_wrong=len(flips.right_to_wrong) if flips else None,
        wrong_to_right=len(flips.wrong_to_right) if flips else None,
        right_to_wrong_docs=doc_ids[flips.right_to_wrong].tolist() if flips else None,
        wrong_to_right_docs=doc_ids[flips.wrong_to_right].tolist() if flips else None,
        verdict=None,
        samples_needed=None,
    )
    if not weighs_alike:
        sums = [cluster_sums(part, clusters) for part in (pairs.reference, pairs.other, pairs.weights)]
        shown = scaled_difference(scale, sums[0], sums[1], sums[2], options.resamples, rng)
        return Compared(replace(comparison, difference=shown.difference, low=shown.low, high=shown.high))
    stratum = Stratum.of(pairs.other - pairs.reference, clusters, 1.0 if bounded else None)
    draws = resampled_means(stratum, options.resamples, rng)
    found = estimate_mean([stratum], [1.0], [draws], rng)
    comparison = replace(comparison, difference=found.mean, low=found.low, high=found.high)
    if not bounded:
        return Compared(comparison)
    return Compared(_judged(comparison, found, options), stratum, draws)


def _judged(comparison: TaskComparison, found: Estimate, options: CompareOptions) -> TaskComparison:
    """With the verdict; a gain is a difference for the better."""
    margin = options.margin * POINT
    needed = samples_needed(found, comparison.samples, margin)
    if found.low is None or found.high is None:
        return replace(comparison, verdict=TOO_FEW, samples_needed=max(needed, comparison.samples + 1))
    gain = (found.low, found.high) if comparison.higher_is_better else (-found.high, -found.low)
    verdict = judge(*gain, margin, comparison.samples, needed)
    return replace(comparison, verdict=verdict, samples_needed=needed if verdict == TOO_FEW else None)


def _with_main(found: list[Compared]) -> list[Compared]:
    """With that metric marked that stands for the task: one in which more is better, so that tasks can be pooled."""
    fit = [one for one in found if one.stratum is not None and one.comparison.higher_is_better]
    ranks = {metric: rank for rank, metric in enumerate(MAIN_METRICS)}
    chosen = min(fit, key=lambda one: ranks.get(one.comparison.metric, len(ranks)), default=None)
    return [replace(one, comparison=replace(one.comparison, main=one is chosen)) for one in found]


def _of_filter(name: str) -> str:
    return "" if name == "none" else f" ({name})"


def main_metrics(found: list[Compared]) -> Iterator[Compared]:
    """Those that stand for their tasks."""
    return (one for one in found if one.comparison.main)
