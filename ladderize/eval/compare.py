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
    check_same,
    check_same_questions,
    evaluation_remarks,
    finite_number,
    read_models,
)
from ladderize.eval.comparison import (
    CONFIDENCE,
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
from ladderize.eval.options import CompareOptions

if TYPE_CHECKING:
    from numpy.typing import NDArray

    Floats = NDArray[np.float64]

MAIN_METRICS = ("acc_norm", "acc", "exact_match", "em", "f1")  # the first of these that a task has stands for it
CLOSE = 1e-6  # relative: how closely the samples' mean must match the results
MAX_TOKENS, MAX_NATS = 2**40, 700.0  # of a window; per token: exp(700) is the largest perplexity


def compare(files: Iterable[str | Path], options: CompareOptions | None = None) -> Comparisons:
    """Compare each model of stored evaluations with the first one of the first file.

    files: results.json of ``ladderize eval`` or a folder with one, or results_*.json of ``lm_eval --log_samples``.
    Raises UserError for models that were not asked the same, and says what differs.
    """
    models = [model for file in files for model in read_models(Path(file))]
    if len(models) < 2:
        names = ", ".join(model.name for model in models) or "no model"
        raise UserError(f"there are no two models to compare, but only {names}; name another file")
    return Comparisons([compare_models(models[0], other, options or CompareOptions()) for other in models[1:]])


def compare_models(reference: AnsweredModel, other: AnsweredModel, options: CompareOptions) -> ComparisonDocument:
    """Compare everything that both models were asked. What cannot be compared is left out by name.

    Raises UserError, which says what differs, where a common task was asked in two ways, or nothing is common.
    """
    both = (reference, other)
    tasks = [task for task in reference.answers if task in other.answers]
    left_out = [f"{task}: only one of the models has it" for one in both for task in one.answers if task not in tasks]
    if tasks and reference.model is not None and other.model is not None:
        check_same("BOS token in front of texts", both, *(one.model and one.model.add_bos_token for one in both))
    compared: list[TaskComparison] = []
    for task in tasks:
        check_same_questions(both, task)
        measured = []
        for key in metrics_of(both, task):
            values = sample_values(both, task, *key)
            if isinstance(values, str):
                left_out.append(f"{task}: {metric_name(*key)} {values}")
            else:
                measured.append(compare_metric(both, task, *key, values, options))
        main = main_of(measured)
        compared += [replace(one, main=one is main) for one in measured]
    has_texts = all(one.model is not None and one.model.perplexity is not None for one in both)
    if has_texts and (reason := text_difference(both)):
        left_out.append(f"perplexity: {reason}")
        has_texts = False
    if not tasks and not has_texts:
        raise UserError(f"nothing was measured alike of both {reference.where} and {other.where}; {ADVICE}")
    predictions = other.model.predictions if other.model is not None and has_texts else None
    return ComparisonDocument(
        reference=reference.name,
        other=other.name,
        margin=options.margin,
        level=CONFIDENCE,
        tasks=compared,
        overall=pool(both, [one for one in compared if one.main], options),
        perplexity=compare_perplexity(both) if has_texts else None,
        predictions=predictions if predictions is not None and predictions.reference == reference.name else None,
        left_out=left_out,
        remarks=evaluation_remarks(both),
    )


# ---- tasks ----


def metrics_of(both: Pair, task: str) -> list[tuple[str, str]]:
    """Return metric and filter of everything that the samples or the results of a task name."""
    sampled = [
        (metric, name)
        for name, answers in both[0].answers[task].items()
        for answer in answers.values()
        for metric in answer.values
    ]
    keys = [key.partition(",") for key in both[0].harness.results.get(task, {}) if "_stderr" not in key]
    return list(dict.fromkeys([*sampled, *((metric, name) for metric, _, name in keys if name)]))


def sample_values(both: Pair, task: str, metric: str, name: str) -> "tuple[Floats, Floats] | str":
    """Return a metric of both models' samples, in the order of doc_id, or why it cannot be compared.

    name: of the filter.
    """
    columns = []
    for one in both:
        answers = both[0].answers[task].get(name, {})
        values = [one.answers[task][name][doc].values.get(metric) for doc in sorted(answers)]
        if not values or all(metric not in answer.values for answer in answers.values()):
            return "is not in the samples"
        if None in values:
            return "is not a number for every sample"
        column = np.array(values, dtype=float)
        reported, mean = finite_number(one.harness.results.get(task, {}).get(f"{metric},{name}")), column.mean()
        if reported is None or abs(reported - mean) > CLOSE * max(1.0, abs(mean)):
            return "is no mean over samples"
        columns.append(column)
    return columns[0], columns[1]


def compare_metric(
    both: Pair, task: str, metric: str, name: str, values: "tuple[Floats, Floats]", options: CompareOptions
) -> TaskComparison:
    """Compare one metric of one task.

    name: of the filter.
    values: of both models' samples, in the order of doc_id.
    """
    said = both[0].harness.higher_is_better.get(task, {}).get(metric)
    better = said if isinstance(said, bool) else None
    everything, difference = np.concatenate(values), values[1] - values[0]
    is_share = better is not None and bool(((everything >= 0) & (everything <= 1)).all())
    estimate = estimate_mean([difference], bounded=is_share)
    verdict = needed = lost = gained = None
    if is_share and better is not None:
        weights = [1 / len(difference)] * len(difference)
        verdict, needed = verdict_of(estimate, weights, options.margin, higher_is_better=better)
        if np.isin(everything, (0, 1)).all():
            docs, gains = np.array(sorted(both[0].answers[task][name])), difference if better else -difference
            lost, gained = docs[gains < 0].tolist(), docs[gains > 0].tolist()
    return TaskComparison(
        task=task,
        metric=metric,
        filter=name,
        main=False,
        higher_is_better=better,
        samples=len(difference),
        reference_value=float(values[0].mean()),
        value=float(values[1].mean()),
        difference=float(difference.mean()),
        low=estimate.low,
        high=estimate.high,
        verdict=verdict,
        samples_needed=needed,
        mcnemar_p=None if lost is None or gained is None else mcnemar_p(len(lost), len(gained)),
        right_to_wrong=None if lost is None else len(lost),
        wrong_to_right=None if gained is None else len(gained),
        right_to_wrong_docs=lost,
        wrong_to_right_docs=gained,
    )


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


def pool(both: Pair, mains: Sequence[TaskComparison], options: CompareOptions) -> PooledComparison | None:
    """Return the mean of the tasks' main metrics; None where there are none."""
    if not mains:
        return None
    by_task = {one.task: one for one in mains}
    units = pooled_units(both[0].harness.group_subtasks, list(by_task))
    strata = [np.concatenate([_differences(both, by_task[task]) for task in unit]) for unit in units]
    weights = [1 / len(units) / len(stratum) for stratum in strata for _ in stratum]
    estimate = estimate_mean(strata)
    verdict, needed = verdict_of(estimate, weights, options.margin)

    def mean(name: str) -> float:
        sums = [sum(getattr(by_task[task], name) * by_task[task].samples for task in unit) for unit in units]
        return sum(total / len(stratum) for total, stratum in zip(sums, strata, strict=True)) / len(units)

    return PooledComparison(
        tasks=list(by_task),
        samples=len(weights),
        reference_value=mean("reference_value"),
        value=mean("value"),
        difference=mean("difference"),
        low=estimate.low,
        high=estimate.high,
        verdict=verdict,
        samples_needed=needed,
    )


def _differences(both: Pair, one: TaskComparison) -> "Floats":
    values = sample_values(both, one.task, one.metric, one.filter)
    assert not isinstance(values, str)
    return values[1] - values[0]


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
    groups = [group for group, children in group_subtasks.items() if children]
    return [units[name] for name in sorted(units, key=lambda name: (*groups, name).index(name))]


# ---- a text ----


def text_difference(both: Pair) -> str | None:
    """Return why the perplexities cannot be compared; None where they can.

    Raises UserError for windows that are missing or impossible.
    """
    (_, tokens), (_, others) = map(_windows, both)
    hashes = {one.model.perplexity.ids_sha256 for one in both if one.model is not None and one.model.perplexity}
    same = len(hashes) == 1 and np.array_equal(tokens, others)
    return None if same else "the windows differ (the file, --seq-len, --windows, or the tokenizer)"


def _windows(entry: AnsweredModel) -> tuple["Floats", "Floats"]:
    """Return the nats and the scored tokens of each window. Raises UserError where they are missing or impossible."""
    measured = entry.model.perplexity if entry.model is not None else None
    nll, tokens = (measured.window_nll, measured.window_tokens) if measured is not None else (None, None)
    if (
        not nll
        or not tokens
        or len(nll) != len(tokens)
        or not all(0 < n <= MAX_TOKENS and 0 <= nats <= MAX_NATS * n for nats, n in zip(nll, tokens, strict=True))
    ):
        raise UserError(f"{entry.where} has no windows of its perplexity that fit together; evaluate the model again")
    return np.asarray(nll, dtype=float), np.asarray(tokens, dtype=float)


def compare_perplexity(both: Pair) -> PerplexityComparison:
    """Compare the perplexities of the same windows, window by window."""
    (ours, tokens), (theirs, _) = map(_windows, both)

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
        ratio=value / reference_value,
    )
