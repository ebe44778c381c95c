"""The document of ``ladderize bench --train``: described in docs/files.md."""

from dataclasses import dataclass
from typing import ClassVar

from ladderize.files.records import Record
from ladderize.runtime.bench.environment import Environment
from ladderize.runtime.bench.trace import Overlap
from ladderize.runtime.bench.training.options import TrainingBenchOptions
from ladderize.runtime.collectives.links import Link
from ladderize.runtime.schedule import Schedule


@dataclass(frozen=True)
class GradientAgreement(Record):
    """How far a schedule's loss and gradients are off those of the sequential schedule of the same model, whose sums
    block: relative differences, of the tensor that is worst.

    gradient_norm: of all gradients of all ranks together, of this schedule.
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
class PassCommunication(Record):
    """In one forward or backward pass: its all-reduces, and all collectives' times.

    exposed_interval_ms: 95 % interval of exposed_ms, which is a difference of two medians and may come out below 0.
    hideable_ms: what the layout and the schedule let run under compute; predicted_ms: of the pass, by the cost model.
    """

    all_reduces: int
    bytes: int
    no_communication_ms: float
    alone_ms: float
    exposed_ms: float
    exposed_interval_ms: list[float]
    hidden_ms: float
    hideable_ms: float
    predicted_ms: float


@dataclass(frozen=True)
class TrainingBenchRow(Record):
    """One model by one schedule at one batch size. A step is a forward and a backward pass over the whole batch,
    without the optimizer; samples are of every counted round.

    bound_ms: the step of the same model without communication, by the schedule that is fastest then; bound_share:
    bound_ms / step_ms. speedup: over the first row of this batch size.
    """

    LEFT_OUT: ClassVar = ("overlap",)

    model: str
    layout: str
    attention_sync: list[str]
    mlp_sync: list[str]
    sync_tp_size: int | None
    weights: str
    dtype: str
    schedule: Schedule
    checked: bool
    emulated: bool
    tp_size: int
    batch_size: int
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

    @property
    def is_random(self) -> bool:
        """No checkpoint: only its times mean something."""
        return self.weights == "random"


@dataclass(frozen=True)
class TrainingBenchDocument(Record):
    """All of the file but the schema in front.

    checked: whether every schedule gave the loss and the gradients of the sequential one before it was timed; checks:
    what was found. complete: False in what is written before all is done; it stays so where the rest failed.
    """

    complete: bool
    emulated: bool
    checked: bool
    options: TrainingBenchOptions
    link: Link | None
    message_bytes_outside_link_range: list[int]
    backend: str
    environment: Environment
    checks: list[GradientAgreement]
    alone_ms: dict[str, float]
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
