"""How fast one variant is at one batch size, measured or predicted: what rows of all result files have. No torch."""

from dataclasses import dataclass

from ladderize.files.records import Record
from ladderize.layout import OVERLAPPED

PHASES = ("prefill", "decode")
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
class SpeedRow(Record):
    """One variant at one batch size. By phase: ``prefill`` and ``decode``.

    A speed-up is over the first model; its interval is a 95 % interval of it.
    """

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

    @property
    def has_overlap(self) -> bool:
        """Whether its layout lets a sum run under compute."""
        return self.is_model and OVERLAPPED in (*self.attention_sync, *self.mlp_sync)
