"""bench.json: its rows, and what they say."""

import statistics
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ladderize.layout import OVERLAPPED
from ladderize.ranks.group import Ranks
from ladderize.runtime.bench.alone_times import PHASES, Communication
from ladderize.runtime.bench.cost_model import predict
from ladderize.runtime.bench.options import BenchOptions
from ladderize.runtime.bench.trace import Overlap
from ladderize.runtime.decode import Generator
from ladderize.runtime.spec import ModelSpec

# Of the time in flight: less under compute than this is none at all.
MIN_OVERLAP = 0.01


@dataclass
class Variant:
    """One line of the benchmark: a model, with and without communication, and what was measured of it."""

    name: str
    spec: ModelSpec
    generators: dict[str, Generator]  # "real" and "none"
    kind: str = "model"
    samples: dict[str, list[float]] = field(default_factory=dict)
    communication: dict[str, Communication] = field(default_factory=dict)  # by phase
    peak_memory_bytes: int | None = None
    overlap: Overlap | None = None

    def median_ms(self, mode: str, phase: str) -> float:
        return statistics.median(self.samples[f"{mode} {phase}"]) * 1e3


def _rows(
    group: Ranks, variant: Variant, first: Variant, options: BenchOptions, batch: int, checks: dict[str, Any]
) -> Iterator[dict[str, Any]]:
    yield _row(variant, "real", first, options, batch, checks)
    if variant is first and "no-comm" in options.baselines:
        yield _row(variant, "none", first, options, batch, checks)


def _row(
    variant: Variant, mode: str, first: Variant, options: BenchOptions, batch: int, checks: dict[str, Any]
) -> dict[str, Any]:
    times = {phase: variant.median_ms(mode, phase) for phase in PHASES}
    base = {phase: first.median_ms("real", phase) for phase in PHASES}
    steps = options.output_len - 1

    def total(values: dict[str, float]) -> float:
        return values["prefill"] + steps * values["decode"]

    model = variant.generators["real"].model
    row: dict[str, Any] = {
        "model": variant.name if mode == "real" else f"{variant.name}, no communication",
        "kind": variant.kind if mode == "real" else "baseline, for timing only",
        "layout": str(variant.spec.layout),
        **variant.spec.layout.to_config(),
        "weights": "random" if variant.spec.folder is None else str(variant.spec.folder),
        "dtype": variant.spec.dtype,
        "checked": variant.name in checks,
        "emulated": options.emulate_tp is not None,
        "tp_size": options.ranks,
        "batch_size": batch,
        "prefill_ms": times["prefill"],
        "decode_ms_per_token": times["decode"],
        "output_tokens_per_s": batch * 1e3 / times["decode"],
        "tokens_per_s_per_user": 1e3 / times["decode"],
        "end_to_end_ms": total(times),
        "speedup_prefill": base["prefill"] / times["prefill"],
        "speedup_decode": base["decode"] / times["decode"],
        "speedup_end_to_end": total(base) / total(times),
        "weight_bytes": model.weights.nbytes,
        "kv_cache_bytes": variant.generators["real"].cache.nbytes,
        "peak_memory_bytes": variant.peak_memory_bytes,
        "samples_ms": {phase: [1e3 * s for s in variant.samples[f"{mode} {phase}"]] for phase in PHASES},
    }
    if mode == "real":
        row["communication"] = {phase: _communication(variant, phase) for phase in PHASES}
        row["no_communication_samples_ms"] = {
            phase: [1e3 * s for s in variant.samples[f"none {phase}"]] for phase in PHASES
        }
        if variant.overlap is not None:
            row["overlap"] = variant.overlap.to_dict()
            # ranks copy messages of shared memory themselves: there is nothing in flight to be covered
            if variant.spec.layout.count(OVERLAPPED) and variant.kind == "model" and model.collectives.name != "shm":
                row["overlap"]["proven"] = variant.overlap.under_compute_ms > MIN_OVERLAP * variant.overlap.in_flight_ms
    return row


def _communication(variant: Variant, phase: str) -> dict[str, Any]:
    """In one pass of this phase (a decode pass makes one token of each row): the layers' all-reduces, and all
    collectives' times."""
    operations = variant.communication[phase].operations
    without = variant.median_ms("none", phase)
    prediction = predict(without / 1e3, operations, variant.communication[phase].vocabulary)
    exposed = variant.median_ms("real", phase) - without
    graphed = (
        phase == "decode" and variant.generators["none"].graphs
    )  # the compute that covers was seen without them, so far longer
    overlapped = (
        not graphed and variant.kind == "model" and prediction.hideable and variant.spec.layout.count(OVERLAPPED)
    )
    alone = prediction.communication * 1e3
    return {
        "all_reduces": len(operations),
        "bytes": sum(operation.bytes for operation in operations),
        "no_communication_ms": without,
        "alone_ms": alone,
        "vocabulary_alone_ms": variant.communication[phase].vocabulary * 1e3,
        "exposed_ms": exposed,
        "hidden_ms": alone - exposed,
        "hideable_ms": None if graphed else prediction.hideable * 1e3,
        "hidden_share": (alone - exposed) / (prediction.hideable * 1e3) if overlapped else None,
        "predicted_ms": None if graphed else prediction.total * 1e3,
    }


def unproven(document: dict[str, Any]) -> list[str]:
    """Overlapped layouts in whose trace nothing overlapped."""
    return [row["model"] for row in document["rows"] if row.get("overlap", {}).get("proven") is False]


def _plain(options: BenchOptions) -> dict[str, Any]:
    values = dict(vars(options))
    values.pop("link")
    return {key: str(value) if isinstance(value, Path) else value for key, value in values.items()}
