"""From documents to subjects: what was evaluated, timed and swept under one model path is one subject."""

import os
from dataclasses import dataclass, field
from pathlib import Path

from ladderize.errors import UserError
from ladderize.eval.evaluation.table import short_names
from ladderize.planning.plans.document import NO_WEIGHTS, PlannedRow
from ladderize.runtime.bench.document import BenchRow
from ladderize.tradeoff.report.content.documents import FoundBench, FoundDocuments, FoundPlan, FoundResults
from ladderize.tradeoff.report.content.options import DEFAULT_MARGIN, ReportOptions
from ladderize.tradeoff.report.content.scores import add_scores, check_same_questions, compare_controls, compare_stored
from ladderize.tradeoff.report.content.subjects import (
    BARE_SUBJECT,
    BASELINE_SUBJECT,
    KIND_ORDER,
    MODEL_SUBJECT,
    Setting,
    Subject,
)
from ladderize.tradeoff.report.content.timings import bench_timing, planned_timing
from ladderize.workflows.sweep_document import SweepPoint


@dataclass
class ReportContent:
    """subjects: the reference first. settings: measured ones first, then by ranks (most first) and batch size.
    remarks: what a reader must know about how the numbers came about."""

    margin: float
    subjects: list[Subject]
    settings: list[Setting]
    found: FoundDocuments
    remarks: list[str] = field(default_factory=list)

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
    margin = options.margin or next(iter(margins), DEFAULT_MARGIN)
    joint = _Joint()
    for sweep in found.sweeps:
        for point in sweep.document.points:
            joint.add_point(point)
    check_same_questions(found.results)
    for results in found.results:
        joint.add_results(results)
    for number, bench in enumerate(found.benches):
        joint.add_bench(bench, number)
    for number, plan in enumerate(found.plans, len(found.benches)):
        joint.add_plan(plan, number)
    joint.check_joined(found)
    joint.check_references(found)
    joint.share_times()
    content = ReportContent(margin, joint.in_order(), joint.settings(), found)
    _name(content.models)
    for results in found.results:
        add_scores(results, joint.evaluated, content.reference, margin, content.remarks)
    compare_stored(found.results, joint.evaluated, content.reference, margin, content.remarks)
    compare_controls(found.results, joint.evaluated, margin)
    if shared := [subject.name for subject in content.models if subject.timed_as is not None]:
        content.remarks.append(
            "Speed depends on the layout and the size only, so these have the times of another model with the same"
            f" ones: {'; '.join(shared)}."
        )
    return content


@dataclass
class _Joint:
    """Subjects by the names that documents use for them."""

    subjects: list[Subject] = field(default_factory=list)
    evaluated: dict[str, Subject] = field(default_factory=dict)
    timed: dict[str, list[Subject]] = field(default_factory=dict)
    where: dict[str, Path] = field(default_factory=dict)  # which results.json has a model
    joined: dict[Path, bool] = field(default_factory=dict)  # whether a bench.json has a model that was evaluated

    def add_point(self, point: SweepPoint) -> None:
        if point.model is not None and _normal(point.model) in self.evaluated:
            return  # of another sweep, too: paths hold a hash of all that decides a model
        subject = Subject(
            name=point.name,
            model=point.model or point.name,
            layout=point.layout,
            attention_sync=point.attention_sync,
            mlp_sync=point.mlp_sync,
            sync_tp_size=point.sync_tp_size,
            adapted=point.adapted,
            tokens=point.tokens,
            failure=point.failure,
            not_promoted=point.not_promoted,
            control=point.control,
        )
        self.subjects.append(subject)
        if point.model is not None:
            self.evaluated.setdefault(_normal(point.model), subject)
        if (timed := point.timed or point.model) is not None:
            self.timed.setdefault(_normal(timed), []).append(subject)

    def add_results(self, results: FoundResults) -> None:
        for number, entry in enumerate(results.document.models):
            key = _normal(entry.model.model)
            if key in self.where and number == 0:
                continue  # the reference of several evaluations: the first one counts
            if key in self.where:
                raise UserError(
                    f"{results.path} and {self.where[key]} both evaluate {entry.model.model}; name one of the two"
                )
            self.where[key] = results.path
            subject = self.evaluated.get(key)
            if subject is None:
                subject = Subject(
                    name="",
                    model=entry.model.model,
                    layout=entry.model.layout,
                    attention_sync=entry.model.attention_sync,
                    mlp_sync=entry.model.mlp_sync,
                    sync_tp_size=entry.model.sync_tp_size,
                )
                self.subjects.append(subject)
                self.evaluated[key] = subject
                self.timed.setdefault(key, []).append(subject)
            subject.parameters = entry.model.parameters
            _check_layout(subject, entry.model.attention_sync, entry.model.mlp_sync, results.path)

    def add_bench(self, bench: FoundBench, number: int) -> None:
        document = bench.document
        for row in document.rows:
            timing = bench_timing(row, document, number)
            for subject in self._subjects_of(row, bench):
                if subject.timing(timing.setting) is not None:
                    raise UserError(f"{bench.path} has two rows of {row.model} at batch size {row.batch_size}")
                subject.timings.append(timing)

    def _subjects_of(self, row: BenchRow, bench: FoundBench) -> list[Subject]:
        if row.is_model and not row.is_random:
            key = _normal(row.model)
            self.joined[bench.path] = self.joined.get(bench.path, False) or key in self.timed
            if key in self.timed:
                for subject in self.timed[key]:
                    _check_layout(subject, row.attention_sync, row.mlp_sync, bench.path)
                return self.timed[key]
        else:  # never joined to what was evaluated
            key = f"{bench.path}: {row.model}: {row.weights}"
            if key in self.timed:
                return self.timed[key]
        kind = BASELINE_SUBJECT if not row.is_model else BARE_SUBJECT if row.is_random else MODEL_SUBJECT
        subject = Subject(
            name="" if kind == MODEL_SUBJECT else row.model,
            model=row.model,
            layout=row.layout,
            attention_sync=row.attention_sync,
            mlp_sync=row.mlp_sync,
            sync_tp_size=row.sync_tp_size,
            kind=kind,
        )
        self.subjects.append(subject)
        self.timed[key] = [subject]
        return [subject]

    def add_plan(self, plan: FoundPlan, number: int) -> None:
        """Give predicted times to all models of the same layout and size."""
        document = plan.document
        if not document.rows:
            return
        first = self._planned_subjects(document.rows[0], plan)[0]
        if self.where and first.kind != MODEL_SUBJECT:
            raise UserError(
                f"{plan.path} predicts speed-ups over a dense model of another size than what"
                f" {_some({str(path) for path in self.where.values()})} evaluates; make it of that model"
            )
        measured = {id(subject) for subject in self.subjects if subject.timings}
        for row in document.rows:
            timing = planned_timing(row, document, number, first)
            same = self._planned_subjects(row, plan)
            for subject in same:
                if subject.timing(timing.setting) is not None:
                    raise UserError(f"{plan.path} has two rows of {row.model} at batch size {row.batch_size}")
                subject.timings.append(timing)
                if subject is not same[0] and id(subject) not in measured:
                    subject.timed_as = same[0].model

    def _planned_subjects(self, row: PlannedRow, plan: FoundPlan) -> list[Subject]:
        """What was evaluated of this layout and size; else the layout by itself."""
        looks = (row.parameters, row.attention_sync, row.mlp_sync, row.sync_tp_size)
        models = [subject for subject in self.subjects if subject.kind == MODEL_SUBJECT]
        same = [subject for subject in models if _looks(subject) == looks]
        if same and row.is_model:
            return same
        own = row.is_model and row.weights != NO_WEIGHTS
        timed = [one for one in self.timed.get(_normal(row.model), []) if own and one.parameters is None]
        for subject in timed:  # nothing else tells its size
            _check_layout(subject, row.attention_sync, row.mlp_sync, plan.path)
            subject.parameters = row.parameters
        if timed:
            return timed
        sizes = {r.sync_tp_size for r in plan.document.rows if r.model == row.model}
        name = f"{row.model}, {row.sync_tp_size} virtual ranks" if len(sizes) > 1 else row.model
        key = f"{plan.path}: {name}"
        if key not in self.timed:
            kind = BASELINE_SUBJECT if not row.is_model else MODEL_SUBJECT if own else BARE_SUBJECT
            subject = Subject(
                name="" if own else name,
                model=row.model if own else name,
                layout=row.layout,
                attention_sync=row.attention_sync,
                mlp_sync=row.mlp_sync,
                sync_tp_size=row.sync_tp_size,
                kind=kind,
                parameters=row.parameters,
            )
            self.subjects.append(subject)
            self.timed[key] = [subject]
        return self.timed[key]

    def check_joined(self, found: FoundDocuments) -> None:
        """Raise UserError for times of models none of which was evaluated, where others were."""
        for path, joined in self.joined.items():
            if self.where and not joined:
                timed = {r.model for b in found.benches if b.path == path for r in b.document.rows if r.is_model}
                raise UserError(
                    f"{path} times {_some(timed)}, but {_some({str(p) for p in self.where.values()})} evaluates"
                    f" {_some(set(self.where))}: no model is in both; time and evaluate the same paths"
                )

    def share_times(self) -> None:
        """Give an adapted model the times of the one that it was made of: speed depends on the layout and the size."""
        for first, *others in self.timed.values():  # of a sweep, which times one model of each layout
            for subject in others if first.timings else ():
                subject.timed_as = first.model
        models = [subject for subject in self.subjects if subject.kind == MODEL_SUBJECT]
        timed = [subject for subject in models if subject.timings and subject.parameters is not None]
        for subject in models:
            same = [other for other in timed if _looks(subject) == _looks(other)]
            if not subject.timings and same:
                subject.timings, subject.timed_as = list(same[0].timings), same[0].model

    def check_references(self, found: FoundDocuments) -> None:
        """Raise UserError where speed-ups are over another model than the one that accuracies are compared with."""
        reference = next((subject for subject in self.subjects if subject.kind == MODEL_SUBJECT), None)
        for bench in found.benches:
            rows = bench.document.rows
            if not self.where or not rows or rows[0].is_random or reference is None:
                continue
            if reference not in self.timed.get(_normal(rows[0].model), []):
                raise UserError(
                    f"{bench.path} has speed-ups over {rows[0].model}, but the accuracies are compared with"
                    f" {reference.model}; name the same model first in eval and in bench"
                )

    def in_order(self) -> list[Subject]:
        """What was evaluated first is the reference, or the dense model of a sweep; then as they came."""
        return sorted(self.subjects, key=lambda subject: subject.kind != MODEL_SUBJECT)

    def settings(self) -> list[Setting]:
        found = {timing.setting for subject in self.subjects for timing in subject.timings}
        return sorted(found, key=_preference)


def _looks(subject: Subject) -> tuple[object, ...]:
    """What its speed depends on."""
    return subject.parameters, subject.attention_sync, subject.mlp_sync, subject.sync_tp_size


def _preference(setting: Setting) -> tuple[object, ...]:
    return (
        setting.bare, KIND_ORDER.index(setting.kind), -setting.tp_size, setting.source, setting.batch_size,
        setting.medium, setting.prompt_len, setting.output_len,
    )  # fmt: skip


def _normal(model: str) -> str:
    """A model's path as one name: ``./a/`` and ``a`` are the same."""
    return os.path.normpath(model)


def _some(names: set[str]) -> str:
    """At most three names."""
    shown = sorted(names)[:3]
    return ", ".join(shown) + (f" and {len(names) - len(shown)} more" if len(names) > len(shown) else "")


def _check_layout(subject: Subject, attention: list[str], mlp: list[str], path: Path) -> None:
    if (subject.attention_sync, subject.mlp_sync) != (attention, mlp):
        raise UserError(
            f"{path} has {subject.model} in another layout than the other documents ({subject.layout}): it was"
            " converted again in between; evaluate and time it again"
        )


def _name(models: list[Subject]) -> None:
    """Names of those that a sweep has not named: the last part of the path, where these differ. None comes twice."""
    unnamed = [subject for subject in models if not subject.name]
    taken = {subject.name for subject in models}
    for subject, name in zip(unnamed, short_names([subject.model for subject in unnamed]), strict=True):
        subject.name = subject.model if name in taken else name
    counts: dict[str, int] = {}
    for subject in models:  # of several sweeps
        counts[subject.name] = count = counts.get(subject.name, 0) + 1
        subject.name += f" #{count}" if count > 1 else ""
