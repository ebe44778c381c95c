"""What each model scored, and how that differs from the reference: paired where the same questions were kept, else from
two standard errors."""

import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from ladderize.errors import UserError
from ladderize.eval.evaluation.table import by_task, is_share, main_metric, mean_accuracy
from ladderize.eval.paired.compare import compare_results
from ladderize.eval.paired.document import CompareOptions, ComparisonDocument, Comparisons, TaskComparison, Verdict
from ladderize.eval.paired.samples import ComparedModel, leaf_tasks, read_entry
from ladderize.eval.paired.statistics import judge
from ladderize.eval.paired.words import metric_name
from ladderize.eval.results import ModelResult
from ladderize.tradeoff.report.documents import FoundResults
from ladderize.tradeoff.report.subjects import Accuracy, Subject, TaskScore, WithInterval

NORMAL_95 = 1.959964  # of the normal distribution: the half width of a 95 % interval in standard errors
# of an evaluation: what must be the same for two of them to be compared
SAME = ("tasks", "limit", "num_fewshot", "apply_chat_template", "perplexity", "seq_len", "windows")


def check_same_questions(found: Sequence[FoundResults]) -> None:
    """Raise UserError where evaluations that were made apart asked other things."""
    for results in found[1:]:
        for name in SAME:
            ours, theirs = (getattr(one.document.options, name, None) for one in (found[0], results))
            if name == "tasks":
                ours, theirs = (", ".join(sorted(set(tasks or ()))) or "none" for tasks in (ours, theirs))
            if ours != theirs:
                raise UserError(
                    f"{found[0].path} and {results.path} cannot be compared: {name} is {ours} in the one and {theirs}"
                    " in the other; evaluate all models in the same way"
                )


def add_scores(
    found: Sequence[FoundResults], subjects: Mapping[str, Subject], reference: Subject | None, margin: float
) -> list[str]:
    """Give the subjects their scores, and their differences to the reference and to their controls; returns remarks.

    subjects: by their model's path. Comparisons in a results.json with another model than the reference say nothing
    about the distance from dense; what was evaluated apart, as in a sweep, is compared here.
    """
    remarks: dict[str, None] = {}
    places: dict[str, tuple[Path, str]] = {}  # of models whose samples were kept
    entries = {}
    for results in found:
        for entry in results.document.models:
            model = os.path.normpath(entry.model.model)
            if model not in entries:  # else it is the reference of an earlier one, too
                _score(subjects[model], entry)
                entries[model] = entry
            if _keeps_samples(entry):
                places.setdefault(model, (results.path, entry.model.model))
        for comparison in Comparisons.from_dict(vars(results.document), results.path).comparisons:
            subject = subjects.get(os.path.normpath(comparison.other))
            if subject is None:
                raise UserError(
                    f"{results.path} compares {comparison.other}, which it does not evaluate; evaluate again"
                )
            if reference is not None and subjects.get(os.path.normpath(comparison.reference)) is reference:
                remarks |= take_comparison(subject, reference, comparison, margin)
    first = next((model for model in entries if subjects[model] is reference), None)
    base: ComparedModel | None = None
    for model in entries:
        subject = subjects[model]
        if reference is None or first is None or subject is reference or subject.comparison is not None:
            continue
        if first in places and model in places:
            base = base or read_entry(*places[first])
            comparison = compare_results(base, read_entry(*places[model]), CompareOptions(margin))
            remarks |= take_comparison(subject, reference, comparison, margin)
        else:
            _compare_unpaired(subject, reference, margin)
    for model, place in places.items():
        if (control := places.get(os.path.normpath(subjects[model].control or ""))) is not None:
            overall = compare_results(read_entry(*control), read_entry(*place), CompareOptions(margin)).overall
            if overall is not None:
                points = WithInterval(overall.difference, overall.low, overall.high).scaled(100)
                subjects[model].over_control = points
    return list(remarks)


def _keeps_samples(entry: ModelResult) -> bool:
    """Whether each task's answers are there, and the windows of a perplexity; earlier versions kept neither."""
    has_windows = entry.model.perplexity is None or entry.model.perplexity.window_nll is not None
    return has_windows and all(task in entry.samples for task in leaf_tasks(entry.harness))


def _score(subject: Subject, entry: ModelResult) -> None:
    if (measured := entry.model.perplexity) is not None:
        spread = None if measured.stderr is None else NORMAL_95 * measured.stderr
        subject.perplexity = WithInterval.around(measured.perplexity, spread)
    subject.scores = [
        TaskScore(task, one.metric, one.value, one.stderr, main=one is main_metric(found), points=is_share(one))
        for task, found in by_task(entry).items()
        for one in found
    ]
    if (mean := mean_accuracy(entry)) is not None:
        subject.accuracy = Accuracy(mean)


def take_comparison(
    subject: Subject, reference: Subject, comparison: ComparisonDocument, margin: float
) -> dict[str, None]:
    """Take over what a paired comparison with the reference says, also of the reference: a mean over the same tasks.
    Returns the remarks, each once."""
    subject.comparison = comparison
    subject.scores = [_task_score(one) for one in comparison.tasks]
    if (overall := comparison.overall) is not None:
        points = WithInterval(overall.difference, overall.low, overall.high).scaled(100)
        is_same = margin == comparison.margin
        reference.accuracy = Accuracy(overall.reference_value)
        subject.accuracy = Accuracy(
            value=overall.value,
            difference=points,
            paired=True,
            verdict=overall.verdict if is_same or overall.verdict is None else judge_points(points, margin),
            needed=overall.samples_needed if is_same else None,
        )
    if (perplexity := comparison.perplexity) is not None:
        ends = (None if end is None else perplexity.reference_value + end for end in (perplexity.low, perplexity.high))
        subject.perplexity = WithInterval(perplexity.value, *ends)
    return {f"{subject.name}: {sentence}": None for sentence in (*comparison.left_out, *comparison.remarks)}


def _task_score(one: TaskComparison) -> TaskScore:
    return TaskScore(
        task=one.task,
        metric=metric_name(one.metric, one.filter),
        value=one.value,
        stderr=None,
        difference=WithInterval(one.difference, one.low, one.high),
        paired=True,
        main=one.main,
        points=one.verdict is not None,
        flips=(one.right_to_wrong, one.wrong_to_right),
    )


def judge_points(difference: WithInterval, margin: float) -> Verdict:
    """What an interval in points shows about a margin."""
    if difference.low is None or difference.high is None:
        return "too few samples"
    return judge(difference.low, difference.high, margin, samples=0, needed=0)


def _compare_unpaired(subject: Subject, reference: Subject, margin: float) -> None:
    """From two standard errors, as if the models had answered different questions: wider than a paired interval, and
    never "shown": the standard error of a metric that is 1 on every sample is 0, which shows nothing."""
    base = {(score.task, score.metric): score for score in reference.scores}
    subject.scores = [_unpaired(score, base.get((score.task, score.metric))) for score in subject.scores]
    found = [score.difference for score in subject.scores if score.main and score.points and score.difference]
    if subject.accuracy is not None and found:
        value = sum(one.value for one in found) / len(found)
        spreads = [one.high - one.value for one in found if one.high is not None]
        spread = math.hypot(*spreads) / len(found) if len(spreads) == len(found) else None
        points = WithInterval.around(value, spread).scaled(100)
        verdict = judge_points(points, margin)
        shown: Verdict = "not shown" if verdict == "shown" else verdict
        subject.accuracy = Accuracy(subject.accuracy.value, points, False, shown)


def _unpaired(score: TaskScore, other: TaskScore | None) -> TaskScore:
    if other is None:
        return replace(score, difference=None, paired=False)
    spread = None
    if score.stderr is not None and other.stderr is not None:
        spread = NORMAL_95 * math.hypot(score.stderr, other.stderr)
    return replace(score, difference=WithInterval.around(score.value - other.value, spread), paired=False)
