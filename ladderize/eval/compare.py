"""Compares models that answered the same questions, in pairs. Imports no torch."""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from ladderize.errors import UserError
from ladderize.eval.answers import (
    ADVICE,
    AnsweredModel,
    Pair,
    check_same_questions,
    evaluation_remarks,
    finite_number,
    read_models,
)
from ladderize.eval.comparison import (
    ComparisonDocument,
    Comparisons,
    PerplexityComparison,
    PooledComparison,
    TaskComparison,
    bootstrapped,
    estimate_mean,
    mcnemar_p,
    verdict_of,
)
from ladderize.eval.options import MARGIN, check_margin

if TYPE_CHECKING:
    from numpy.typing import NDArray

    Floats = NDArray[np.float64]
    Values = tuple[Floats, Floats]  # a metric of both models' samples, in the order of doc_id

MAIN_METRICS = ("acc_norm", "acc", "exact_match", "em", "f1")  # the first of these that a task has stands for it
ENOUGH_WINDOWS = 8  # of a text: over fewer an interval by resampling is too narrow
CLOSE = 1e-6  # relative: how closely the samples' mean must match the results
MAX_TOKENS, MAX_NATS = 2**40, 700.0  # of a window; per token: exp(700) is the largest perplexity


def compare(files: Iterable[str | Path], margin: float = MARGIN) -> Comparisons:
    """Compare each model of stored evaluations with the first one of the first file.

    files: results.json of ``ladderize eval``.
    margin: points that may be lost: 1 is 0.01 of acc.
    Raises UserError for models that were not asked the same, and says what differs.
    """
    check_margin(margin)
    models = [model for file in files for model in read_models(Path(file))]
    if len(models) < 2:
        names = ", ".join(one.model.model for one in models) or "no model"
        raise UserError(f"there are no two models to compare, but only {names}; name another file")
    return Comparisons([compare_models(models[0], other, margin) for other in models[1:]])


def compare_models(reference: AnsweredModel, other: AnsweredModel, margin: float = MARGIN) -> ComparisonDocument:
    """Compare everything that both models were asked. What cannot be compared is left out by name.

    Raises UserError, which says what differs, where a common task was asked in two ways, or nothing is common.
    """
    both = (reference, other)
    tasks = [task for task in reference.answers if task in other.answers]
    left_out = [f"{task}: only one of the models has it" for one in both for task in one.answers if task not in tasks]
    compared: list[TaskComparison] = []
    mains: dict[str, tuple[TaskComparison, Values]] = {}
    for task in tasks:
        check_same_questions(both, task)
        samples = [(name, one) for name, each in reference.answers[task].items() for one in each.values()]
        measured = []
        for metric, name in dict.fromkeys((metric, name) for name, one in samples for metric in one.values):
            values = sample_values(both, task, metric, name)
            if values is None:
                left_out.append(f"{task}: {metric_name(metric, name)} is no mean of numbers over the questions")
            else:
                measured.append((compare_metric(both, task, metric, name, values, margin), values))
        if main := main_of([one for one, _ in measured]):
            mains[task] = next((one, values) for one, values in measured if one is main)
        compared += [replace(one, main=one is main) for one, _ in measured]
    perplexity = None
    if all(one.model.perplexity is not None for one in both):
        perplexity = compare_perplexity(both)
        if perplexity is None:
            left_out.append("perplexity: the windows differ (the file, --seq-len, --windows, or the tokenizer)")
    if not tasks and perplexity is None:
        raise UserError(f"nothing was measured alike of both {reference.where} and {other.where}; {ADVICE}")
    remarks = evaluation_remarks(both)
    if perplexity is not None and 1 < perplexity.windows < ENOUGH_WINDOWS:
        remarks.append(f"95 % intervals over only {perplexity.windows} windows of text are too narrow; score more")
    predictions = other.model.predictions if perplexity is not None else None
    return ComparisonDocument(
        reference=reference.model.model,
        other=other.model.model,
        margin=margin,
        tasks=compared,
        overall=pool(both, mains, margin) if mains else None,
        perplexity=perplexity,
        predictions=predictions if predictions and predictions.reference == reference.model.model else None,
        left_out=left_out,
        remarks=remarks,
    )


# ---- tasks ----


def sample_values(both: Pair, task: str, metric: str, name: str) -> "Values | None":
    """Return a metric of both models' samples; None where lm-eval's result is no mean of them.

    name: of the filter.
    """
    columns = []
    for one in both:
        answers = one.answers[task][name]
        values = [answers[doc].values.get(metric) for doc in sorted(answers)]
        reported = finite_number(one.harness.results.get(task, {}).get(f"{metric},{name}"))
        if None in values or reported is None:
            return None
        column = np.array(values, dtype=float)
        if abs(reported - column.mean()) > CLOSE * max(1.0, abs(column.mean())):
            return None
        columns.append(column)
    return columns[0], columns[1]


def compare_metric(both: Pair, task: str, metric: str, name: str, values: "Values", margin: float) -> TaskComparison:
    """Compare one metric of one task.

    name: of the filter.
    """
    said = both[0].harness.higher_is_better.get(task, {}).get(metric)
    better = said if isinstance(said, bool) else None
    everything, difference = np.concatenate(values), values[1] - values[0]
    is_share = better is not None and bool(((everything >= 0) & (everything <= 1)).all())
    flips: dict[str, Any] = {}
    if is_share and np.isin(everything, (0, 1)).all():
        docs, gains = np.array(sorted(both[0].answers[task][name])), difference if better else -difference
        lost, gained = docs[gains < 0].tolist(), docs[gains > 0].tolist()
        p = mcnemar_p(len(lost), len(gained))
        flips = {"mcnemar_p": p, "right_to_wrong": lost, "wrong_to_right": gained}
    return TaskComparison(
        task=task,
        metric=metric,
        filter=name,
        main=False,
        higher_is_better=better,
        **compare_means([values[0]], [values[1]], margin, better if is_share else None),
        **flips,
    )


def compare_means(
    ours: "Sequence[Floats]", theirs: "Sequence[Floats]", margin: float, better: bool | None = True
) -> dict[str, Any]:
    """Compare the means over strata of their means; return the fields of a ``MeanComparison``.

    ours, theirs: the values of each stratum, of the reference and of the other model.
    better: more is better; None where a margin in points has no meaning: not all values are between 0 and 1.
    """
    differences = [other - one for one, other in zip(ours, theirs, strict=True)]
    estimate = estimate_mean(differences, bounded=better is not None)
    weights = [1 / len(differences) / len(stratum) for stratum in differences for _ in stratum]
    verdict = needed = None
    if better is not None:
        verdict, needed = verdict_of(estimate, weights, margin, higher_is_better=better)
    before, after, difference = (
        float(np.mean([stratum.mean() for stratum in strata])) for strata in (ours, theirs, differences)
    )
    return {
        "samples": len(weights),
        "reference_value": before,
        "value": after,
        "difference": difference,
        "low": estimate.low,
        "high": estimate.high,
        "verdict": verdict,
        "samples_needed": needed,
    }


def main_of(metrics: Sequence[TaskComparison]) -> TaskComparison | None:
    """Return the metric that stands for its task; None where none does.

    More of it is better, so that tasks can be pooled.
    """
    ranks = {metric: rank for rank, metric in enumerate(MAIN_METRICS)}
    fit = [one for one in metrics if one.verdict and one.higher_is_better]
    return min(fit, key=lambda one: ranks.get(one.metric, len(ranks)), default=None)


def metric_name(metric: str, filter_name: str) -> str:
    """Return the metric's name, with lm-eval's filter where it has one."""
    return metric if filter_name == "none" else f"{metric} ({filter_name})"


# ---- all tasks as one number ----


def pool(both: Pair, mains: "Mapping[str, tuple[TaskComparison, Values]]", margin: float) -> PooledComparison:
    """Return the mean of the tasks' main metrics.

    mains: of each task, its main metric with the samples' values.
    """
    units = pooled_units(both[0].harness.group_subtasks, list(mains))
    ours, theirs = ([np.concatenate([mains[task][1][of] for task in unit]) for unit in units] for of in range(2))
    return PooledComparison(tasks=list(mains), **compare_means(ours, theirs, margin))


def pooled_units(group_subtasks: Mapping[str, list[str]], tasks: list[str]) -> list[list[str]]:
    """Return the tasks in lists, each of which counts as one task: the tasks of an outermost group of lm-eval, or a
    single one."""
    parents: dict[str, str] = {}
    for group, children in group_subtasks.items():
        for child in children:
            parents.setdefault(child, group)
    units: dict[str, list[str]] = {}
    for task in tasks:
        name, passed = task, {task}
        while (parent := parents.get(name)) is not None and parent not in passed:  # a stranger's groups may go round
            name = parent
            passed.add(name)
        units.setdefault(name, []).append(task)
    return list(units.values())


# ---- a text ----


def _windows(one: AnsweredModel) -> "tuple[Floats, Floats]":
    """Return the nats and the scored tokens of each window. Raises UserError where they are missing or impossible."""
    measured = one.model.perplexity
    nll, tokens = (measured.window_nll, measured.window_tokens) if measured is not None else (None, None)
    if (
        not nll
        or not tokens
        or len(nll) != len(tokens)
        or not all(0 < n <= MAX_TOKENS and 0 <= nats <= MAX_NATS * n for nats, n in zip(nll, tokens, strict=True))
    ):
        raise UserError(f"{one.where} has no windows of its perplexity that fit together; evaluate the model again")
    return np.asarray(nll, dtype=float), np.asarray(tokens, dtype=float)


def compare_perplexity(both: Pair) -> PerplexityComparison | None:
    """Compare the perplexities window by window; return None where the windows differ.

    Raises UserError for windows that are missing or impossible.
    """
    (ours, tokens), (theirs, others) = map(_windows, both)
    hashes = {one.model.perplexity and one.model.perplexity.ids_sha256 for one in both}
    if len(hashes) > 1 or not np.array_equal(tokens, others):
        return None

    def difference(ours: Any, theirs: Any, tokens: Any, axis: int = -1) -> Any:
        total = tokens.sum(axis)
        return np.exp(theirs.sum(axis) / total) - np.exp(ours.sum(axis) / total)

    reference_value, value = (math.exp(float(nll.sum() / tokens.sum())) for nll in (ours, theirs))
    estimate = bootstrapped(difference, ours, theirs, tokens)
    return PerplexityComparison(
        windows=len(tokens),
        tokens=int(tokens.sum()),
        reference_value=reference_value,
        value=value,
        difference=value - reference_value,
        stderr=estimate.stderr,
        low=estimate.low,
        high=estimate.high,
    )
