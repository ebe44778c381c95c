"""The times of subjects, measured, emulated or predicted. Speed depends on layout and size alone, so a model that was
not timed has the times of one that is alike."""

from collections.abc import Collection
from pathlib import Path

from ladderize.errors import UserError
from ladderize.plan.document import NO_WEIGHTS, PlannedRow, PlanResult
from ladderize.report.documents import FoundDocument, FoundDocuments
from ladderize.report.subjects import (
    PHASE_WORDS,
    Setting,
    Spent,
    Subject,
    Subjects,
    Timing,
    TimingKind,
    WithInterval,
    check_layout,
    model_key,
    new_subject,
)
from ladderize.runtime.bench.document import LEAST_ROUNDS, BenchDocument, BenchRow, PhaseCommunication, SpeedRow


def add_times(subjects: Subjects, found: FoundDocuments, *, is_evaluated: bool) -> list[str]:
    """Add the measured and the predicted times; return the reasons why models were not timed.

    is_evaluated: True if accuracies are known: speed-ups must then be over the same model.
    """
    remarks = []
    documents: list[FoundDocument[BenchDocument] | FoundDocument[PlanResult]] = [*found.benches, *found.plans]
    for source, one in enumerate(documents):
        failed = {} if isinstance(one.document, PlanResult) else one.document.failed
        for model, why in failed.items():
            remarks.append(f"{one.path.name}: {why}, so it was not timed")
            if (subject := subjects.get(model_key(model))) is not None:
                subject.failure = subject.failure or remarks[-1]
        timings = [_timing(row, one.document, source) for row in one.document.rows]
        for timing in timings:
            _add_timing(subjects, timing, one.path)
        _share_times(subjects, source, set(map(model_key, failed)))
        if is_evaluated and timings and not timings[0].row.is_random:
            _check_reference(next(iter(subjects.values())), timings[0], one.path)
    return remarks


def _check_reference(reference: Subject, first: Timing, path: Path) -> None:
    """Raise UserError where speed-ups are over another model than the one that accuracies are compared with."""
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
    new = new_subject(row, row.model, "" if is_model else row.model, is_model=is_model, is_baseline=not row.is_model)
    subject = subjects.setdefault(key, new)
    if is_model:
        check_layout(subject, row, path)
    if subject.timing(timing.setting) is not None:
        raise UserError(f"{path} has two rows of {row.model} at batch size {row.batch_size}")
    subject.timings.append(timing)
    if isinstance(row, PlannedRow):
        subject.parameters = row.parameters
    elif (
        is_model and subject.parameters is None
    ):  # it was only timed: it has as many as the reference, if it is as large
        first = next(iter(subjects.values()))
        alike = (one.row for one in first.timings if one.setting == timing.setting)
        if any((one.dtype, one.weight_bytes) == (row.dtype, row.weight_bytes) for one in alike):
            subject.parameters = first.parameters


def _share_times(subjects: Subjects, source: int, failed: Collection[str]) -> None:
    """Give models that a document does not time the times of the first one of their layout and size that it does.

    A prediction for a layout goes to the models that have it.
    """

    def of_document(subject: Subject) -> list[Timing]:
        return [timing for timing in subject.timings if timing.setting.source == source]

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


def _timing(row: SpeedRow, document: BenchDocument | PlanResult, source: int) -> Timing:
    first, options, link = document.rows[0], document.options, document.link
    kind: TimingKind
    if isinstance(document, PlanResult):
        kind, medium, device, repeat = "predicted", "no link", document.device.name, LEAST_ROUNDS
    else:
        kind, medium = "emulated" if row.emulated else "measured", document.backend.partition(":")[0]
        device, repeat = document.environment.device, document.options.repeat
        device = f"vLLM, {device}" if document.engine is not None else device
    setting = Setting(
        kind=kind,
        tp_size=row.tp_size,
        medium=link.name if link is not None else medium,
        batch_size=row.batch_size,
        prompt_len=options.prompt_len,
        output_len=options.output_len,
        device=device,
        source=source,
        note="; random weights" if first.is_random else "",
    )
    speedup = {}
    for phase in PHASE_WORDS:
        ends = getattr(row, f"speedup_{phase}_interval")
        has_interval = repeat >= LEAST_ROUNDS and row.model != first.model and len(ends) == 2
        speedup[phase] = WithInterval(getattr(row, f"speedup_{phase}"), *(ends if has_interval else ()))
    overlaps = row.overlaps if isinstance(row, BenchRow) else lambda _: row.has_overlap
    parts = row.communication if isinstance(row, BenchRow | PlannedRow) else None
    spent = {phase: _spent(part, overlaps(phase)) for phase, part in (parts or {}).items()}
    return Timing(setting, row, row.model == first.model, speedup, spent)


def _spent(part: PhaseCommunication, overlaps: bool) -> Spent:
    low, high = part.exposed_interval_ms if len(part.exposed_interval_ms) == 2 else (None, None)
    # differences of two medians: hidden_ms may come out below 0, or above all communication, which no time can be
    hidden = min(max(0.0, part.hidden_ms), part.alone_ms, part.no_communication_ms) if overlaps else None
    return Spent(part.no_communication_ms, WithInterval(part.exposed_ms, low, high), hidden)
