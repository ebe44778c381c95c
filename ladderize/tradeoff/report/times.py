"""The times of subjects, measured, emulated or predicted. Speed depends on layout and size alone, so a model that was
not timed has the times of one that is alike."""

from collections.abc import Collection
from pathlib import Path

from ladderize.errors import UserError
from ladderize.planning.plans.document import NO_WEIGHTS, PlannedRow, PlanResult
from ladderize.runtime.bench.document import LEAST_ROUNDS, BenchDocument, BenchRow, PhaseCommunication, SpeedRow
from ladderize.tradeoff.report.documents import FoundDocuments
from ladderize.tradeoff.report.subjects import (
    PHASE_WORDS,
    Setting,
    Spent,
    Subject,
    Subjects,
    Timing,
    WithInterval,
    check_layout,
    model_key,
    new_subject,
)


def add_times(subjects: Subjects, found: FoundDocuments, *, is_evaluated: bool) -> list[str]:
    """Add what was timed and what was predicted; return why models were not timed.

    is_evaluated: accuracies are known, so that speed-ups must be over the same model as these.
    """
    remarks = []
    for number, bench in enumerate(found.benches):
        timings = [_bench_timing(row, bench.document, number) for row in bench.document.rows]
        failed = {model_key(model): why for model, why in bench.document.failed.items()}
        for key, why in failed.items():
            remarks.append(f"{bench.path.name}: {why}, so it was not timed")
            if key in subjects:
                subjects[key].failure = subjects[key].failure or remarks[-1]
        _add_timings(subjects, timings, bench.path, failed.keys(), is_evaluated=is_evaluated)
    for number, plan in enumerate(found.plans, len(found.benches)):
        timings = [_planned_timing(row, plan.document, number) for row in plan.document.rows]
        _add_timings(subjects, timings, plan.path, (), is_evaluated=is_evaluated)
    return remarks


def _add_timings(
    subjects: Subjects, timings: list[Timing], path: Path, failed: Collection[str], *, is_evaluated: bool
) -> None:
    """Add the times of one document. failed: the models that it could not time."""
    for timing in timings:
        _add_timing(subjects, timing, path)
    _share_times(subjects, timings, failed)
    if is_evaluated and timings and not timings[0].row.is_random:
        reference, first = next(iter(subjects.values())), timings[0]
        if not any(timing.is_first for timing in reference.timings if timing.setting == first.setting):
            raise UserError(
                f"{path} has speed-ups over {first.row.model}, but the accuracies are compared with {reference.model};"
                " name the same model first in eval and in bench or plan"
            )


def _add_timing(subjects: Subjects, timing: Timing, path: Path) -> None:
    row = timing.row
    is_model = row.is_model and not row.is_random and row.weights != NO_WEIGHTS
    name = row.model if row.sync_tp_size is None else f"{row.model}, {row.sync_tp_size} virtual ranks"
    key = model_key(row.model) if is_model else f"{path}: {name}"
    if key not in subjects:
        new = new_subject(
            row, row.model, "" if is_model else row.model, is_model=is_model, is_baseline=not row.is_model
        )
        subjects[key] = new
    subject = subjects[key]
    if is_model:
        check_layout(subject, row, path)
    if subject.timing(timing.setting) is not None:
        raise UserError(f"{path} has two rows of {row.model} at batch size {row.batch_size}")
    subject.timings.append(timing)
    if isinstance(row, PlannedRow):
        subject.parameters = row.parameters
    elif is_model and subject.parameters is None:  # it was timed only: as many as the reference, if it is as large
        first = next(iter(subjects.values()))
        alike = (one.row for one in first.timings if one.setting == timing.setting)
        if any((one.dtype, one.weight_bytes) == (row.dtype, row.weight_bytes) for one in alike):
            subject.parameters = first.parameters


def _share_times(subjects: Subjects, timings: list[Timing], failed: Collection[str]) -> None:
    """Give models that a document does not time the times of the first one of their layout and size that it does. A
    prediction for a layout belongs to the models that have it."""

    def of_document(subject: Subject) -> list[Timing]:
        return [timing for timing in subject.timings if timing in timings]

    timed = {key: one for key, one in subjects.items() if one.parameters and not one.is_baseline and of_document(one)}
    shared = set()
    for key, subject in subjects.items():
        if not subject.is_model or subject.parameters is None or key in timed or key in failed:
            continue
        alike = (subject.parameters, subject.modes)
        donor = next((name for name, one in timed.items() if (one.parameters, one.modes) == alike), None)
        if donor is not None:
            subject.timings += of_document(timed[donor])
            subject.timed_as = timed[donor] if timed[donor].is_model else None
            shared |= set() if timed[donor].is_model else {donor}
    for key in shared:
        del subjects[key]


def _bench_timing(row: BenchRow, document: BenchDocument, source: int) -> Timing:
    first, options = document.rows[0], document.options
    setting = Setting(
        kind="emulated" if row.emulated else "measured",
        tp_size=row.tp_size,
        medium=document.link.name if document.link is not None else document.backend.partition(":")[0],
        batch_size=row.batch_size,
        prompt_len=options.prompt_len,
        output_len=options.output_len,
        device=document.environment.device,
        source=source,
        note="; random weights" if first.is_random else "",
    )
    known = options.repeat >= LEAST_ROUNDS and row.model != first.model
    spent = {phase: _spent(part, row.overlaps(phase)) for phase, part in (row.communication or {}).items()}
    return Timing(setting, row, row.model == first.model, _speedups(row, known=known), spent)


def _planned_timing(row: PlannedRow, document: PlanResult, source: int) -> Timing:
    setting = Setting(
        kind="predicted",
        tp_size=row.tp_size,
        medium=document.link.name if document.link is not None else "no link",
        batch_size=row.batch_size,
        prompt_len=document.options.prompt_len,
        output_len=document.options.output_len,
        device=document.device.name + (", calibrated" if row.basis == "calibrated" else ""),
        source=source,
    )
    spent = {phase: _spent(part, row.has_overlap) for phase, part in row.communication.items()}
    return Timing(setting, row, row.model == document.rows[0].model, _speedups(row, known=True), spent)


def _speedups(row: SpeedRow, *, known: bool) -> dict[str, WithInterval]:
    """Return the speed-up of each phase. known: whether its interval says something."""
    found = {}
    for phase in PHASE_WORDS:
        value, ends = getattr(row, f"speedup_{phase}"), getattr(row, f"speedup_{phase}_interval")
        is_interval = known and len(ends) == 2 and ends[0] < ends[1]
        found[phase] = WithInterval(value, *(ends if is_interval else ()))
    return found


def _spent(part: PhaseCommunication, overlaps: bool) -> Spent:
    low, high = part.exposed_interval_ms if len(part.exposed_interval_ms) == 2 else (None, None)
    # a difference of two medians may come out below 0, and what is hidden above all that there is; neither can be
    hidden = min(max(0.0, part.hidden_ms), part.alone_ms, part.no_communication_ms) if overlaps else None
    return Spent(part.no_communication_ms, WithInterval(part.exposed_ms, low, high), hidden)
