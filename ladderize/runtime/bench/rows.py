"""A row of a benchmark: the figures that all result files share, and how far the rounds of a measurement disagree.

Intervals are 95 % intervals of a paired bootstrap: rounds are drawn with replacement, and a round's times of both
variants stay together, since a slow moment of the machine hits both. No torch here, and numpy only where it is needed:
predictions have such rows, too.
"""

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ladderize.files.records import Record
from ladderize.layout import OVERLAPPED

PHASES = ("prefill", "decode")
END_TO_END = "end_to_end"  # the prefill and all decode steps
MODEL_ROW, BASELINE_ROW = "model", "baseline, for timing only"
PARALLEL, NO_COMM, UNSCHEDULED = "parallel baseline", "no-comm baseline", "sequential baseline"  # their rows

LEAST_ROUNDS = 3  # below, an interval says nothing
ENOUGH_ROUNDS = 5  # below, an interval is too narrow
DRAWN_ROUNDS = 2000


def few_rounds(repeat: int) -> str:
    """What is to be known of intervals of so few rounds; empty where they are enough."""
    if repeat < LEAST_ROUNDS:
        return f"with fewer than {LEAST_ROUNDS} rounds their scatter is unknown: no intervals; raise --repeat"
    if repeat < ENOUGH_ROUNDS:  # at the widest they reach from the smallest to the largest, around the true median
        return (
            f"intervals of {repeat} rounds are too narrow: about {1 - 2 ** (1 - repeat):.0%} hold the true value, where"
            f" 95 % should; raise --repeat to {ENOUGH_ROUNDS} or more"
        )
    return ""


@dataclass(frozen=True)
class PassCommunication(Record):
    """In one pass: the layers' all-reduces, and all collectives' times.

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
    hideable_ms: float | None
    predicted_ms: float | None


@dataclass(frozen=True)
class PhaseCommunication(PassCommunication):
    """The same in a prefill, or in a decode pass, which makes one token of each row.

    hideable_ms, predicted_ms: None where the compute that covers was timed another way (CUDA graphs). hidden_share:
    None where nothing is overlapped.
    """

    vocabulary_alone_ms: float
    hidden_share: float | None


@dataclass(frozen=True)
class VariantRow(Record):
    """What is timed: a model at one batch size. tp_size: ranks, real or emulated."""

    model: str
    layout: str
    attention_sync: list[str]
    mlp_sync: list[str]
    sync_tp_size: int | None
    weights: str
    dtype: str
    tp_size: int
    batch_size: int

    @property
    def is_random(self) -> bool:
        """No checkpoint: only its times mean something."""
        return self.weights == "random"


@dataclass(frozen=True)
class InferenceRow(VariantRow):
    """How fast a model, or a baseline, answers. A speed-up is over the first model; its interval is a 95 % interval."""

    kind: str
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

    @property
    def is_model(self) -> bool:
        """False: a baseline."""
        return self.kind == MODEL_ROW

    def total_ms(self, phase: str) -> float:
        """Of one pass: the prefill, or a decode step."""
        return self.prefill_ms if phase == "prefill" else self.decode_ms_per_token

    def speedup(self, phase: str) -> float:
        """Over the first model."""
        return self.speedup_prefill if phase == "prefill" else self.speedup_decode

    def speedup_interval(self, phase: str) -> list[float]:
        return self.speedup_prefill_interval if phase == "prefill" else self.speedup_decode_interval


@dataclass(frozen=True)
class SpeedRow(InferenceRow):
    """The same on ladderize's runtime, measured or predicted."""

    checked: bool
    emulated: bool
    weight_bytes: int
    kv_cache_bytes: int
    peak_memory_bytes: int | None

    @property
    def has_overlap(self) -> bool:
        """Whether its layout lets a sum run under compute."""
        return self.is_model and OVERLAPPED in (*self.attention_sync, *self.mlp_sync)


Seconds = Mapping[str, Sequence[float]]  # of each counted round, by part


def inference_figures(seconds: Seconds, first: Seconds, decode_steps: int, batch: int) -> dict[str, Any]:
    """The times, rates and speed-ups of an ``InferenceRow``. first: of what speed-ups are over."""

    def times(prefill: Any, decode: Any) -> dict[str, Any]:
        return {"prefill": prefill, "decode": decode, END_TO_END: prefill + decode_steps * decode}

    series = [rounds[phase] for rounds in (first, seconds) for phase in PHASES]
    medians, drawn = [statistics.median(one) for one in series], _drawn_medians(*series)
    reference, own = times(*medians[:2]), times(*medians[2:])
    before, after = times(*drawn[:2]), times(*drawn[2:])  # in each resample
    return {
        "prefill_ms": 1e3 * own["prefill"],
        "decode_ms_per_token": 1e3 * own["decode"],
        "output_tokens_per_s": batch / own["decode"],
        "tokens_per_s_per_user": 1 / own["decode"],
        "end_to_end_ms": 1e3 * own[END_TO_END],
        **{f"speedup_{name}": reference[name] / own[name] for name in own},
        **{f"speedup_{name}_interval": percentiles(before[name] / after[name], 2.5, 97.5) for name in own},
    }


def speedup_interval(reference: Sequence[float], times: Sequence[float]) -> list[float]:
    """Interval [low, high] of median(reference) / median(times); both have one time for each round."""
    before, after = _drawn_medians(reference, times)
    return percentiles(before / after, 2.5, 97.5)


def difference_interval(times: Sequence[float], less: Sequence[float]) -> list[float]:
    """Interval [low, high] of median(times) - median(less), in their unit."""
    more, fewer = _drawn_medians(times, less)
    return percentiles(more - fewer, 2.5, 97.5)


def quartiles(times: Sequence[float]) -> list[float]:
    """The first and the third."""
    return percentiles(times, 25, 75)


def percentiles(values: Any, *points: float) -> list[float]:
    import numpy as np

    return [float(value) for value in np.percentile(values, points)]


def _drawn_medians(*series: Sequence[float]) -> Any:
    """[series, resamples]: the median of each series in each resample of the rounds."""
    import numpy as np

    values = np.asarray(series, dtype=float)
    # always the same draws, so that the same samples give the same interval
    rounds = np.random.default_rng(0).integers(0, values.shape[1], (DRAWN_ROUNDS, values.shape[1]))
    return np.median(values[:, rounds], axis=-1)
