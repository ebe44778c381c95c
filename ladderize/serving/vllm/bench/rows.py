"""From what was timed to the rows of the document."""

import statistics
from collections.abc import Mapping
from dataclasses import dataclass, field

from ladderize.runtime.bench.speed_row import BASELINE_ROW, MODEL_ROW, PHASES
from ladderize.runtime.bench.spread import quartiles, speedup_interval
from ladderize.runtime.bench.trace import Overlap
from ladderize.serving.vllm.bench.document import VllmBenchRow
from ladderize.serving.vllm.bench.options import VllmBenchOptions
from ladderize.serving.vllm.bench.served import Served


@dataclass
class Timed:
    """A row at one batch size, and the seconds of its counted rounds, by phase (decode: of one token of each
    request)."""

    served: Served
    seconds: dict[str, list[float]] = field(default_factory=lambda: {phase: [] for phase in PHASES})
    overlap: dict[str, Overlap] | None = None

    def end_to_end_seconds(self, decode_steps: int) -> list[float]:
        """Of each round: the prefill and ``decode_steps`` steps."""
        return [a + decode_steps * b for a, b in zip(*(self.seconds[phase] for phase in PHASES), strict=True)]


def vllm_rows(timed: list[Timed], options: VllmBenchOptions, batch: int) -> list[VllmBenchRow]:
    """Rows of one batch size, in the order of ``timed``; the first is what the others are compared with."""
    return [_row(each, timed[0], options, batch) for each in timed]


def _row(timed: Timed, first: Timed, options: VllmBenchOptions, batch: int) -> VllmBenchRow:
    served, layout, steps = timed.served, timed.served.layout, options.decode_steps
    prefill, decode = (_median(timed.seconds, phase) for phase in PHASES)
    ends, first_ends = timed.end_to_end_seconds(steps), first.end_to_end_seconds(steps)
    ratios = {
        phase: [a / b for a, b in zip(timed.seconds[phase], first.seconds[phase], strict=True)] for phase in PHASES
    }
    intervals = {phase: speedup_interval(first.seconds[phase], timed.seconds[phase]) for phase in PHASES}
    return VllmBenchRow(
        model=served.name,
        kind=BASELINE_ROW if served.baseline else MODEL_ROW,
        architecture=served.architecture,
        layout=str(layout),
        attention_sync=list(layout.attention_sync),
        mlp_sync=list(layout.mlp_sync),
        sync_tp_size=layout.sync_tp_size,
        weights="random" if served.weights is None else str(served.weights),
        dtype=served.dtype,
        tp_size=options.tp_size,
        batch_size=batch,
        prefill_ms=1e3 * prefill,
        decode_ms_per_token=1e3 * decode,
        output_tokens_per_s=batch / decode,
        tokens_per_s_per_user=1 / decode,
        end_to_end_ms=1e3 * (prefill + steps * decode),
        ratio_prefill=statistics.median(ratios["prefill"]),
        ratio_decode=statistics.median(ratios["decode"]),
        ratio_prefill_quartiles=list(quartiles(ratios["prefill"])),
        ratio_decode_quartiles=list(quartiles(ratios["decode"])),
        speedup_prefill=_median(first.seconds, "prefill") / prefill,
        speedup_decode=_median(first.seconds, "decode") / decode,
        speedup_end_to_end=statistics.median(first_ends) / statistics.median(ends),
        speedup_prefill_interval=intervals["prefill"],
        speedup_decode_interval=intervals["decode"],
        speedup_end_to_end_interval=speedup_interval(first_ends, ends),
        quartiles_ms={phase: [1e3 * s for s in quartiles(timed.seconds[phase])] for phase in PHASES},
        samples_ms={phase: [1e3 * s for s in timed.seconds[phase]] for phase in PHASES},
        overlap=timed.overlap,
    )


def _median(seconds: Mapping[str, list[float]], phase: str) -> float:
    return statistics.median(seconds[phase])
