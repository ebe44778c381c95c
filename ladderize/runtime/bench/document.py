"""bench.json: described in docs/files.md. What runs writes it, and reports and pictures read it, by attribute."""

from dataclasses import dataclass
from typing import ClassVar

from ladderize.files.records import Record
from ladderize.layout import OVERLAPPED
from ladderize.runtime.bench.environment import Environment
from ladderize.runtime.bench.options import BenchOptions
from ladderize.runtime.bench.reference_check import ReferenceAgreement
from ladderize.runtime.bench.trace import Overlap
from ladderize.runtime.collectives.links import Link
from ladderize.runtime.schedule import ScheduleName

MODEL_ROW, BASELINE_ROW = "model", "baseline, for timing only"
PARALLEL, NO_COMM, UNSCHEDULED = "parallel baseline", "no-comm baseline", "sequential baseline"  # their rows


@dataclass(frozen=True)
class PhaseCommunication(Record):
    """In one pass of a phase (a decode pass makes one token of each row): the layers' all-reduces, and all collectives'
    times.

    exposed_interval_ms: 95 % interval of exposed_ms, which is a difference of two medians and may come out below 0.
    hideable_ms, predicted_ms: None where the compute that covers was timed another way (CUDA graphs). hidden_share:
    None where nothing is overlapped.
    """

    all_reduces: int
    bytes: int
    no_communication_ms: float
    alone_ms: float
    vocabulary_alone_ms: float
    exposed_ms: float
    exposed_interval_ms: list[float]
    hidden_ms: float
    hideable_ms: float | None
    hidden_share: float | None
    predicted_ms: float | None


@dataclass(frozen=True)
class BenchRow(Record):
    """One variant at one batch size. By phase: ``prefill`` and ``decode``; samples are of every counted round.

    A speed-up is over the first model; its interval is a 95 % interval of it. schedule: of the prefill.

    communication and its samples are None in the row of the first model without communication, overlap without
    --profile.
    """

    LEFT_OUT: ClassVar = ("communication", "no_communication_samples_ms", "overlap")

    model: str
    kind: str
    layout: str
    attention_sync: list[str]
    mlp_sync: list[str]
    sync_tp_size: int | None
    weights: str
    dtype: str
    checked: bool
    emulated: bool
    tp_size: int
    batch_size: int
    prefill_ms: float
    decode_ms_per_token: float
    output_tokens_per_s: float
    tokens_per_s_per_user: float
    end_to_end_ms: float
    speedup_prefill: float
    speedup_decode: float
    speedup_end_to_end: float
    speedup_prefill_interval: list[float]
    speedup_decode_interval: list[float]
    speedup_end_to_end_interval: list[float]
    weight_bytes: int
    kv_cache_bytes: int
    peak_memory_bytes: int | None
    samples_ms: dict[str, list[float]]
    communication: dict[str, PhaseCommunication] | None = None
    no_communication_samples_ms: dict[str, list[float]] | None = None
    overlap: Overlap | None = None
    schedule: ScheduleName = "sequential"

    @property
    def is_model(self) -> bool:
        """False: a baseline."""
        return self.kind == MODEL_ROW

    @property
    def is_random(self) -> bool:
        """No checkpoint: only its times mean something."""
        return self.weights == "random"

    def total_ms(self, phase: str) -> float:
        """Of one pass: the prefill, or a decode step."""
        return self.prefill_ms if phase == "prefill" else self.decode_ms_per_token

    def speedup(self, phase: str) -> float:
        """Over the first model."""
        return self.speedup_prefill if phase == "prefill" else self.speedup_decode

    def speedup_interval(self, phase: str) -> list[float]:
        return self.speedup_prefill_interval if phase == "prefill" else self.speedup_decode_interval

    def overlaps(self, phase: str) -> bool:
        """Whether its layout lets a sum run under compute, or its schedule does, which is that of prefill alone."""
        overlapped = OVERLAPPED in (*self.attention_sync, *self.mlp_sync)
        return self.is_model and (overlapped or (phase == "prefill" and self.schedule == "domino"))


@dataclass(frozen=True)
class BenchDocument(Record):
    """All of bench.json but the schema in front. checks: by checkpoint.

    complete: False in what is written before all is done; it stays so where the rest failed.
    """

    complete: bool
    emulated: bool
    options: BenchOptions
    link: Link | None
    message_bytes_outside_link_range: list[int]
    backend: str
    environment: Environment
    checks: dict[str, ReferenceAgreement]
    alone_ms: dict[str, float]
    rows: list[BenchRow]

    @property
    def disproved(self) -> list[str]:
        """Models whose layout or schedule overlaps, and in whose trace nothing did."""
        return [row.model for row in self.rows if row.overlap is not None and row.overlap.proven is False]
