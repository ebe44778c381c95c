"""From a row of bench.json or plan.json to the times of a subject."""

from collections.abc import Callable

from ladderize.planning.plans.document import PlannedRow, PlanResult
from ladderize.runtime.bench.document import BenchDocument, BenchRow
from ladderize.runtime.bench.speed_row import PhaseCommunication, SpeedRow
from ladderize.runtime.bench.spread import LEAST_ROUNDS
from ladderize.tradeoff.report.content.subjects import MODEL_SUBJECT, Setting, Spent, Subject, Timing, WithInterval


def bench_timing(row: BenchRow, document: BenchDocument, number: int) -> Timing:
    """number: of the document, which tells settings apart."""
    first = document.rows[0]
    medium = document.link.name if document.link is not None else document.backend.partition(":")[0]
    setting = Setting(
        kind="emulated" if row.emulated else "measured",
        tp_size=row.tp_size,
        medium=medium,
        batch_size=row.batch_size,
        prompt_len=document.options.prompt_len,
        output_len=document.options.output_len,
        device=document.environment.device,
        reference=first.model,
        bare=first.is_random,
        source=number,
    )
    known = document.options.repeat >= LEAST_ROUNDS and row.model != first.model
    spent = {phase: _spent(part, row.overlaps(phase)) for phase, part in (row.communication or {}).items()}
    return _timing(row, setting, spent, lambda interval: known and len(interval) == 2)


def planned_timing(row: PlannedRow, document: PlanResult, number: int, reference: Subject) -> Timing:
    """reference: what speed-ups are over."""
    calibrated = ", calibrated" if row.basis == "calibrated" else ""
    setting = Setting(
        kind="predicted",
        tp_size=row.tp_size,
        medium=document.link.name if document.link is not None else "no link",
        batch_size=row.batch_size,
        prompt_len=document.options.prompt_len,
        output_len=document.options.output_len,
        device=document.device.name + calibrated,
        reference=reference.model,
        bare=reference.kind != MODEL_SUBJECT,
        source=number,
    )

    spent = {phase: _spent(part, row.has_overlap) for phase, part in row.communication.items()}
    return _timing(row, setting, spent, lambda interval: interval[0] < interval[1])


def _timing(
    row: SpeedRow, setting: Setting, spent: dict[str, Spent], has_interval: Callable[[list[float]], bool]
) -> Timing:
    """has_interval: whether these two numbers of a speed-up are the ends of one."""

    def speedup(value: float, interval: list[float]) -> WithInterval:
        return WithInterval(value, *interval) if has_interval(interval) else WithInterval(value)

    return Timing(
        setting=setting,
        speedup={
            "end_to_end": speedup(row.speedup_end_to_end, row.speedup_end_to_end_interval),
            "prefill": speedup(row.speedup_prefill, row.speedup_prefill_interval),
            "decode": speedup(row.speedup_decode, row.speedup_decode_interval),
        },
        prefill_ms=row.prefill_ms,
        decode_ms_per_token=row.decode_ms_per_token,
        output_tokens_per_s=row.output_tokens_per_s,
        peak_memory_bytes=row.peak_memory_bytes,
        spent=spent,
    )


def _spent(part: PhaseCommunication, overlaps: bool) -> Spent:
    low, high = part.exposed_interval_ms if len(part.exposed_interval_ms) == 2 else (None, None)
    # a difference of two medians may come out below 0, and what is hidden above all that there is; neither can be
    hidden = min(max(0.0, part.hidden_ms), part.alone_ms, part.no_communication_ms) if overlaps else None
    return Spent(part.no_communication_ms, WithInterval(part.exposed_ms, low, high), hidden)
