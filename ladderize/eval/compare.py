"""Compares models that answered the same questions, in pairs. Imports no torch."""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from ladderize.errors import UserError
from ladderize.eval.answers import HASHES, AnsweredModel, finite_number, open_results
from ladderize.eval.comparison import (
    CONFIDENCE,
    CompareOptions,
    ComparisonDocument,
    Comparisons,
    PerplexityComparison,
    PooledComparison,
    PredictionComparison,
    TaskComparison,
)
from ladderize.eval.paired import bootstrapped, estimate_mean, mcnemar_p, verdict_of

if TYPE_CHECKING:
    from numpy.typing import NDArray

    Floats = NDArray[np.float64]

MAIN_METRICS = ("acc_norm", "acc", "exact_match", "em", "f1")  # the first of these that a task has stands for it
CLOSE = 1e-6  # relative: how closely the samples' mean must match the results
MAX_TOKENS, MAX_NATS = 2**40, 700.0  # of a window; per token: exp(700) is the largest perplexity
ADVICE = "evaluate both models alike, best in one `ladderize eval`"


def compare(
    files: Iterable[str | Path], options: CompareOptions | None = None, *, models: Sequence[str] = ()
) -> Comparisons:
    """Compare each model of stored evaluations with the first one of the first file.

    files: results.json of ``ladderize eval``, results_*.json of ``lm_eval --log_samples``, or folders with one.
    models: of files with several models use only these, by their names or the last parts of these.
    Raises UserError for models that were not asked the same, and says what differs.
    """
    stored = [open_results(Path(file)) for file in files]
    for model in models:
        if not any(results.places(model) for results in stored):
            known = ", ".join(dict.fromkeys(name for results in stored for name in results.names))
            raise UserError(f"--model {model} is in no file; there are {known}")
    chosen = [
        read()
        for results in stored
        for place, read in enumerate(results.reads)
        if not models or len(results.names) == 1 or any(place in results.places(model) for model in models)
    ]
    if len(chosen) < 2:
        names = ", ".join(entry.name for entry in chosen) or "no model"
        raise UserError(f"there are no two models to compare, but only {names}; name another file")
    return Comparisons([compare_models(chosen[0], other, options or CompareOptions()) for other in chosen[1:]])


def compare_models(reference: AnsweredModel, other: AnsweredModel, options: CompareOptions) -> ComparisonDocument:
    """Compare everything that both models were asked; questions that only one was asked are left out by name.

    Raises UserError, which says what differs, where a common task was asked in two ways.
    """
    both = (reference, other)
    tasks = [task for task in reference.answers if task in other.answers]
    texts = all(entry.model is not None and entry.model.perplexity is not None for entry in both)
    if not tasks and not texts:
        raise UserError(f"nothing was measured of both {reference.where} and {other.where}; {ADVICE}")
    only_one = [task for entry in both for task in entry.answers if task not in tasks]
    left_out = [f"{task}: only one of the models has it" for task in only_one]
    if tasks and reference.model is not None and other.model is not None:
        check_same("BOS token in front of texts", both, *(e.model and e.model.add_bos_token for e in both))
    compared: list[TaskDifferences] = []
    for task in tasks:
        check_same_questions(both, task)
        of_task, missing = compare_task(both, task, options)
        compared += of_task
        left_out += missing
    return ComparisonDocument(
        reference=reference.name,
        other=other.name,
        margin=options.margin,
        level=CONFIDENCE,
        tasks=[one.comparison for one in compared],
        overall=pool(reference.harness, [one for one in compared if one.comparison.main], options),
        perplexity=compare_perplexity(both) if texts else None,
        predictions=compare_predictions(both) if texts else None,
        left_out=left_out,
        remarks=evaluation_remarks(both),
    )


# ---- were both asked the same? ----

Pair = tuple[AnsweredModel, AnsweredModel]  # the reference and the other model


def check_same(what: str, both: Pair, ours: Any, theirs: Any) -> None:
    """Raise UserError, which shows both values, where a setting differs."""
    if ours != theirs:
        shown = [f"{str(value)[:40]} in {entry.where}" for value, entry in zip((ours, theirs), both, strict=True)]
        raise UserError(f"not the same {what}: {', '.join(shown)}; {ADVICE}")


def check_same_questions(both: Pair, task: str) -> None:
    """Raise UserError unless both answered the same documents of a task, with the same prompts and settings."""
    reference, other = both
    check_same(f"version of {task}", both, *(entry.of_task("versions", task) for entry in both))
    for key in ("output_type", "generation_kwargs", "repeats"):
        check_same(f"{key} of {task}", both, *(entry.object_of_task("configs", task).get(key) for entry in both))
    check_same(f"filters of {task}", both, *(sorted(entry.answers[task]) for entry in both))
    between = f"{reference.where} and {other.where}"
    for name, ours in reference.answers[task].items():
        theirs = other.answers[task][name]
        if len(ours) != len(theirs):
            check_same(f"number of samples of {task} (--limit)", both, len(ours), len(theirs))
        if odd := ours.keys() ^ theirs.keys():
            raise UserError(f"not the same samples of {task}: only one of {between} has doc_id {min(odd)}; {ADVICE}")
        for place, what in enumerate(HASHES.values()):
            if changed := [doc for doc in ours if ours[doc].hashes[place] != theirs[doc].hashes[place]]:
                raise UserError(
                    f"not the same {what} of {task}: {len(changed):,} of {len(ours):,} differ between {between} (the"
                    f" first has doc_id {changed[0]}); few-shot examples and the chat template must be the same, too;"
                    f" {ADVICE}"
                )


def evaluation_remarks(both: Pair) -> list[str]:
    """Return other differences in how the models were computed, which may also cause a difference."""
    reference, other = (entry.model for entry in both)
    if reference is None or other is None:
        return []
    pairs = {key: (getattr(reference, key), getattr(other, key)) for key in ("dtype", "device", "backend", "tp_size")}
    pairs["device"] = (reference.device.partition(":")[0], other.device.partition(":")[0])
    return [
        f"the reference was evaluated with {key} {ours}, the other model with {key} {theirs}"
        for key, (ours, theirs) in pairs.items()
        if ours != theirs
    ]


# ---- tasks ----


@dataclass(frozen=True)
class TaskDifferences:
    """A metric of a task, with the differences of its samples."""

    comparison: TaskComparison
    differences: "Floats"


def compare_task(both: Pair, task: str, options: CompareOptions) -> tuple[list[TaskDifferences], list[str]]:
    """Compare all metrics of one task. Returns those that can be compared, and sentences on the others.

    Raises UserError where the samples are not those of the results.
    """
    compared, left_out = [], []
    reported = {**both[0].object_of_task("results", task)}
    for name, ours in both[0].answers[task].items():
        theirs = both[1].answers[task][name]
        for metric in dict.fromkeys(metric for answer in ours.values() for metric in answer.values):
            reported.pop(f"{metric},{name}", None)
            docs = sorted(ours)
            values = [[one[doc].values.get(metric) for doc in docs] for one in (ours, theirs)]
            if None in values[0] or None in values[1]:
                left_out.append(f"{task}: {metric_name(metric, name)} is not a number for every sample")
                continue
            before, after = (np.array(column, dtype=float) for column in values)
            if is_mean_of(both, (task, metric, name), (before, after)):
                compared.append(_compare_metric(both[0], (task, metric, name), docs, before, after, options))
            else:
                left_out.append(f"{task}: {metric_name(metric, name)} is no mean over samples")
    metrics = [key.partition(",") for key in reported if "_stderr" not in key]
    left_out += [f"{task}: the samples have no {metric_name(key, name)}" for key, _, name in metrics if name]
    return _with_main(compared), left_out


def is_mean_of(both: Pair, key: tuple[str, str, str], columns: tuple["Floats", "Floats"]) -> bool:
    """Return whether lm-eval's values are the means of the samples.

    key: task, metric and filter.
    columns: the values of both models' samples.
    Raises UserError where lm-eval says that it takes the mean, but has another value: the samples are of another run.
    """
    task, metric, name = key
    same = True
    for entry, column in zip(both, columns, strict=True):
        value, mean = finite_number(entry.object_of_task("results", task).get(f"{metric},{name}")), column.mean()
        if value is not None and abs(value - mean) <= CLOSE * max(1.0, abs(mean)):
            continue
        same = False
        rows = entry.object_of_task("configs", task).get("metric_list")
        named = [row for row in (rows if isinstance(rows, list) else []) if isinstance(row, Mapping)]
        if {"mean"} == {str(row.get("aggregation")) for row in named if row.get("metric") == metric}:
            raise UserError(
                f"the samples of {task} are not those of {entry.where}: {metric} is {value} there, but {mean:.6g} by"
                " the samples; evaluate the model again"
            )
    return same


def _compare_metric(
    reference: AnsweredModel,
    key: tuple[str, str, str],
    docs: list[int],
    before: "Floats",
    after: "Floats",
    options: CompareOptions,
) -> TaskDifferences:
    task, metric, name = key
    said = reference.object_of_task("higher_is_better", task).get(metric)
    better = said if isinstance(said, bool) else None
    values, differences = np.concatenate([before, after]), after - before
    is_share = better is not None and bool(((values >= 0) & (values <= 1)).all())
    estimate = estimate_mean([differences], bounded=is_share)
    verdict = needed = lost = gained = None
    if is_share and better is not None:
        weights = [1 / len(docs)] * len(docs)
        verdict, needed = verdict_of(estimate, weights, options.margin, higher_is_better=better)
        if np.isin(values, (0, 1)).all():
            gains = differences if better else -differences
            lost, gained = ([docs[place] for place in np.flatnonzero(changed)] for changed in (gains < 0, gains > 0))
    comparison = TaskComparison(
        task=task,
        metric=metric,
        filter=name,
        main=False,
        higher_is_better=better,
        samples=len(docs),
        reference_value=float(before.mean()),
        value=float(after.mean()),
        difference=float(differences.mean()),
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
    return TaskDifferences(comparison, differences)


def _with_main(compared: list[TaskDifferences]) -> list[TaskDifferences]:
    """Mark the metric that stands for the task. It is one for which more is better, so that tasks can be pooled."""
    fit = [one.comparison for one in compared if one.comparison.verdict and one.comparison.higher_is_better]
    ranks = {metric: rank for rank, metric in enumerate(MAIN_METRICS)}
    chosen = min(fit, key=lambda one: ranks.get(one.metric, len(ranks)), default=None)
    return [replace(one, comparison=replace(one.comparison, main=one.comparison is chosen)) for one in compared]


def metric_name(metric: str, filter_name: str) -> str:
    """Return the metric's name, with lm-eval's filter where it has one."""
    return metric if filter_name == "none" else f"{metric} ({filter_name})"


# ---- all tasks as one number ----


def pool(
    harness: Mapping[str, Any], compared: Sequence[TaskDifferences], options: CompareOptions
) -> PooledComparison | None:
    """Return the mean of the tasks' main metrics; None where there are none."""
    if not compared:
        return None
    by_task = {one.comparison.task: one for one in compared}
    units = [[by_task[task] for task in unit] for unit in pooled_units(harness, list(by_task))]
    strata = [np.concatenate([one.differences for one in unit]) for unit in units]
    weights = [1 / len(units) / len(stratum) for stratum in strata for _ in stratum]
    estimate = estimate_mean(strata)
    verdict, needed = verdict_of(estimate, weights, options.margin)

    def mean(name: str) -> float:
        sizes = [sum(one.comparison.samples for one in unit) for unit in units]
        sums = [sum(getattr(one.comparison, name) * one.comparison.samples for one in unit) for unit in units]
        return sum(total / size for total, size in zip(sums, sizes, strict=True)) / len(units)

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


def pooled_units(harness: Mapping[str, Any], tasks: list[str]) -> list[list[str]]:
    """Return the tasks in lists, each of which counts as one task: the tasks of an outermost group of lm-eval, or a
    single one."""
    known = harness.get("group_subtasks")
    groups = {name: part for name, part in (known if isinstance(known, Mapping) else {}).items() if part}
    inside = {str(child) for children in groups.values() if isinstance(children, list) for child in children}
    units, left = [], list(tasks)
    for group in groups:
        reached: set[str] = set()
        waiting = [] if group in inside else [group]
        while waiting:
            name = waiting.pop()
            children = groups.get(name, []) if name not in reached else []
            waiting += [child for child in children if isinstance(child, str)] if isinstance(children, list) else []
            reached.add(name)
        if unit := [task for task in left if task in reached]:
            units.append(unit)
            left = [task for task in left if task not in reached]
    return [*units, *([task] for task in left)]


# ---- a text ----


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
    """Compare the perplexities, window by window. Raises UserError where the windows differ."""
    (ours, tokens), (theirs, same_tokens) = map(_windows, both)
    for key, what in (("data_sha256", "file"), ("ids_sha256", "windows (--seq-len, --windows, or the tokenizer)")):
        check_same(f"{what} of --perplexity", both, *(getattr(e.model and e.model.perplexity, key) for e in both))
    check_same("windows of --perplexity", both, tokens.tolist(), same_tokens.tolist())

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


def compare_predictions(both: Pair) -> PredictionComparison | None:
    """Return the mean KL divergence that ``eval`` measured, with an interval; None where there is none against this
    reference.

    Raises UserError where it does not fit the windows.
    """
    reference, other = both
    measured = other.model.predictions if other.model is not None else None
    if measured is None or measured.reference != reference.name:
        return None
    _, tokens = _windows(other)
    sums = np.asarray(measured.window_kl, dtype=float)
    if len(sums) != len(tokens) or not (np.abs(sums) <= MAX_NATS * tokens).all():
        raise UserError(f"{other.where} has sums of KL that do not fit its windows; evaluate the model again")
    estimate = bootstrapped(lambda kl, tokens, axis=-1: kl.sum(axis) / tokens.sum(axis), sums, tokens)
    return PredictionComparison(
        windows=len(tokens),
        tokens=measured.tokens,
        mean_kl=measured.mean_kl,
        low=estimate.low,
        high=estimate.high,
        p99_kl=measured.p99_kl,
        same_top_share=measured.same_top_share,
    )
