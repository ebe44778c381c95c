"""The document of ``ladderize bench --train``, described in docs/files.md, and its tables."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

from ladderize.console import Console, human_bytes
from ladderize.files.records import Record
from ladderize.runtime.bench.document import Overlap, PhaseCommunication, TimedDocument, VariantRow
from ladderize.runtime.bench.options import TrainingBenchOptions
from ladderize.runtime.bench.report import group_text, labelled, schedule_text, show_tables, table_line
from ladderize.runtime.schedule import Schedule

STEP_PASSES = ("forward", "backward")


@dataclass(frozen=True)
class GradientAgreement(Record):
    """The relative differences of a schedule's loss and gradients from the same model's sequential schedule, whose sums
    block.

    gradient_norm: of all gradients of all ranks together, of this schedule.
    gradient_difference: of the worst tensor.
    tolerance: of that tensor.
    """

    model: str
    schedule: Schedule
    batch_size: int
    loss: float
    gradient_norm: float
    loss_difference: float
    gradient_difference: float
    tolerance: float


@dataclass(frozen=True)
class TrainingBenchRow(VariantRow):
    """One model by one schedule at one batch size.

    A step is a forward and a backward pass over the whole batch, without the optimizer. Samples are of every counted
    round.

    bound_ms: the step of the same model without communication, by the schedule that is fastest then.
    bound_share: bound_ms / step_ms.
    speedup: over the first row of this batch size.
    """

    LEFT_OUT: ClassVar = ("overlap",)

    schedule: Schedule
    seq_len: int
    step_ms: float
    forward_ms: float
    backward_ms: float
    tokens_per_s: float
    no_communication_ms: float
    bound_ms: float
    bound_share: float
    speedup: float
    speedup_interval: list[float]
    speedup_forward: float
    speedup_forward_interval: list[float]
    communication: dict[str, PhaseCommunication]
    samples_ms: dict[str, list[float]]
    no_communication_samples_ms: dict[str, list[float]]
    overlap: dict[str, Overlap] | None = None


@dataclass(frozen=True)
class TrainingBenchDocument(TimedDocument):
    """The result of ``ladderize bench --train``.

    checked: True if the schedules' gradients were compared before anything was timed.
    checks: the differences of the schedules that passed.
    """

    checked: bool
    options: TrainingBenchOptions
    checks: list[GradientAgreement]
    rows: list[TrainingBenchRow]

    @property
    def disproved(self) -> list[str]:
        """The passes that should overlap, and in whose trace nothing did."""
        return [
            f"{row.model} {row.schedule.name} ({name})"
            for row in self.rows
            for name, overlap in (row.overlap or {}).items()
            if overlap.proven is False
        ]


def show_training_bench(document: TrainingBenchDocument, console: Console) -> None:
    """Print the result of ``ladderize bench --train``."""
    if not document.rows:
        return
    options, rows = document.options, labelled(document.rows)
    schedules = [f"; {schedule_text(schedule)}" for schedule in options.timed_schedules if schedule.is_domino]
    names = [(row, f"{label}, {row.schedule.name}") for row, label in rows]
    show_tables(
        document,
        console,
        heading=f"{group_text(document)}; {options.seq_len} tokens in each row{''.join(schedules)}",
        tables={
            "Training step": [_step_line(document, row, label) for row, label in rows],
            "Forward": [_pass_line(document, row, label, "forward") for row, label in rows],
            "Backward": [_pass_line(document, row, label, "backward") for row, label in rows],
        },
        explanations=_explanations(document),
        speedups=[
            (f"{name} ({row.batch_size} rows)", row.speedup_interval)
            for row, name in names
            if document.has_interval(row)
        ],
        communications=[(f"{name} ({part})", row.communication[part]) for row, name in names for part in STEP_PASSES],
    )


def _step_line(document: TrainingBenchDocument, row: TrainingBenchRow, label: str) -> dict[str, str]:
    more = {
        "tokens/s": f"{row.tokens_per_s:.0f}",
        "of no-comm": f"{row.bound_share:.2f}",
        "peak memory": "" if row.peak_memory_bytes is None else human_bytes(row.peak_memory_bytes),
    }
    return table_line(
        document, row, label, row.step_ms, (row.speedup, row.speedup_interval), variant=_schedule(row), more=more
    )


def _pass_line(document: TrainingBenchDocument, row: TrainingBenchRow, label: str, part: str) -> dict[str, str]:
    milliseconds = row.forward_ms if part == "forward" else row.backward_ms
    more = {}
    if any(one.overlap is not None for one in document.rows):
        more["hidden in trace"] = "" if row.overlap is None else f"{row.overlap[part].share:.0%}"
    communication = row.communication[part]
    return table_line(
        document, row, label, milliseconds, communication=communication, variant=_schedule(row), more=more
    )


def _schedule(row: TrainingBenchRow) -> dict[str, str]:
    return {"schedule": row.schedule.name}


def _explanations(document: TrainingBenchDocument) -> Iterator[str]:
    yield "A step is a forward and a backward pass, without the optimizer."
    yield "of no-comm: the share that the fastest step of this model without communication has of the step."
    messages = {
        label: " + ".join(str(row.communication[name].all_reduces) for name in STEP_PASSES)
        for row, label in labelled(document.rows)
        if not row.schedule.is_domino
    }
    if messages:
        counted = ", ".join(f"{label} {count}" for label, count in messages.items())
        yield f"All-reduces of a sequential step, forward + backward: {counted}."
    if document.checks:
        worst = max(check.gradient_difference / check.tolerance for check in document.checks)
        yield (
            "Checked before timing: every schedule gives the loss and the gradients of the sequential one whose sums"
            f" block; the largest difference is {worst:.0%} of the tolerance."
        )
    for failure in document.failed.values():
        yield f"Check of gradients FAILED, so not timed: {failure}."
    if not document.checked:
        yield "Not checked: whether the schedules give the same gradients."
