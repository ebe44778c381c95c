"""The document of ``ladderize bench --train``: described in docs/files.md."""

import dataclasses
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import ClassVar

from ladderize.files.records import Record
from ladderize.layout import OVERLAPPED
from ladderize.runtime.bench.cost_model import predict
from ladderize.runtime.bench.environment import Environment
from ladderize.runtime.bench.instrument import PhaseOperations
from ladderize.runtime.bench.rows import MIN_OVERLAP
from ladderize.runtime.bench.spread import difference_interval, speedup_interval
from ladderize.runtime.bench.trace import Overlap
from ladderize.runtime.bench.training.options import TrainingBenchOptions
from ladderize.runtime.bench.training.steps import STEP_PASSES, TrainingStep
from ladderize.runtime.collectives.links import Link
from ladderize.runtime.schedule import Schedule
from ladderize.runtime.spec import ModelSpec


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


WHOLE_STEP = "step"  # both passes, in samples


@dataclass
class TimedStep:
    """A step, and the seconds that it took in each counted round, by pass."""

    step: TrainingStep
    seconds: dict[str, list[float]] = field(default_factory=lambda: {name: [] for name in (WHOLE_STEP, *STEP_PASSES)})

    def add(self, passes: Sequence[float]) -> None:
        for name, seconds in zip((WHOLE_STEP, *STEP_PASSES), (sum(passes), *passes), strict=True):
            self.seconds[name].append(seconds)

    def median_ms(self, name: str) -> float:
        return statistics.median(self.seconds[name]) * 1e3

    def samples_ms(self) -> dict[str, list[float]]:
        return {name: [1e3 * one for one in seconds] for name, seconds in self.seconds.items()}


@dataclass
class TimedVariant:
    """A model by a schedule at one batch size: with and without communication, and what was measured of it."""

    spec: ModelSpec
    schedule: Schedule
    communicating: TimedStep
    silent: TimedStep
    operations: dict[str, PhaseOperations] = field(default_factory=dict)  # by pass
    peak_memory_bytes: int | None = None
    overlap: dict[str, Overlap] | None = None

    @property
    def label(self) -> str:
        return f"{self.spec.name}, {self.schedule.name}"

    def promises_overlap(self, name: str) -> bool:
        """Forward: by the layout or the schedule. Backward: always, under the products of weights' gradients."""
        return name == "backward" or self.schedule.is_domino or bool(self.spec.layout.count(OVERLAPPED))


def training_rows(
    variants: Sequence[TimedVariant], options: TrainingBenchOptions, rows: int, *, checked: bool, shared_memory: bool
) -> list[TrainingBenchRow]:
    """The first variant is what speed-ups are over. checked: against the sequential schedule. shared_memory: whether
    ranks copy messages themselves, so that none is in flight to be covered."""
    bounds = {
        timed.spec.name: min(v.silent.median_ms(WHOLE_STEP) for v in variants if v.spec.name == timed.spec.name)
        for timed in variants
    }
    return [
        _row(timed, variants[0], bounds[timed.spec.name], options, rows, checked, shared_memory) for timed in variants
    ]


def _row(
    timed: TimedVariant,
    first: TimedVariant,
    bound: float,
    options: TrainingBenchOptions,
    rows: int,
    checked: bool,
    shared_memory: bool,
) -> TrainingBenchRow:
    spec, layout, way, reference = timed.spec, timed.spec.layout, timed.communicating, first.communicating
    step, forward, backward = (way.median_ms(name) for name in (WHOLE_STEP, *STEP_PASSES))
    return TrainingBenchRow(
        model=spec.name,
        layout=str(layout),
        attention_sync=list(layout.attention_sync),
        mlp_sync=list(layout.mlp_sync),
        sync_tp_size=layout.sync_tp_size,
        weights="random" if spec.folder is None else str(spec.folder),
        dtype=spec.dtype,
        schedule=timed.schedule,
        checked=checked,
        emulated=options.emulate_tp is not None,
        tp_size=options.ranks,
        batch_size=rows,
        seq_len=options.seq_len,
        step_ms=step,
        forward_ms=forward,
        backward_ms=backward,
        tokens_per_s=rows * options.seq_len * 1e3 / step,
        no_communication_ms=timed.silent.median_ms(WHOLE_STEP),
        bound_ms=bound,
        bound_share=bound / step,
        speedup=reference.median_ms(WHOLE_STEP) / step,
        speedup_interval=speedup_interval(reference.seconds[WHOLE_STEP], way.seconds[WHOLE_STEP]),
        speedup_forward=reference.median_ms("forward") / forward,
        speedup_forward_interval=speedup_interval(reference.seconds["forward"], way.seconds["forward"]),
        weight_bytes=way.step.own_bytes,
        peak_memory_bytes=timed.peak_memory_bytes,
        communication={name: _communication(timed, name) for name in STEP_PASSES},
        samples_ms=way.samples_ms(),
        no_communication_samples_ms=timed.silent.samples_ms(),
        overlap=_judged(timed, shared_memory),
    )


def _communication(timed: TimedVariant, name: str) -> PassCommunication:
    operations = timed.operations[name]
    with_it, without = timed.communicating, timed.silent
    prediction = predict(without.median_ms(name) / 1e3, operations.all_reduces, operations.vocabulary)
    exposed, alone = with_it.median_ms(name) - without.median_ms(name), prediction.communication * 1e3
    interval = difference_interval(with_it.seconds[name], without.seconds[name])
    return PassCommunication(
        all_reduces=len(operations.all_reduces),
        bytes=sum(operation.bytes for operation in operations.all_reduces),
        no_communication_ms=without.median_ms(name),
        alone_ms=alone,
        exposed_ms=exposed,
        exposed_interval_ms=[1e3 * bound for bound in interval],
        hidden_ms=alone - exposed,
        hideable_ms=prediction.hideable * 1e3,
        predicted_ms=prediction.total * 1e3,
    )


def _judged(timed: TimedVariant, shared_memory: bool) -> dict[str, Overlap] | None:
    """The overlap that a trace showed in each pass, and whether it is any where some is promised."""
    if timed.overlap is None or shared_memory:
        return timed.overlap
    return {
        name: dataclasses.replace(overlap, proven=overlap.under_compute_ms > MIN_OVERLAP * overlap.in_flight_ms)
        if timed.promises_overlap(name)
        else overlap
        for name, overlap in timed.overlap.items()
    }
