"""bench.json of ``--engine vllm``: described in docs/files.md. Keys mean what they mean in the runtime's bench.json."""

from dataclasses import dataclass
from typing import ClassVar

from ladderize.files.records import Record
from ladderize.runtime.bench.environment import Environment
from ladderize.runtime.bench.trace import Overlap
from ladderize.serving.vllm.bench.options import VllmBenchOptions

ENGINE = "vllm"


@dataclass(frozen=True)
class VllmBenchRow(Record):
    """One model at one batch size. By phase: ``prefill`` and ``decode``; samples are of every counted round.

    architecture: vLLM's model class. ratios: time over the first model's of the same round, the median of the rounds;
    quartiles: the first and the third. A speed-up is the first model's median over this one's. overlap: what a trace
    showed, None without --profile.
    """

    LEFT_OUT: ClassVar = ("overlap",)

    model: str
    kind: str
    architecture: str
    layout: str
    attention_sync: list[str]
    mlp_sync: list[str]
    sync_tp_size: int | None
    weights: str
    dtype: str
    tp_size: int
    batch_size: int
    prefill_ms: float
    decode_ms_per_token: float
    output_tokens_per_s: float
    tokens_per_s_per_user: float
    end_to_end_ms: float
    ratio_prefill: float
    ratio_decode: float
    ratio_prefill_quartiles: list[float]
    ratio_decode_quartiles: list[float]
    speedup_prefill: float
    speedup_decode: float
    speedup_end_to_end: float
    speedup_prefill_interval: list[float]
    speedup_decode_interval: list[float]
    speedup_end_to_end_interval: list[float]
    quartiles_ms: dict[str, list[float]]
    samples_ms: dict[str, list[float]]
    overlap: dict[str, Overlap] | None = None

    def total_ms(self, phase: str) -> float:
        """Of one pass: the prefill, or a decode step."""
        return self.prefill_ms if phase == "prefill" else self.decode_ms_per_token

    def ratio(self, phase: str) -> float:
        """Time over the first model's."""
        return self.ratio_prefill if phase == "prefill" else self.ratio_decode

    def ratio_quartiles(self, phase: str) -> list[float]:
        """The first and the third, of the rounds."""
        return self.ratio_prefill_quartiles if phase == "prefill" else self.ratio_decode_quartiles


@dataclass(frozen=True)
class VllmBenchDocument(Record):
    """All of the file but the schema in front.

    engine: ``vllm``, which no document of the runtime has. backend: what carries blocking all-reduces in vLLM.
    messages: what carries those in flight, as LADDERIZE_VLLM_BACKEND chose; None where no row is in the plugin's class.
    emulated: that they are delays. complete: False in what is written before all is done.
    """

    engine: str
    complete: bool
    emulated: bool
    options: VllmBenchOptions
    vllm: str
    backend: str
    messages: str | None
    environment: Environment
    rows: list[VllmBenchRow]
