"""From what was timed to the rows of bench.json."""

import dataclasses
import statistics
from collections.abc import Iterator
from dataclasses import dataclass, field

from ladderize.layout import OVERLAPPED
from ladderize.runtime.bench.cost_model import predict
from ladderize.runtime.bench.document import BenchRow
from ladderize.runtime.bench.instrument import PhaseOperations
from ladderize.runtime.bench.options import BenchOptions
from ladderize.runtime.bench.speed_row import BASELINE_ROW, MODEL_ROW, NO_COMM, PHASES, PhaseCommunication
from ladderize.runtime.bench.spread import difference_interval, speedup_interval
from ladderize.runtime.bench.trace import Overlap
from ladderize.runtime.decode import Generator
from ladderize.runtime.spec import ModelSpec

# Of the time in flight: less under compute than this is none at all.
MIN_OVERLAP = 0.01


@dataclass
class TimedGenerator:
    """A generator, and the seconds that it took in each counted round, by phase (decode: of one token of each row)."""

    generator: Generator
    seconds: dict[str, list[float]] = field(default_factory=lambda: {phase: [] for phase in PHASES})

    def samples_ms(self) -> dict[str, list[float]]:
        return {phase: [1e3 * s for s in self.seconds[phase]] for phase in PHASES}

    def end_to_end_seconds(self, decode_steps: int) -> list[float]:
        """Of each round: the prefill and ``decode_steps`` steps."""
        prefill, decode = (self.seconds[phase] for phase in PHASES)
        return [a + decode_steps * b for a, b in zip(prefill, decode, strict=True)]

    def median_ms(self, phase: str) -> float:
        return statistics.median(self.seconds[phase]) * 1e3


@dataclass
class TimedModel:
    """A model, or a baseline, at one batch size: with and without communication, and what was measured of it."""

    name: str
    spec: ModelSpec
    communicating: TimedGenerator
    silent: TimedGenerator
    is_baseline: bool = False
    operations: dict[str, PhaseOperations] = field(default_factory=dict)  # by phase
    peak_memory_bytes: int | None = None
    overlap: Overlap | None = None

    def overlaps(self, phase: str) -> bool:
        """Whether the layout says so, or the schedule of prefill; a baseline has none."""
        domino = phase == "prefill" and self.communicating.generator.schedule.is_domino
        return not self.is_baseline and (domino or bool(self.spec.layout.count(OVERLAPPED)))


def rows_of(
    timed: TimedModel, first: TimedModel, options: BenchOptions, batch: int, *, checked: bool
) -> Iterator[BenchRow]:
    """The row of a model, and that of the first without communication where it is asked for.

    first: what speed-ups are over. checked: against the reference.
    """
    row = _row(timed, timed.communicating, first, options, batch, checked)
    yield dataclasses.replace(
        row,
        communication={phase: _communication(timed, phase) for phase in PHASES},
        no_communication_samples_ms=timed.silent.samples_ms(),
        overlap=_judged(timed),
    )
    if timed is first and "no-comm" in options.baselines:
        row = _row(timed, timed.silent, first, options, batch, checked)
        yield dataclasses.replace(row, model=NO_COMM, kind=BASELINE_ROW)


def _row(
    timed: TimedModel, way: TimedGenerator, first: TimedModel, options: BenchOptions, batch: int, checked: bool
) -> BenchRow:
    """way: with or without communication."""
    spec, layout = timed.spec, timed.spec.layout
    prefill, decode = (way.median_ms(phase) for phase in PHASES)
    total = prefill + options.decode_steps * decode
    first_prefill, first_decode = (first.communicating.median_ms(phase) for phase in PHASES)
    generator = timed.communicating.generator
    reference = first.communicating
    whole = speedup_interval(
        reference.end_to_end_seconds(options.decode_steps), way.end_to_end_seconds(options.decode_steps)
    )
    intervals = [speedup_interval(reference.seconds[phase], way.seconds[phase]) for phase in PHASES]
    return BenchRow(
        model=timed.name,
        kind=BASELINE_ROW if timed.is_baseline else MODEL_ROW,
        layout=str(layout),
        attention_sync=list(layout.attention_sync),
        mlp_sync=list(layout.mlp_sync),
        sync_tp_size=layout.sync_tp_size,
        weights="random" if spec.folder is None else str(spec.folder),
        dtype=spec.dtype,
        checked=checked,
        emulated=options.emulate_tp is not None,
        tp_size=options.ranks,
        batch_size=batch,
        prefill_ms=prefill,
        decode_ms_per_token=decode,
        output_tokens_per_s=batch * 1e3 / decode,
        tokens_per_s_per_user=1e3 / decode,
        end_to_end_ms=total,
        speedup_prefill=first_prefill / prefill,
        speedup_decode=first_decode / decode,
        speedup_end_to_end=(first_prefill + options.decode_steps * first_decode) / total,
        speedup_prefill_interval=intervals[0],
        speedup_decode_interval=intervals[1],
        speedup_end_to_end_interval=whole,
        weight_bytes=generator.model.weights.nbytes,
        kv_cache_bytes=generator.cache.nbytes,
        peak_memory_bytes=timed.peak_memory_bytes,
        samples_ms=way.samples_ms(),
        schedule=way.generator.schedule.name,
    )


def _judged(timed: TimedModel) -> Overlap | None:
    """The overlap that a trace showed, and whether it is any where the layout or the schedule promises some."""
    overlap = timed.overlap
    # ranks copy messages of shared memory themselves: there is nothing in flight to be covered
    shared = timed.communicating.generator.model.collectives.name == "shm"
    if overlap is None or shared or not any(map(timed.overlaps, PHASES)):
        return overlap
    return dataclasses.replace(overlap, proven=overlap.under_compute_ms > MIN_OVERLAP * overlap.in_flight_ms)


def _communication(timed: TimedModel, phase: str) -> PhaseCommunication:
    operations = timed.operations[phase]
    without = timed.silent.median_ms(phase)
    prediction = predict(without / 1e3, operations.all_reduces, operations.vocabulary)
    exposed = timed.communicating.median_ms(phase) - without
    alone, hideable = prediction.communication * 1e3, prediction.hideable * 1e3
    # the compute that covers was seen without CUDA graphs, so far longer
    graphed = phase == "decode" and timed.silent.generator.graphs
    return PhaseCommunication(
        all_reduces=len(operations.all_reduces),
        bytes=sum(operation.bytes for operation in operations.all_reduces),
        no_communication_ms=without,
        alone_ms=alone,
        vocabulary_alone_ms=operations.vocabulary * 1e3,
        exposed_ms=exposed,
        exposed_interval_ms=[
            1e3 * bound
            for bound in difference_interval(timed.communicating.seconds[phase], timed.silent.seconds[phase])
        ],
        hidden_ms=alone - exposed,
        hideable_ms=None if graphed else hideable,
        hidden_share=(alone - exposed) / hideable if timed.overlaps(phase) and hideable and not graphed else None,
        predicted_ms=None if graphed else prediction.total * 1e3,
    )
