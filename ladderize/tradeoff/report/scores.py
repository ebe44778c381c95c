"""What each model scored, and how that differs from the reference: paired where the same questions were kept, else from
two standard errors."""

import math
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

from ladderize.errors import UserError
from ladderize.eval.evaluation.mean import by_task, is_share, main_metric, mean_accuracy
from ladderize.eval.evaluation.table import measurements
from ladderize.eval.paired.compare import compare_results
from ladderize.eval.paired.document import CompareOptions, ComparisonDocument, Comparisons, TaskComparison, Verdict
from ladderize.eval.paired.entry import ComparedModel, leaf_tasks, read_entry
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
        first = found[0]
        for name in SAME:
            ours, theirs = (getattr(one.document.options, name, None) for one in (first, results))
            if name == "tasks":
                ours, theirs = set(ours or ()), set(theirs or ())
            if ours != theirs:
                raise UserError(
                    f"{first.path} and {results.path} cannot be compared: {name} is {_plain(ours)} in the one and"
                    f" {_plain(theirs)} in the other; evaluate all models in the same way"
                )


def _plain(value: object) -> str:
    return ", ".join(sorted(map(str, value))) or "none" if isinstance(value, set) else str(value)


def add_scores(
    results: FoundResults,
    subjects: Mapping[str, Subject],
    reference: Subject | None,
    margin: float,
    remarks: list[str],
) -> None:
    """Give the subjects of one results.json their scores, and their comparisons with the reference where it has these;
    those with another model say nothing about the distance from dense."""
    for entry in results.document.models:
        own = _subject_of(entry, subjects)
        if not own.scores and own.perplexity is None:  # else it is the reference of an earlier one, too
            _score(own, entry)
    for comparison in Comparisons.from_dict(vars(results.document), results.path).comparisons:
        subject = subjects.get(os.path.normpath(comparison.other))
        if subject is None:
            raise UserError(f"{results.path} compares {comparison.other}, which it does not evaluate; evaluate again")
        if reference is not None and subjects.get(os.path.normpath(comparison.reference)) is reference:
            take_comparison(subject, reference, comparison, margin, remarks)


def compare_stored(
    found: Iterable[FoundResults],
    subjects: Mapping[str, Subject],
    reference: Subject | None,
    margin: float,
    remarks: list[str],
) -> None:
    """Compare what was evaluated apart, as in a sweep, with the reference: in pairs where the samples were kept."""
    entries = [(one, entry) for one in found for entry in one.document.models]
    first = next((pair for pair in entries if _subject_of(pair[1], subjects) is reference), None)
    if reference is None or first is None:
        return
    base: ComparedModel | None = None
    for results, entry in entries:
        subject = _subject_of(entry, subjects)
        if subject is reference or subject.comparison is not None:
            continue
        if _keeps_samples(entry) and _keeps_samples(first[1]):
            base = base or read_entry(first[0].path, first[1].model.model)
            other = read_entry(results.path, entry.model.model)
            comparison = compare_results(base, other, CompareOptions(margin))
            take_comparison(subject, reference, comparison, margin, remarks)
        else:
            _compare_unpaired(subject, reference, margin)


def compare_controls(found: Iterable[FoundResults], subjects: Mapping[str, Subject], margin: float) -> None:
    """Compare what was trained with the dense model after the same training: in pairs, where the samples were kept."""
    kept = {
        os.path.normpath(entry.model.model): (results.path, entry.model.model)
        for results in found
        for entry in results.document.models
        if _keeps_samples(entry)
    }
    for model, place in kept.items():
        control = kept.get(os.path.normpath(subjects[model].control or ""))
        if control is not None:
            overall = compare_results(read_entry(*control), read_entry(*place), CompareOptions(margin)).overall
            if overall is not None:
                subjects[model].over_control = WithInterval.of(overall).scaled(100)


def _subject_of(entry: ModelResult, subjects: Mapping[str, Subject]) -> Subject:
    return subjects[os.path.normpath(entry.model.model)]


def _keeps_samples(entry: ModelResult) -> bool:
    """Whether each task's answers are there, and the windows of a perplexity; earlier versions kept neither."""
    has_windows = entry.model.perplexity is None or entry.model.perplexity.window_nll is not None
    return has_windows and all(task in entry.samples for task in leaf_tasks(entry.harness))


def _score(subject: Subject, entry: ModelResult) -> None:
    for one in measurements(entry):
        if one.task == "perplexity":
            spread = None if one.stderr is None else NORMAL_95 * one.stderr
            subject.perplexity = WithInterval.around(one.value, spread)
    for task, found in by_task(entry).items():
        main = main_metric(found)
        for one in found:
            subject.scores.append(
                TaskScore(task, one.metric, one.value, one.stderr, main=one is main, points=is_share(one))
            )
    if (mean := mean_accuracy(entry)) is not None:
        subject.accuracy = Accuracy(mean)


def take_comparison(
    subject: Subject, reference: Subject, comparison: ComparisonDocument, margin: float, remarks: list[str]
) -> None:
    """Take over what a paired comparison with the reference says, also of the reference: a mean over the same tasks."""
    subject.comparison = comparison
    for sentence in (*comparison.left_out, *comparison.remarks):
        if (remark := f"{subject.name}: {sentence}") not in remarks:
            remarks.append(remark)
    subject.scores = [_task_score(one) for one in comparison.tasks]
    if (overall := comparison.overall) is not None:
        points, is_same = WithInterval.of(overall).scaled(100), margin == comparison.margin
        reference.accuracy = Accuracy(overall.reference_value)
        subject.accuracy = Accuracy(
            value=overall.value,
            difference=points,
            paired=True,
            verdict=overall.verdict if is_same or overall.verdict is None else judge_points(points, margin),
            needed=overall.samples_needed if is_same else None,
        )
    if (perplexity := comparison.perplexity) is not None:
        ends = [None if end is None else perplexity.reference_value + end for end in (perplexity.low, perplexity.high)]
        subject.perplexity = WithInterval(perplexity.value, ends[0], ends[1])


def _task_score(one: TaskComparison) -> TaskScore:
    return TaskScore(
        task=one.task,
        metric=metric_name(one.metric, one.filter),
        value=one.value,
        stderr=None,
        difference=WithInterval.of(one),
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


def _judge_unpaired(difference: WithInterval, margin: float) -> Verdict:
    """Never "shown": the standard error of a metric that is 1 on every sample is 0, which shows nothing."""
    verdict = judge_points(difference, margin)
    return "not shown" if verdict == "shown" else verdict


def _compare_unpaired(subject: Subject, reference: Subject, margin: float) -> None:
    """From two standard errors, as if the models had answered different questions: wider than a paired interval."""
    base = {(score.task, score.metric): score for score in reference.scores}
    subject.scores = [_unpaired(score, base.get((score.task, score.metric))) for score in subject.scores]
    found = [score.difference for score in subject.scores if score.main and score.points and score.difference]
    if subject.accuracy is not None and found:
        spreads = [one.spread for one in found if one.spread is not None]
        value = sum(one.value for one in found) / len(found)
        spread = math.hypot(*spreads) / len(found) if len(spreads) == len(found) else None
        points = WithInterval.around(value, spread).scaled(100)
        subject.accuracy = Accuracy(subject.accuracy.value, points, False, _judge_unpaired(points, margin))


def _unpaired(score: TaskScore, other: TaskScore | None) -> TaskScore:
    if other is None:
        return replace(score, difference=None, paired=False)
    known = score.stderr is not None and other.stderr is not None
    spread = NORMAL_95 * math.hypot(score.stderr or 0.0, other.stderr or 0.0) if known else None
    return replace(score, difference=WithInterval.around(score.value - other.value, spread), paired=False)
