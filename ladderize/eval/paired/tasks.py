"""One task's metrics, question by question. Imports no torch."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from ladderize.errors import UserError
from ladderize.eval.paired.document import POINT, CompareOptions, TaskComparison
from ladderize.eval.paired.samples import ComparedModel, finite_number
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
    import pandas
    from numpy.typing import NDArray

    Floats = NDArray[np.float64]

MAIN_METRICS = ("acc_norm", "acc", "exact_match", "em", "f1")  # of several the first stands for its task
CLOSE = 1e-6  # relative: how exactly samples give the value in the results
# fields of documents that hold a passage in lm-eval's tasks, the first one there is counts
PASSAGES = ("passage", "context", "article", "story", "paragraph")
EACH_ALONE = "none"  # of --cluster-by: every sample stands alone


@dataclass(frozen=True)
class Compared:
    """A metric of a task with what pooling needs; None where the metric cannot be pooled."""

    comparison: TaskComparison
    stratum: Stratum | None = None  # the differences of its clusters
    draws: "Floats | None" = None  # resampled means of these


class _NotComparable(Exception):
    """Why a metric is left out."""


def compare_task(
    reference: ComparedModel, other: ComparedModel, task: str, options: CompareOptions
) -> tuple[list[Compared], list[str]]:
    """All metrics of one task that both models answered alike (``comparable`` has checked it), and sentences about
    those that cannot be compared. Raises UserError where the samples are not those of the results."""
    found, left_out = [], []
    seen = set()
    for name, ours in reference.samples[task].items():
        clusters = cluster_codes(ours, options.cluster_by)
        weights = ours.filter(regex="^weight ").dropna(axis="columns", how="all")
        for metric in weights.columns.str.removeprefix("weight "):
            seen.add((metric, name))
            if options.metrics is not None and metric not in options.metrics:
                continue
            try:
                pairs = _pairs(ours, other.samples[task][name], metric)
                scale = _scale((reference, other), (task, metric, name), pairs)
            except _NotComparable as reason:
                left_out.append(f"{task}: {metric_name(metric, name)} was not compared, since {reason}")
                continue
            codes = np.unique(clusters[weights[f"weight {metric}"].notna()], return_inverse=True)[1].ravel()
            found.append(_compare(reference, (task, metric, name), pairs, scale, codes, options))
    for key in reference.object_of_task("results", task):
        metric, _, name = key.partition(",")
        wanted = options.metrics is None or metric in options.metrics
        if name and wanted and "_stderr" not in metric and (metric, name) not in seen:
            left_out.append(f"{task}: {metric_name(metric, name)} was not compared, since the samples do not have it")
    return _with_main(found), left_out


def _with_main(found: list[Compared]) -> list[Compared]:
    """With that metric marked that stands for the task: one in which more is better, so that tasks can be pooled."""
    fit = [one for one in found if one.stratum is not None and one.comparison.higher_is_better]
    ranks = {metric: rank for rank, metric in enumerate(MAIN_METRICS)}
    chosen = min(fit, key=lambda one: ranks.get(one.comparison.metric, len(ranks)), default=None)
    return [replace(one, comparison=replace(one.comparison, main=one is chosen)) for one in found]


# ---- which samples belong together: questions about one passage are not independent ----


def check_cluster_field(field: str | None, reference: ComparedModel) -> None:
    """Raise UserError where the documents of no task have the field."""
    tables = [table for filters in reference.samples.values() for table in filters.values()]
    known = {name.removeprefix("doc ") for table in tables for name in table.filter(regex="^doc ")}
    if field not in (None, EACH_ALONE) and field not in known:
        raise UserError(
            f"--cluster-by {field}: no document has this field with text; there are"
            f" {', '.join(sorted(known)) or 'none'}"
        )


def cluster_codes(samples: "pandas.DataFrame", field: str | None) -> "NDArray[np.int64]":
    """The number of each sample's cluster: [n]. field: as ``CompareOptions.cluster_by``.

    A sample without the field is a cluster of its own. A field that is chosen here for its name, but is the same in all
    samples, is an instruction rather than a passage.
    """
    alone = np.arange(len(samples))
    names = PASSAGES if field is None else (field,)
    chosen = next((samples[f"doc {name}"] for name in names if f"doc {name}" in samples), None)
    if chosen is None or field == EACH_ALONE or (field is None and chosen.nunique(dropna=False) == 1):
        return alone
    codes = chosen.factorize()[0]  # -1 where there is none
    return np.where(codes < 0, len(samples) + alone, codes)


# ---- one metric ----

Metric = tuple[str, str, str]  # a task, its metric, and the filter


def _pairs(ours: "pandas.DataFrame", theirs: "pandas.DataFrame", metric: str) -> "pandas.DataFrame":
    """Both models' values (``reference``, ``other``) on the documents that have the metric, and the ``weight`` of each
    in the mean; raises _NotComparable."""
    columns = {"value": f"value {metric}", "weight": f"weight {metric}"}
    if columns["weight"] not in theirs:
        raise _NotComparable("the models do not have it on the same samples")
    table = ours[[*columns.values()]].set_axis(["reference", "weight"], axis="columns")
    table["other"], table["weight of other"] = theirs[columns["value"]], theirs[columns["weight"]]
    if (table["weight"].notna() != table["weight of other"].notna()).any():
        raise _NotComparable("the models do not have it on the same samples")
    table = table[table["weight"].notna()]
    if table.isna().to_numpy().any():
        raise _NotComparable("its values in the samples are no finite numbers")
    if (table["weight"] != table["weight of other"]).any():
        raise _NotComparable("the models' samples count with other weights")
    return table


def _scale(both: tuple[ComparedModel, ComparedModel], key: Metric, pairs: "pandas.DataFrame") -> ScaleName:
    """The scale on which the samples give the values that lm-eval has; raises _NotComparable."""
    task, metric, name = key
    models = [
        (entry, entry.object_of_task("results", task).get(f"{metric},{name}"), mean)
        for entry, mean in zip(both, _means(pairs), strict=True)
    ]
    for scale in dict.fromkeys(AGGREGATIONS.values()):
        if all(is_close(value, float(on_scale(scale, mean))) for _, value, mean in models):
            return scale
    for entry, value, mean in models:
        rows = entry.object_of_task("configs", task).get("metric_list")
        named = [row for row in (rows if isinstance(rows, list) else []) if isinstance(row, Mapping)]
        aggregation = next((row.get("aggregation") for row in named if row.get("metric") == metric), None)
        if aggregation == "mean" and not is_close(value, mean):
            raise UserError(
                f"the samples of {task} are not those of {entry.where}: {metric} is {value} there, but {mean:.6g} by"
                " the samples; evaluate the model again"
            )
    raise _NotComparable("lm-eval does not take a mean of it")


def _means(pairs: "pandas.DataFrame") -> list[float]:
    return [float(pairs[name].sum() / pairs["weight"].sum()) for name in ("reference", "other")]


def is_close(value: Any, computed: float) -> bool:
    """Whether a value in lm-eval's results is what the samples give."""
    number = finite_number(value)
    return number is not None and abs(number - computed) <= CLOSE * max(1.0, abs(computed))


def _compare(
    reference: ComparedModel,
    key: Metric,
    pairs: "pandas.DataFrame",
    scale: ScaleName,
    clusters: "NDArray[np.int64]",
    options: CompareOptions,
) -> Compared:
    task, metric, name = key
    rng = generator(options.seed, " ".join(key))
    better = reference.object_of_task("higher_is_better", task).get(metric)
    better = better if isinstance(better, bool) else None
    before, after, weights = (pairs[column].to_numpy() for column in ("reference", "other", "weight"))
    values, difference = np.concatenate([before, after]), after - before
    weighs_alike = bool((weights == 1).all()) and scale == "mean"
    is_bounded = weighs_alike and bool(((values >= 0) & (values <= 1)).all()) and better is not None
    means = [float(on_scale(scale, mean)) for mean in _means(pairs)]
    more: dict[str, Any] = {"verdict": None, "samples_needed": None, **dict.fromkeys(FLIPS)}
    stratum, draws = None, None
    if weighs_alike:
        stratum = Stratum.of(difference, clusters, 1.0 if is_bounded else None)
        draws = resampled_means(stratum, options.resamples, rng)
        found = estimate_mean([stratum], [1.0], [draws], rng)
        more |= {"difference": found.mean, "low": found.low, "high": found.high}
        if is_bounded:
            more["verdict"], more["samples_needed"] = verdict_of(
                found, len(pairs), options.margin * POINT, higher_is_better=bool(better)
            )
            if np.isin(values, (0, 1)).all():
                more |= _flips(pairs, difference if better else -difference)
    else:
        ours, theirs, sizes = (cluster_sums(part, clusters) for part in (before, after, weights))
        shown = scaled_difference(scale, ours, theirs, sizes, options.resamples, rng)
        more |= {"difference": shown.difference, "low": shown.low, "high": shown.high}
    comparison = TaskComparison(
        task=task,
        metric=metric,
        filter=name,
        main=False,
        higher_is_better=better,
        samples=len(pairs),
        clusters=int(clusters.max()) + 1,
        reference_value=means[0],
        value=means[1],
        **more,
    )
    return Compared(comparison, stratum, draws) if is_bounded else Compared(comparison)


FLIPS = ("mcnemar_p", "right_to_wrong", "wrong_to_right", "right_to_wrong_docs", "wrong_to_right_docs")


def _flips(pairs: "pandas.DataFrame", gains: "Floats") -> dict[str, Any]:
    """Answers that changed, of a metric that is 0 or 1: an accuracy that stays equal can hide them."""
    lost, gained = (pairs.index[changed].tolist() for changed in (gains < 0, gains > 0))
    return dict(zip(FLIPS, (mcnemar_exact(len(lost), len(gained)), len(lost), len(gained), lost, gained), strict=True))
