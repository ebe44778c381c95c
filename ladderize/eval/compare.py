"""Compares models that answered the same questions, in pairs, from stored evaluations. Imports no torch.

Measured are the differences within the pairs, other minus reference, with intervals by scipy's bootstrap.
"""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ladderize.console import sentence
from ladderize.errors import UserError
from ladderize.eval.options import MARGIN, check_margin
from ladderize.eval.results import (
    ComparisonDocument,
    Comparisons,
    EvalResults,
    EvaluatedModel,
    HarnessResult,
    Perplexity,
    PerplexityComparison,
    PooledComparison,
    TaskComparison,
)
from ladderize.files.documents import parse_json, read_document
from ladderize.files.regular import inside, read_lines, resolved

Floats = NDArray[np.float64]
Columns = tuple[Floats, Floats]  # a metric of both models' samples, in the order of doc_id
# by lm-eval's filter and doc_id, in order: the hashes of the document, the target and the prompt, and the values by
# metric, None where one is no finite number
TaskAnswers = dict[str, dict[int, tuple[tuple[str, str, str], dict[str, float | None]]]]
CONFIDENCE = 0.95  # of every interval
POINT = 0.01  # of a metric between 0 and 1
BOOTSTRAP_RESAMPLES = 9999
SEED = 0  # of all resamples, so that the same answers have the same interval
NUMBERS_AT_ONCE = 1 << 22  # drawn at a time
MAIN_METRICS = ("acc_norm", "acc", "exact_match", "em", "f1")  # the first of these that a task has stands for it
ENOUGH_WINDOWS = 8  # of a text: over fewer an interval by resampling is too narrow
CLOSE = 1e-6  # how closely the samples' mean must match the results
ADVICE = "evaluate both models alike, best in one `ladderize eval`"


@dataclass(frozen=True)
class AnsweredModel:
    """A model and its answers to the questions."""

    where: str  # names its file in messages
    model: EvaluatedModel
    harness: HarnessResult
    answers: Mapping[str, TaskAnswers]  # by task


def read_models(path: Path, model: str | None = None) -> Iterator[AnsweredModel]:
    """Yield the models of results.json, or only the named one. Raises UserError for any other file."""
    path = resolved(path)
    results = EvalResults.from_dict(read_document(path, "results.json of ladderize eval"), path)
    for entry in results.models:
        name, harness, answers = entry.model.model, entry.reported, dict[str, TaskAnswers]()
        if model not in (None, name):
            continue
        if missing := [task for task in harness.leaves if task not in entry.samples]:
            raise UserError(f"{path} keeps no samples of {missing[0]} for {name}; evaluate the model again")
        for task, file in entry.samples.items():  # the path may come from a stranger, so it must lie in the same folder
            samples = inside(path.parent, file)
            if samples is None:
                raise UserError(f"{path} names samples of {task} outside of its folder ({file}); do not trust it")
            answers[task] = read_answers(samples)
        yield AnsweredModel(f"{path} ({name})", entry.model, harness, answers)


def read_answers(path: Path) -> TaskAnswers:
    """Return the answers of one task in a .jsonl file of samples, as lm-eval logs them."""
    if not path.is_file():
        raise UserError(f"{path} is not there, and the results name it; copy it beside them")
    answers: TaskAnswers = {}
    for number, line in enumerate(read_lines(path), start=1):
        try:
            sample = parse_json(line)
            answered, doc = answers.setdefault(sample["filter"], {}), int(sample["doc_id"])
            hashes = (sample["doc_hash"], sample["target_hash"], sample["prompt_hash"])
            values = {metric: finite_number(sample[metric]) for metric in sample["metrics"]}
        except (ValueError, TypeError, KeyError) as error:
            message = f"{path}, line {number} is no sample of lm-eval ({sentence(error)}); evaluate the model again"
            raise UserError(message) from None
        if doc in answered:
            raise UserError(f"{path}, line {number}: there are two answers to doc_id {doc}; evaluate the model again")
        answered[doc] = hashes, values
    if not answers:
        raise UserError(f"{path} holds no samples; evaluate the model again")
    return {name: dict(sorted(answered.items())) for name, answered in answers.items()}


def finite_number(value: Any) -> float | None:
    """Return a metric's value as a float; None for anything else."""
    return float(value) if isinstance(value, int | float) and math.isfinite(value) else None


def check_same_questions(reference: AnsweredModel, other: AnsweredModel, task: str) -> None:
    """Raise UserError unless both answered the same documents of a task, with the same prompts and settings."""
    settings = []
    for model in (reference, other):
        config = model.harness.configs.get(task, {})
        stated = {key: config.get(key) for key in ("output_type", "generation_kwargs", "repeats")}
        settings.append({**stated, "version": model.harness.versions.get(task), "filters": sorted(model.answers[task])})
    for name, value in settings[0].items():
        if value != settings[1][name]:
            shown = f"{str(value)[:40]} in {reference.where}, {str(settings[1][name])[:40]} in {other.where}"
            raise UserError(f"not the same {name} of {task}: {shown}; {ADVICE}")
    for name, answers in reference.answers[task].items():
        asked = {(doc, hashes) for doc, (hashes, _) in answers.items()}
        also_asked = {(doc, hashes) for doc, (hashes, _) in other.answers[task][name].items()}
        changed = {doc for doc, _ in asked ^ also_asked}
        if changed:
            raise UserError(
                f"not the same questions of {task}: documents, targets or prompts of {len(changed):,} of"
                f" {len(answers):,} differ between {reference.where} and {other.where} (such as doc_id {min(changed)});"
                f" --limit, few-shot examples and the chat template must be the same, too; {ADVICE}"
            )


def compare(files: Iterable[str | Path], margin: float = MARGIN) -> Comparisons:
    """Compare each model of stored evaluations (results.json) with the first one of the first file; ``margin``: points
    that may be lost, of which 1 is 0.01 of acc."""
    check_margin(margin)
    models = [model for file in files for model in read_models(Path(file))]
    if len(models) < 2:
        names = ", ".join(answered.model.model for answered in models) or "no model"
        raise UserError(f"there are no two models to compare, but only {names}; name another file")
    return Comparisons([compare_models(models[0], other, margin) for other in models[1:]])


def compare_models(reference: AnsweredModel, other: AnsweredModel, margin: float = MARGIN) -> ComparisonDocument:
    """Compare everything that both models were asked. What cannot be compared is left out by name; a common task that
    was asked in two ways is refused."""
    ours, theirs = reference.model, other.model
    tasks = [task for task in reference.answers if task in other.answers]
    asked = {**reference.answers, **other.answers}
    left_out = [f"{task}: only one of the models has it" for task in asked if task not in tasks]
    compared: list[TaskComparison] = []
    mains: dict[str, Columns] = {}
    for task in tasks:
        check_same_questions(reference, other, task)
        measured = compare_task(reference, other, task, margin, left_out)
        # the metric that stands for its task: more of it is better, as tasks are pooled
        fit = [metric for metric, _ in measured if metric.verdict is not None and metric.higher_is_better]
        main = min(fit, key=lambda metric: (*MAIN_METRICS, metric.metric).index(metric.metric), default=None)
        compared += [replace(metric, main=metric is main) for metric, _ in measured]
        mains.update((task, columns) for metric, columns in measured if metric is main)
    perplexity = compare_perplexity(ours.perplexity, theirs.perplexity)
    if perplexity is None and ours.perplexity is not None and theirs.perplexity is not None:
        left_out.append("perplexity: the windows differ (the file, --seq-len, --windows, or the tokenizer)")
    if not tasks and perplexity is None:
        raise UserError(f"nothing was measured alike of both {reference.where} and {other.where}; {ADVICE}")
    remarks = [
        f"the reference was evaluated with {key} {getattr(ours, key)}, the other model with {getattr(theirs, key)}"
        for key in ("dtype", "backend")
        if getattr(ours, key) != getattr(theirs, key)
    ]
    if perplexity is not None and 1 < perplexity.windows < ENOUGH_WINDOWS:
        remarks.append(f"95 % intervals over only {perplexity.windows} windows of text are too narrow; score more")
    overall = pool(reference.harness.group_subtasks, mains, margin) if mains else None
    predictions = theirs.predictions
    if perplexity is None or predictions is None or predictions.reference != ours.model:
        predictions = None
    figures = (compared, overall, perplexity, predictions, left_out, remarks)
    return ComparisonDocument(ours.model, theirs.model, margin, *figures)


def compare_task(
    reference: AnsweredModel, other: AnsweredModel, task: str, margin: float, left_out: list[str]
) -> list[tuple[TaskComparison, Columns]]:
    """Compare all metrics of a task; ``left_out`` takes a sentence for each that cannot be compared."""
    measured = []
    for filtered, answers in reference.answers[task].items():
        docs = np.array(list(answers))
        for metric in dict.fromkeys(name for _, values in answers.values() for name in values):
            ours, theirs = (values_of(model, task, metric, filtered) for model in (reference, other))
            if ours is None or theirs is None:
                left_out.append(f"{task}: {metric_name(metric, filtered)} is no mean of numbers over the questions")
                continue
            stated = reference.harness.higher_is_better.get(task, {}).get(metric)
            better = stated if isinstance(stated, bool) else None
            means, flips = compare_means([(ours, theirs)], margin, better), dict[str, Any]()
            if means["verdict"] is not None and np.isin([ours, theirs], (0, 1)).all():
                gains = theirs - ours if better else ours - theirs
                lost, gained = docs[gains < 0].tolist(), docs[gains > 0].tolist()
                p = mcnemar_p(len(lost), len(gained))
                flips = {"mcnemar_p": p, "right_to_wrong": lost, "wrong_to_right": gained}
            means |= {"task": task, "metric": metric, "filter": filtered, "main": False, "higher_is_better": better}
            measured.append((TaskComparison(**means, **flips), (ours, theirs)))
    return measured


def values_of(model: AnsweredModel, task: str, metric: str, filtered: str) -> Floats | None:
    """Return a metric of a model's samples; None where lm-eval's result is no mean of them."""
    values = [values.get(metric) for _, values in model.answers[task][filtered].values()]
    reported = finite_number(model.harness.results.get(task, {}).get(f"{metric},{filtered}"))
    if None in values or reported is None:
        return None
    column = np.array(values, dtype=float)
    return column if math.isclose(column.mean(), reported, rel_tol=CLOSE, abs_tol=CLOSE) else None


def compare_means(columns: Sequence[Columns], margin: float, better: bool | None = True) -> dict[str, Any]:
    """Compare the means over tasks of their means; return the fields of a ``MeanComparison``. There is a verdict where
    lm-eval knows what is ``better``, and all values are between 0 and 1."""
    differences = [theirs - ours for ours, theirs in columns]
    everything = np.concatenate([values for pair in columns for values in pair])
    is_share = better is not None and everything.min() >= 0 and everything.max() <= 1
    low, high, _ = estimate_mean(differences, bounded=is_share)
    samples, verdict = sum(map(len, differences)), None
    if is_share and low is not None and high is not None:
        verdict = verdict_of(*((low, high) if better else (-high, -low)), margin, samples)
    return {
        "samples": samples,
        "reference_value": float(np.mean([ours.mean() for ours, _ in columns])),
        "value": float(np.mean([theirs.mean() for _, theirs in columns])),
        "difference": float(np.mean([values.mean() for values in differences])),
        **{"low": low, "high": high, "verdict": verdict},
    }


def metric_name(metric: str, filter_name: str) -> str:
    """Return the metric's name, with lm-eval's filter where it has one."""
    return metric if filter_name == "none" else f"{metric} ({filter_name})"


def pool(groups: Mapping[str, list[str]], mains: Mapping[str, Columns], margin: float) -> PooledComparison:
    """Return the mean of the tasks' main metrics; groups: of lm-eval, with their tasks."""
    columns = []
    for unit in pooled_units(groups, list(mains)):
        ours, theirs = zip(*(mains[task] for task in unit), strict=True)
        columns.append((np.concatenate(ours), np.concatenate(theirs)))
    return PooledComparison(tasks=list(mains), **compare_means(columns, margin))


def pooled_units(groups: Mapping[str, list[str]], tasks: list[str]) -> list[list[str]]:
    """Return the tasks in lists that count as one: those of an outermost group of lm-eval, or a single one."""
    parents = {child: group for group, children in reversed([*groups.items()]) for child in children}
    units: dict[str, list[str]] = {}
    for task in tasks:
        name = task
        for _ in parents:  # so many levels at most: a stranger's groups may go round
            name = parents.get(name, name)
        units.setdefault(name, []).append(task)
    return list(units.values())


def compare_perplexity(ours: Perplexity | None, theirs: Perplexity | None) -> PerplexityComparison | None:
    """Compare perplexities window by window; return None where a model has none, or the windows differ."""
    if ours is None or theirs is None or not ours.window_nll or not theirs.window_nll:
        return None
    if (ours.ids_sha256, ours.window_tokens) != (theirs.ids_sha256, theirs.window_tokens):
        return None
    tokens = np.array(ours.window_tokens, dtype=float)
    nll, other_nll = np.array(ours.window_nll), np.array(theirs.window_nll)

    def growth(ours: Floats, theirs: Floats, tokens: Floats, axis: int = -1) -> Any:
        return np.exp(theirs.sum(axis) / tokens.sum(axis)) - np.exp(ours.sum(axis) / tokens.sum(axis))

    low, high, stderr = bootstrapped(growth, nll, other_nll, tokens)
    before, after = (float(np.exp(column.sum() / tokens.sum())) for column in (nll, other_nll))
    return PerplexityComparison(len(tokens), int(tokens.sum()), before, after, after - before, stderr, low, high)


Estimate = tuple[float | None, float | None, float | None]  # the ends of an interval, and the standard error


def bootstrapped(statistic: Callable[..., Any], *columns: Floats, paired: bool = True) -> Estimate:
    """Estimate ``statistic(*columns, axis=...)`` by the percentiles of its resamples; None where samples give none.
    Columns that are not paired are resampled separately, as the samples of several tasks."""
    from scipy.stats import bootstrap

    if min(map(len, columns)) < 2:
        return None, None, None
    result = bootstrap(
        columns,
        statistic,
        n_resamples=BOOTSTRAP_RESAMPLES,
        batch=max(1, NUMBERS_AT_ONCE // (len(columns[0]) if paired else sum(map(len, columns)))),
        vectorized=True,
        paired=paired,
        confidence_level=CONFIDENCE,
        method="percentile",
        rng=np.random.default_rng(SEED),
    )
    low, high = map(float, result.confidence_interval)
    is_interval = math.isfinite(low) and math.isfinite(high) and low < high
    return (low, high, float(result.standard_error)) if is_interval else (None, None, None)


def estimate_mean(differences: Sequence[Floats], *, bounded: bool = True) -> Estimate:
    """Estimate the mean over tasks of the mean of each task's differences.

    Where no answer changed a bootstrap's interval has no width. So two more samples join those of a metric between 0
    and 1 (bounded), one that became as bad and one that became as good as possible (after Agresti and Min, "Simple
    improved confidence intervals for comparing matched proportions", Statistics in Medicine 24, 2005).
    """
    columns = [np.append(values, [-1.0, 1.0] if bounded else []) for values in differences]

    def mean_of_means(*columns: Floats, axis: int = -1) -> Any:
        return sum(column.mean(axis) for column in columns) / len(columns)

    return bootstrapped(mean_of_means, *columns, paired=False)


def mcnemar_p(lost: int, gained: int) -> float:
    """Return McNemar's exact p, of flips at least this uneven where both directions are equally likely."""
    from scipy.stats import binomtest

    return float(binomtest(lost, lost + gained).pvalue) if lost + gained else 1.0


def verdict_of(low: float, high: float, margin: float, samples: int) -> str:
    """Return whether an interval of gains shows that at most ``margin`` points are lost.

    This aims at a test of 2.5 % (1 to 9 % where few answers changed: the interval's end moves by whole answers). So
    few samples show nothing that a model which loses the margin answers alike in more than 2.5 % of evaluations.
    """
    if high < -margin * POINT:
        return "worse"
    is_enough = (1 - margin * POINT) ** samples <= (1 - CONFIDENCE) / 2
    return "shown" if is_enough and low > -margin * POINT else "not shown"
