"""The document of ``ladderize bench --train``, described in docs/files.md, and what a person sees of it."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

from ladderize.console import Console, human_bytes
from ladderize.runtime.bench.document import RuntimeDocument
from ladderize.runtime.bench.options import TrainingBenchOptions
from ladderize.runtime.bench.report import (
    bounds_text,
    group_text,
    labelled,
    rounds_text,
    runtime_warnings,
    schedule_text,
    short_ms,
    show_document,
    waited_text,
)
from ladderize.runtime.bench.rows import PassCommunication, VariantRow
from ladderize.runtime.bench.trace import Overlap
from ladderize.runtime.bench.training.check import GradientAgreement
from ladderize.runtime.bench.training.steps import STEP_PASSES
from ladderize.runtime.schedule import Schedule


@dataclass(frozen=True)
class TrainingBenchRow(VariantRow):
    """One model by one schedule at one batch size. A step is a forward and a backward pass over the whole batch,
    without the optimizer; samples are of every counted round.

    bound_ms: the step of the same model without communication, by the schedule that is fastest then; bound_share:
    bound_ms / step_ms. speedup: over the first row of this batch size.
    """

    LEFT_OUT: ClassVar = ("overlap",)

    schedule: Schedule
    checked: bool
    emulated: bool
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
    weight_bytes: int
    peak_memory_bytes: int | None
    communication: dict[str, PassCommunication]
    samples_ms: dict[str, list[float]]
    no_communication_samples_ms: dict[str, list[float]]
    overlap: dict[str, Overlap] | None = None


@dataclass(frozen=True)
class TrainingBenchDocument(RuntimeDocument):
    """Of training steps. checked: whether every schedule gave the loss and the gradients of the sequential one before
    it was timed; checks: what was found."""

    checked: bool
    options: TrainingBenchOptions
    checks: list[GradientAgreement]
    rows: list[TrainingBenchRow]

    @property
    def disproved(self) -> list[str]:
        """Passes that should overlap, and in whose trace nothing did."""
        return [
            f"{row.model} {row.schedule.name} ({name})"
            for row in self.rows
            for name, overlap in (row.overlap or {}).items()
            if overlap.proven is False
        ]


def show_training_bench(document: TrainingBenchDocument, console: Console) -> None:
    """Print the result of ``ladderize bench --train``."""
    options, rows = document.options, labelled(document.rows)
    schedules = [f"{schedule_text(schedule)}; " for schedule in options.timed_schedules if schedule.is_domino]
    names = [(row, f"{label}, {row.schedule.name}") for row, label in rows]
    show_document(
        document,
        console,
        heading=f"{group_text(document)}; {options.seq_len} tokens in each row; {''.join(schedules)}"
        f"{rounds_text(options, complete=document.complete)}",
        tables={
            "Training step": [_step_line(row, label, document) for row, label in rows],
            "Its two passes": [_passes_line(row, label, document) for row, label in rows],
        },
        explanations=_explanations(document),
        warnings=runtime_warnings(
            document,
            "variants",
            [
                (f"{name} ({row.batch_size} rows)", row.speedup_interval)
                for row, name in names
                if document.has_interval(row)
            ],
            [(f"{name} ({part})", row.communication[part]) for row, name in names for part in STEP_PASSES],
        ),
    )


def _step_line(row: TrainingBenchRow, label: str, document: TrainingBenchDocument) -> dict[str, str]:
    return {
        **_variant_columns(row, label),
        "ms": short_ms(row.step_ms),
        "tokens/s": f"{row.tokens_per_s:.0f}",
        "speed-up": f"{row.speedup:.2f}x",
        "95 % interval": bounds_text(row.speedup_interval) if document.has_interval(row) else "",
        "of no-comm": f"{row.bound_share:.2f}",
        "peak memory": "" if row.peak_memory_bytes is None else human_bytes(row.peak_memory_bytes),
    }


def _passes_line(row: TrainingBenchRow, label: str, document: TrainingBenchDocument) -> dict[str, str]:
    line = _variant_columns(row, label)
    for name, milliseconds in zip(STEP_PASSES, (row.forward_ms, row.backward_ms), strict=True):
        communication = row.communication[name]
        line[f"{name} ms"] = short_ms(milliseconds)
        line[f"{name} waited"] = waited_text(communication) if communication.alone_ms else ""
        line[f"{name} alone"] = short_ms(communication.alone_ms) if communication.alone_ms else ""
        if any(one.overlap is not None for one in document.rows):
            line[f"{name} hidden"] = "" if row.overlap is None else f"{row.overlap[name].share:.0%}"
    return line


def _variant_columns(row: TrainingBenchRow, label: str) -> dict[str, str]:
    return {"model": label, "schedule": row.schedule.name, "rows": str(row.batch_size)}


def _explanations(document: TrainingBenchDocument) -> Iterator[str]:
    yield (
        "A step is a forward and a backward pass, without the optimizer. speed-up: over the first row of this size; its"
        " 95 % interval says how far the rounds disagree."
    )
    yield "of no-comm: the share that the fastest step of this model without communication has of the step."
    yield "waited: ms longer than the same without communication. alone: ms of all its communication by itself."
    messages = {
        label: " + ".join(str(row.communication[name].all_reduces) for name in STEP_PASSES)
        for row, label in labelled(document.rows)
        if not row.schedule.is_domino
    }
    if messages:
        counted = ", ".join(f"{label} {count}" for label, count in messages.items())
        yield f"All-reduces of a sequential step, forward + backward: {counted}."
    if any(row.overlap is not None for row in document.rows):
        yield "hidden: the share of the communication that ran under compute in the trace."
    if document.checks:
        worst = max(check.gradient_difference / check.tolerance for check in document.checks)
        yield (
            "Checked before timing: every schedule gives the loss and the gradients of the sequential one whose sums"
            f" block; the largest difference is {worst:.0%} of the tolerance."
        )
    if not document.checked:
        yield "Not checked: whether the schedules give the same gradients."
