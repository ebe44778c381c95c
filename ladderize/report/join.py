"""The step from documents to subjects: all results under one model path make one subject."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from ladderize.errors import UserError
from ladderize.eval.answers import read_answered
from ladderize.eval.compare import compare_models
from ladderize.eval.comparison import CompareOptions, ComparisonDocument
from ladderize.eval.results import EvalResults
from ladderize.eval.table import mean_accuracy, short_names
from ladderize.plan.show import plan_verdicts
from ladderize.report.documents import FoundDocument, FoundDocuments
from ladderize.report.subjects import (
    KIND_ORDER,
    Setting,
    Subject,
    Subjects,
    WithInterval,
    check_layout,
    model_key,
    new_subject,
    points_of,
)
from ladderize.report.times import add_times

NORMAL_95 = 1.959964  # half the width of a 95 % interval of the normal distribution, in standard errors
FROM_POINT = ("adapted", "tokens", "failure", "not_promoted", "control")  # a sweep's facts about a model


@dataclass
class ReportContent:
    """All that a report shows.

    subjects: the reference first.
    settings: measured ones first, then by ranks (most first) and batch size.
    remarks: sentences on the origin of the numbers that a reader must know.
    """

    margin: float
    subjects: list[Subject]
    settings: list[Setting]
    found: FoundDocuments
    remarks: list[str]

    @property
    def models(self) -> list[Subject]:
        """The models that have an accuracy: no baselines, and none with random weights."""
        return [subject for subject in self.subjects if subject.is_model]

    @property
    def reference(self) -> Subject | None:
        """The model that the others are compared with."""
        return self.models[0] if self.models else None

    @property
    def real_settings(self) -> list[Setting]:
        """The settings with times of models."""
        return [setting for setting in self.settings if any(one.timing(setting) for one in self.models)]


def join_documents(found: FoundDocuments, margin: float | None = None) -> ReportContent:
    """Return the joined content of the documents. Raises UserError for documents that do not belong together.

    margin: in points; None: the sweep's (the least of several sweeps'), or that of ``CompareOptions``.
    """
    margin = margin or min((sweep.document.margin for sweep in found.sweeps), default=CompareOptions.margin)
    subjects: Subjects = {}
    for sweep in found.sweeps:
        for point in sweep.document.points:  # of another sweep, too: paths hold a hash of all that decides a model
            key = f"{sweep.path}: {point.name}" if point.model is None else model_key(point.model)
            known = {name: getattr(point, name) for name in FROM_POINT}
            subjects.setdefault(key, new_subject(point, point.model or point.name, point.name, **known))
    places = _add_results(subjects, found.results)
    untimed = add_times(subjects, found, is_evaluated=bool(places))
    _name([subject for subject in subjects.values() if subject.is_model])
    remarks = [
        *untimed,
        *_compare(subjects, found.results, places, margin),
        *(f"{plan.path.name}: {verdict}" for plan in found.plans for verdict in plan_verdicts(plan.document)),
    ]
    ordered = sorted(subjects.values(), key=lambda subject: not subject.is_model)
    settings = sorted({timing.setting for subject in ordered for timing in subject.timings}, key=_preference)
    return ReportContent(margin, ordered, settings, found, remarks)


def _preference(setting: Setting) -> tuple[object, ...]:
    kind = KIND_ORDER.index(setting.kind)
    first = (bool(setting.note), kind, -setting.tp_size, setting.source, setting.batch_size)
    return (*first, setting.medium, setting.prompt_len, setting.output_len)


def _name(models: list[Subject]) -> None:
    """Name the models that a sweep has not named, by the last part of the path where these differ. No name comes
    twice."""
    unnamed = [subject for subject in models if not subject.name]
    for subject, name in zip(unnamed, short_names([subject.model for subject in unnamed]), strict=True):
        subject.name = name
    counts = Counter(subject.name for subject in models)
    for subject in models:
        subject.name = subject.name if counts[subject.name] == 1 else subject.model


# ---- accuracy: every model against the reference, in pairs ----


def _add_results(subjects: Subjects, found: Sequence[FoundDocument[EvalResults]]) -> dict[str, tuple[Path, str]]:
    """Add the evaluations. Return the place of each model's samples by key: a results.json, and the model's name in it.

    Raises UserError for a model that is evaluated twice, or that has another layout elsewhere.
    """
    places: dict[str, tuple[Path, str]] = {}
    for results in found:
        for number, entry in enumerate(results.document.models):
            model, key = entry.model, model_key(entry.model.model)
            if key in places and number == 0:
                continue  # the reference of several evaluations: the first one counts
            if key in places:
                raise UserError(f"{results.path} and {places[key][0]} both evaluate {model.model}; name one of the two")
            places[key] = (results.path, model.model)
            subject = subjects.setdefault(key, new_subject(model, model.model))
            check_layout(subject, model, results.path)
            subject.parameters, subject.accuracy = model.parameters, mean_accuracy(entry)
            if (text := model.perplexity) is not None:
                ends = () if text.stderr is None else (-NORMAL_95 * text.stderr, NORMAL_95 * text.stderr)
                subject.perplexity = WithInterval(text.perplexity, *(text.perplexity + end for end in ends))
    return places


def _compare(
    subjects: Subjects,
    found: Sequence[FoundDocument[EvalResults]],
    places: dict[str, tuple[Path, str]],
    margin: float,
) -> list[str]:
    """Give every evaluated model its comparison with the reference, and with its control; return remarks, each once.

    Models that were evaluated together are compared in results.json. Models that were evaluated apart, as in a sweep,
    are compared here. Raises UserError for a comparison with a model that no document evaluates.
    """
    if not places:
        return []
    dense = next(iter(subjects))
    options = CompareOptions(margin)
    entry_of = cache(lambda key: read_answered(*places[key]))
    stored = {
        model_key(one.other): one
        for results in found
        for one in (ComparisonDocument.from_dict(value, results.path) for value in results.document.comparisons)
        if model_key(one.reference) == dense
    }
    if strangers := stored.keys() - places.keys():
        raise UserError(f"a results.json compares {min(strangers)}, which none evaluates; evaluate again")
    remarks: dict[str, None] = {}
    for key in places:
        if key != dense and dense in places:
            compared = stored.get(key) or compare_models(entry_of(dense), entry_of(key), options)
            remarks |= _take(subjects[key], subjects[dense], compared)
        control = subjects[key].control
        if control is not None and model_key(control) in places:
            overall = compare_models(entry_of(model_key(control)), entry_of(key), options).overall
            subjects[key].over_control = None if overall is None else points_of(overall)
    return list(remarks)


def _take(subject: Subject, reference: Subject, compared: ComparisonDocument) -> dict[str, None]:
    """Take over the values of a comparison, also the reference's mean over the same tasks. Return the remarks."""
    subject.comparison = compared
    if (overall := compared.overall) is not None:
        reference.accuracy, subject.accuracy = overall.reference_value, overall.value
    if (text := compared.perplexity) is not None:
        ends = (None if end is None else text.reference_value + end for end in (text.low, text.high))
        subject.perplexity = WithInterval(text.value, *ends)
    return {f"{subject.name}: {sentence}": None for sentence in (*compared.left_out, *compared.remarks)}
