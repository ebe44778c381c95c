"""From documents to subjects: what was evaluated, timed and swept under one model path is one subject."""

import os
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ladderize.errors import UserError
from ladderize.eval.evaluation.table import short_names
from ladderize.eval.paired.document import CompareOptions
from ladderize.eval.results import EvalResults, EvaluatedModel
from ladderize.planning.plans.document import NO_WEIGHTS, PlannedRow, PlanResult
from ladderize.planning.plans.show import plan_verdicts
from ladderize.runtime.bench.document import BenchDocument, BenchRow
from ladderize.runtime.bench.rows import LEAST_ROUNDS, PhaseCommunication, SpeedRow
from ladderize.tradeoff.report.documents import FoundDocument, FoundDocuments
from ladderize.tradeoff.report.options import ReportOptions
from ladderize.tradeoff.report.scores import add_scores, check_same_questions
from ladderize.tradeoff.report.subjects import (
    BARE_SUBJECT,
    BASELINE_SUBJECT,
    KIND_ORDER,
    MODEL_SUBJECT,
    PHASE_WORDS,
    Setting,
    Spent,
    Subject,
    Timing,
    TimingKind,
    WithInterval,
)
from ladderize.workflows.sweep_document import SweepPoint


@dataclass
class ReportContent:
    """All that a report shows."""

    margin: float
    subjects: list[Subject]  # the reference first
    settings: list[Setting]  # measured ones first, then by ranks (most first) and batch size
    found: FoundDocuments
    remarks: list[str] = field(default_factory=list)  # what a reader must know about how the numbers came about

    @property
    def models(self) -> list[Subject]:
        """Those whose accuracy may be asked for: no baselines, and none with random weights."""
        return [subject for subject in self.subjects if subject.kind == MODEL_SUBJECT]

    @property
    def reference(self) -> Subject | None:
        """What the others are compared with."""
        return self.models[0] if self.models else None

    @property
    def real_settings(self) -> list[Setting]:
        """Where checkpoints were timed, not shapes."""
        return [setting for setting in self.settings if not setting.bare]


def join_documents(found: FoundDocuments, options: ReportOptions) -> ReportContent:
    """Raises UserError for documents that do not belong together."""
    margins = {sweep.document.margin for sweep in found.sweeps}
    if options.margin is None and len(margins) > 1:
        raise UserError(
            f"the sweeps have margins of {' and '.join(f'{m:g}' for m in sorted(margins))} points; say --margin"
        )
    joint = _Joint()
    for sweep in found.sweeps:
        for point in sweep.document.points:
            joint.add_point(point)
    check_same_questions(found.results)
    for results in found.results:
        joint.add_results(results)
    for number, bench in enumerate(found.benches):
        joint.add_bench(bench, number)
    joint.share_times()
    for number, plan in enumerate(found.plans, len(found.benches)):
        joint.add_plan(plan, number)
    subjects = sorted(joint.subjects, key=lambda subject: subject.kind != MODEL_SUBJECT)
    settings = sorted({timing.setting for subject in subjects for timing in subject.timings}, key=_preference)
    margin = options.margin or next(iter(margins), CompareOptions.margin)
    content = ReportContent(margin, subjects, settings, found)
    _name(content.models)
    content.remarks += joint.failed.values()
    content.remarks += add_scores(found.results, joint.evaluated, content.reference, margin)
    for plan in found.plans:
        verdicts = plan_verdicts(plan.document) if plan.document.rows else []
        content.remarks += [f"{plan.path.name}: {verdict}" for verdict in verdicts]
    return content


def _preference(setting: Setting) -> tuple[object, ...]:
    kind = KIND_ORDER.index(setting.kind)
    first = (setting.bare, kind, -setting.tp_size, setting.source, setting.batch_size)
    return (*first, setting.medium, setting.prompt_len, setting.output_len)


@dataclass
class _Joint:
    """Subjects by the names that documents use for them."""

    subjects: list[Subject] = field(default_factory=list)
    evaluated: dict[str, Subject] = field(default_factory=dict)
    timed: dict[str, list[Subject]] = field(default_factory=dict)
    where: dict[str, Path] = field(default_factory=dict)  # which results.json has a model
    failed: dict[str, str] = field(default_factory=dict)  # why a benchmark refused to time a model

    def _new(self, row: SweepPoint | EvaluatedModel | SpeedRow, model: str, name: str = "", **more: Any) -> Subject:
        subject = Subject(name, model, row.layout, row.attention_sync, row.mlp_sync, row.sync_tp_size, **more)
        self.subjects.append(subject)
        return subject

    def _timed_by(self, key: str, row: SpeedRow, model: str, name: str, **more: Any) -> list[Subject]:
        """What has the times of a row: those of the key, or something that nothing else knows."""
        if key not in self.timed:
            kind = more["kind"]
            self.timed[key] = [self._new(row, model, "" if kind == MODEL_SUBJECT else name, **more)]
        return self.timed[key]

    @property
    def evaluations(self) -> str:
        return _some({str(path) for path in self.where.values()})

    def add_point(self, point: SweepPoint) -> None:
        if point.model is not None and _normal(point.model) in self.evaluated:
            return  # of another sweep, too: paths hold a hash of all that decides a model
        more = {name: getattr(point, name) for name in ("adapted", "tokens", "failure", "not_promoted", "control")}
        subject = self._new(point, point.model or point.name, point.name, **more)
        if point.model is not None:
            self.evaluated.setdefault(_normal(point.model), subject)
        if (timed := point.timed or point.model) is not None:
            self.timed.setdefault(_normal(timed), []).append(subject)

    def add_results(self, results: FoundDocument[EvalResults]) -> None:
        for number, entry in enumerate(results.document.models):
            key = _normal(entry.model.model)
            if key in self.where and number == 0:
                continue  # the reference of several evaluations: the first one counts
            if key in self.where:
                raise UserError(
                    f"{results.path} and {self.where[key]} both evaluate {entry.model.model}; name one of the two"
                )
            self.where[key] = results.path
            if key not in self.evaluated:
                self.evaluated[key] = self._new(entry.model, entry.model.model)
                self.timed.setdefault(key, []).append(self.evaluated[key])
            self.evaluated[key].parameters = entry.model.parameters
            _check_layout(self.evaluated[key], entry.model, results.path)

    def add_bench(self, bench: FoundDocument[BenchDocument], number: int) -> None:
        """Raises UserError for times of models none of which was evaluated, where others were, and for speed-ups over
        another model than the one that accuracies are compared with."""
        rows = bench.document.rows
        real = {row.model: self.timed.get(_normal(row.model), []) for row in rows if row.is_model and not row.is_random}
        if self.where and real and not any(real.values()):
            raise UserError(
                f"{bench.path} times {_some(set(real))}, but {self.evaluations} evaluates {_some(set(self.where))}: no"
                " model is in both; time and evaluate the same paths"
            )
        if self.where and rows and not rows[0].is_random and self.subjects[0] not in real.get(rows[0].model, []):
            raise UserError(
                f"{bench.path} has speed-ups over {rows[0].model}, but the accuracies are compared with"
                f" {self.subjects[0].model}; name the same model first in eval and in bench"
            )
        for model, failure in bench.document.failed.items():
            self.failed[_normal(model)] = f"{bench.path.name}: {failure}, so it was not timed"
        sizes = [(row.dtype, row.weight_bytes) for row in rows]
        known = next((one.parameters for one in real.get(rows[0].model, ())), None) if rows else None
        for row, size in zip(rows, sizes, strict=True):
            for subject in real.get(row.model, []) if not row.is_random else ():
                _check_layout(subject, row, bench.path)
            is_real = row.is_model and not row.is_random
            key = _normal(row.model) if is_real else f"{bench.path}: {row.model}: {row.weights}"
            kind = MODEL_SUBJECT if is_real else BARE_SUBJECT if row.is_model else BASELINE_SUBJECT
            for subject in self._timed_by(key, row, row.model, row.model, kind=kind):
                _add_timing(subject, bench_timing(row, bench.document, number), bench.path)
                if is_real and subject.parameters is None and size == sizes[0]:
                    subject.parameters = known  # as many as the reference's: it was timed only

    def add_plan(self, plan: FoundDocument[PlanResult], number: int) -> None:
        """Give predicted times to all models of the same layout and size."""
        document = plan.document
        if not document.rows:
            return
        first = self._planned(document.rows[0], plan)[0]
        if self.where and first.kind != MODEL_SUBJECT:
            raise UserError(
                f"{plan.path} predicts speed-ups over a dense model of another size than what {self.evaluations}"
                " evaluates; make it of that model"
            )
        measured = {id(subject) for subject in self.subjects if subject.timings}
        for row in document.rows:
            same = self._planned(row, plan)
            for subject in same:
                _add_timing(subject, planned_timing(row, document, number, first), plan.path)
                if subject is not same[0] and id(subject) not in measured:
                    subject.timed_as = same[:1]

    def _planned(self, row: PlannedRow, plan: FoundDocument[PlanResult]) -> list[Subject]:
        """What was evaluated of this layout and size; else the layout by itself."""
        wanted = (row.parameters, (tuple(row.attention_sync), tuple(row.mlp_sync), row.sync_tp_size))
        same = [one for one in self.subjects if one.kind == MODEL_SUBJECT and (one.parameters, one.modes) == wanted]
        if same and row.is_model:
            return same
        is_own = row.is_model and row.weights != NO_WEIGHTS
        timed = [one for one in self.timed.get(_normal(row.model), []) if is_own and one.parameters is None]
        for subject in timed:  # nothing else tells its size
            _check_layout(subject, row, plan.path)
            subject.parameters = row.parameters
        if timed:
            return timed
        sizes = {r.sync_tp_size for r in plan.document.rows if r.model == row.model}
        name = f"{row.model}, {row.sync_tp_size} virtual ranks" if len(sizes) > 1 else row.model
        kind = BASELINE_SUBJECT if not row.is_model else MODEL_SUBJECT if is_own else BARE_SUBJECT
        model = row.model if is_own else name
        return self._timed_by(f"{plan.path}: {name}", row, model, name, kind=kind, parameters=row.parameters)

    def share_times(self) -> None:
        """Give a model that was not timed the times of the first one of its layout and size that was: speed depends on
        nothing else."""
        for key, same in self.timed.items():  # of a sweep, which times one model of each layout
            first, *others = sorted(same, key=lambda one: _normal(one.model) != key)
            for subject in others if first.timings else ():
                subject.timed_as = [first]
        models = [subject for subject in self.subjects if subject.kind == MODEL_SUBJECT]
        timed = [subject for subject in models if subject.timings and not subject.timed_as]
        for subject in models:
            subject.failure = subject.failure or self.failed.get(_normal(subject.model))
            same = [one for one in timed if (one.parameters, one.modes) == (subject.parameters, subject.modes)]
            if subject.parameters and not subject.timings and same and _normal(subject.model) not in self.failed:
                subject.timings, subject.timed_as = list(same[0].timings), same


def _normal(model: str) -> str:
    """A model's path as one name: ``./a/`` and ``a`` are the same."""
    return os.path.normpath(model)


def _some(names: set[str]) -> str:
    """At most three names."""
    shown = sorted(names)[:3]
    return ", ".join(shown) + (f" and {len(names) - len(shown)} more" if len(names) > len(shown) else "")


def _check_layout(subject: Subject, row: EvaluatedModel | SpeedRow, path: Path) -> None:
    if (subject.attention_sync, subject.mlp_sync) != (row.attention_sync, row.mlp_sync):
        raise UserError(
            f"{path} has {subject.model} in another layout than the other documents ({subject.layout}): it was"
            " converted again in between; evaluate and time it again"
        )


def _add_timing(subject: Subject, timing: Timing, path: Path) -> None:
    if subject.timing(timing.setting) is not None:
        raise UserError(f"{path} has two rows of {timing.row.model} at batch size {timing.row.batch_size}")
    subject.timings.append(timing)


def _name(models: list[Subject]) -> None:
    """Names of those that a sweep has not named: the last part of the path, where these differ. None comes twice."""
    unnamed = [subject for subject in models if not subject.name]
    taken = {subject.name for subject in models}
    for subject, name in zip(unnamed, short_names([subject.model for subject in unnamed]), strict=True):
        subject.name = subject.model if name in taken else name
    counts: Counter[str] = Counter()
    for subject in models:  # of several sweeps
        counts[subject.name] = count = counts[subject.name] + 1
        subject.name += f" #{count}" if count > 1 else ""


# ---- from a row of bench.json or plan.json to the times of a subject; number: of the document ----


def bench_timing(row: BenchRow, document: BenchDocument, number: int) -> Timing:
    """The first row is what speed-ups are over, and few rounds give no interval."""
    first, options = document.rows[0], document.options
    kind: TimingKind = "emulated" if row.emulated else "measured"
    medium = document.link.name if document.link is not None else document.backend.partition(":")[0]
    place = (row.batch_size, options.prompt_len, options.output_len, document.environment.device)
    setting = Setting(kind, row.tp_size, medium, *place, first.model, first.is_random, number)
    known = options.repeat >= LEAST_ROUNDS and row.model != first.model
    spent = {phase: _spent(part, row.overlaps(phase)) for phase, part in (row.communication or {}).items()}
    return Timing(setting, row, _speedups(row, lambda ends: known and len(ends) == 2), spent)


def planned_timing(row: PlannedRow, document: PlanResult, number: int, reference: Subject) -> Timing:
    """reference: what speed-ups are over."""
    medium = document.link.name if document.link is not None else "no link"
    device = document.device.name + (", calibrated" if row.basis == "calibrated" else "")
    place = (row.batch_size, document.options.prompt_len, document.options.output_len, device)
    is_bare = reference.kind != MODEL_SUBJECT
    setting = Setting("predicted", row.tp_size, medium, *place, reference.model, is_bare, number)
    spent = {phase: _spent(part, row.has_overlap) for phase, part in row.communication.items()}
    return Timing(setting, row, _speedups(row, lambda ends: ends[0] < ends[1]), spent)


def _speedups(row: SpeedRow, is_interval: Callable[[list[float]], bool]) -> dict[str, WithInterval]:
    """Of each phase. is_interval: whether these two numbers are the ends of one."""
    found = {}
    for phase in PHASE_WORDS:
        value, ends = getattr(row, f"speedup_{phase}"), getattr(row, f"speedup_{phase}_interval")
        found[phase] = WithInterval(value, *(ends if is_interval(ends) else ()))
    return found


def _spent(part: PhaseCommunication, overlaps: bool) -> Spent:
    low, high = part.exposed_interval_ms if len(part.exposed_interval_ms) == 2 else (None, None)
    # a difference of two medians may come out below 0, and what is hidden above all that there is; neither can be
    hidden = min(max(0.0, part.hidden_ms), part.alone_ms, part.no_communication_ms) if overlaps else None
    return Spent(part.no_communication_ms, WithInterval(part.exposed_ms, low, high), hidden)
