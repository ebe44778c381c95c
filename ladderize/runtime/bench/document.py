"""The document bench.json (docs/files.md): its rows, and the machine they were measured on. Imports no torch, so that
reports read it at once.

The intervals of its figures are 95 % intervals of a paired bootstrap: rounds are drawn with replacement, and a round's
times of both variants stay together, since a slow moment of the machine hits both.
"""

import os
import platform
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar

from ladderize.choices import EngineName
from ladderize.files.records import Record
from ladderize.layout import HIDING
from ladderize.runtime.bench.options import BenchOptions
from ladderize.runtime.collectives.links import Link
from ladderize.runtime.schedule import ScheduleName

if TYPE_CHECKING:
    from ladderize.ranks.group import Ranks

PHASES, PASSES = ("prefill", "decode"), ("forward", "backward")  # the timed parts of inference, and of a training step
END_TO_END, WHOLE_STEP = "end_to_end", "step"  # the prefill and all decode steps; both passes
MODEL_ROW, BASELINE_ROW = "model", "baseline, for timing only"
PARALLEL, NO_COMM = "parallel baseline", "no-comm baseline"  # their rows

LEAST_ROUNDS = 3  # with fewer there is no interval
ENOUGH_ROUNDS = 5  # with fewer an interval is too narrow
DRAWN_ROUNDS = 2000


# ---- the machine ----


@dataclass(frozen=True)
class Environment(Record):
    """Machine, versions and settings.

    operations: the name of the operations between the products, of inference.
    settings: environment variables that change times.
    """

    LEFT_OUT: ClassVar = ("operations", "gpus", "gpu_memory_bytes", "cuda", "nccl", "vllm")

    device: str
    processor: str
    cores: int
    threads_per_rank: int
    python: str
    torch: str
    transformers: str
    system: str
    hosts: int
    settings: dict[str, str]
    operations: str | None = None
    gpus: list[str] | None = None
    gpu_memory_bytes: int | None = None
    cuda: str | None = None
    nccl: str | None = None
    vllm: str | None = None


SECRETS = ("KEY", "TOKEN", "SECRET", "PASSWORD")  # in names of variables, such as VLLM_API_KEY: files are published


def environment(group: "Ranks", *, settings: tuple[str, ...] = (), **more: Any) -> Environment:
    """Describe the machine; all ranks call it.

    settings: prefixes of further environment variables to note.
    """
    import torch
    import transformers

    from ladderize.ranks.device import cores, processor

    noted = ("NCCL_", "GLOO_", "OMP_", "TORCH_", *settings)
    if group.device.type == "cuda":
        more |= {
            "gpus": group.gather(torch.cuda.get_device_name(group.device)),
            "gpu_memory_bytes": torch.cuda.get_device_properties(group.device).total_memory,
            "cuda": torch.version.cuda,
            "nccl": ".".join(map(str, torch.cuda.nccl.version())),
        }
    return Environment(
        device=group.device.type,
        processor=processor(),
        cores=len(cores()),
        threads_per_rank=torch.get_num_threads(),
        python=platform.python_version(),
        torch=str(torch.__version__),
        transformers=transformers.__version__,
        system=f"{platform.system()} {platform.release()}",
        hosts=len(set(group.gather(platform.node()))),
        settings={
            key: value
            for key, value in sorted(os.environ.items())
            if key.startswith(noted) and not any(word in key for word in SECRETS)
        },
        **more,
    )


# ---- rows ----


@dataclass(frozen=True)
class PhaseCommunication(Record):
    """The communication of one pass: a prefill, a decode step, or one of the two passes of a training step.

    all_reduces, bytes: of the layers.
    alone_ms: time of all collectives with nothing beside them, the vocabulary's too.
    exposed_ms: time waited for them. It is a difference of two medians, so it may come out below 0.
    """

    all_reduces: int
    bytes: int
    no_communication_ms: float
    alone_ms: float
    exposed_ms: float
    exposed_interval_ms: list[float]


@dataclass(frozen=True)
class Overlap(Record):
    """The milliseconds in flight of some traced passes, and those under compute among them.

    proven: True where there is any overlap at all; None where nothing promises any.
    """

    LEFT_OUT: ClassVar = ("proven",)

    in_flight_ms: float
    under_compute_ms: float
    proven: bool | None = None

    @property
    def share(self) -> float:
        """The share of the time in flight that is under compute."""
        return self.under_compute_ms / self.in_flight_ms if self.in_flight_ms else 0.0


@dataclass(frozen=True)
class BenchRow(Record):
    """A model, or a baseline, at one batch size, by one schedule.

    kind: MODEL_ROW or BASELINE_ROW.
    tp_size: ranks, real or emulated.
    ms: the medians of PHASES and END_TO_END, or of PASSES and WHOLE_STEP.
    speedup, speedup_interval: over the first row of the batch size, by the same names.
    tokens_per_s: of decoding, or of training.
    samples_ms: of every counted round, by part.
    communication, no_communication_samples_ms: by part; None in the row of the no-comm baseline, and in vLLM.
    overlap: by part, with --profile.
    bound_share: in training, the share that the model's fastest step without communication has of this step.
    architecture: vLLM's model class.
    """

    LEFT_OUT: ClassVar = (
        "communication", "no_communication_samples_ms", "overlap", "bound_share", "architecture",
    )  # fmt: skip

    model: str
    kind: str
    schedule: ScheduleName
    layout: str
    attention_sync: list[str]
    mlp_sync: list[str]
    sync_tp_size: int | None
    weights: str
    dtype: str
    tp_size: int
    batch_size: int
    ms: dict[str, float]
    speedup: dict[str, float]
    speedup_interval: dict[str, list[float]]
    tokens_per_s: float
    samples_ms: dict[str, list[float]]
    communication: dict[str, PhaseCommunication] | None = None
    no_communication_samples_ms: dict[str, list[float]] | None = None
    overlap: dict[str, Overlap] | None = None
    bound_share: float | None = None
    architecture: str | None = None

    @property
    def is_model(self) -> bool:
        return self.kind == MODEL_ROW

    @property
    def is_random(self) -> bool:
        """True without a checkpoint: only the times mean something."""
        return self.weights == "random"

    def overlaps(self, part: str) -> bool:
        return may_overlap((*self.attention_sync, *self.mlp_sync), self.schedule, part)


def may_overlap(modes: Sequence[str], schedule: str, part: str) -> bool:
    """Return True if the modes of a layout, or the schedule, let a sum of ``part`` run under compute.

    In a backward pass one always may, under weights' gradients; decoding is never cut by a schedule.
    """
    is_cut = schedule == "domino" and part != "decode"
    return part == "backward" or is_cut or any(mode in HIDING for mode in modes)


@dataclass(frozen=True)
class BenchDocument(Record):
    """The document bench.json, of inference or training, on ladderize's runtime or in vLLM.

    complete: False until all is done, and for good where the rest failed.
    backend: the backend of the all-reduces.
    link: the link of an emulated group, whose all-reduces are delays.
    alone_ms: time of each collective with nothing beside it, by name and size.
    failed: the reason why a variant has no row, by its name.
    checks: the differences from the reference, of the variants that passed, by name.
    engine: ``vllm``, or None for ladderize's runtime.
    messages: the backend of messages in flight in vLLM; None where no row is in the plugin's class.
    """

    LEFT_OUT: ClassVar = ("engine", "messages")

    complete: bool
    options: BenchOptions
    backend: str
    environment: Environment
    link: Link | None
    alone_ms: dict[str, float]
    rows: list[BenchRow]
    failed: dict[str, str]
    checks: dict[str, dict[str, float]] = field(default_factory=dict)
    engine: EngineName | None = None
    messages: str | None = None

    @property
    def emulated(self) -> bool:
        """True where all-reduces are delays."""
        return self.link is not None

    @property
    def disproved(self) -> list[str]:
        """The names of the passes in whose trace nothing overlapped, although it should."""
        return [
            f"{row.model} ({part})"
            for row in self.rows
            for part, overlap in (row.overlap or {}).items()
            if overlap.proven is False
        ]


def variant_name(model: str, schedule: str, options: BenchOptions) -> str:
    """Return the name of the row of a model by a schedule: the model's own by the first schedule that is timed."""
    return model if schedule == options.schedules[0] else f"{model} by the schedule {schedule}"


# ---- figures ----

Seconds = Mapping[str, Sequence[float]]  # of each counted round, by part


def timed_figures(seconds: Seconds, first: Seconds, passes: Mapping[str, int], total: str) -> dict[str, Any]:
    """Return the times of each part and of the total, and their speed-ups over ``first``, as fields of a row.

    passes: the number of passes of each part that the total has.
    total: its name.
    """

    def with_total(times: Sequence[Any]) -> dict[str, Any]:
        by_part = dict(zip(passes, times, strict=True))
        return by_part | {total: sum(count * by_part[part] for part, count in passes.items())}

    series = [rounds[part] for rounds in (first, seconds) for part in passes]
    medians, drawn, count = [statistics.median(one) for one in series], _drawn_medians(*series), len(passes)
    reference, own = with_total(medians[:count]), with_total(medians[count:])
    before, after = with_total(drawn[:count]), with_total(drawn[count:])  # in each resample
    return {
        "ms": {name: 1e3 * value for name, value in own.items()},
        "speedup": {name: reference[name] / own[name] for name in own},
        "speedup_interval": {name: _interval(before[name] / after[name]) for name in own},
    }


def difference_interval(times: Sequence[float], less: Sequence[float]) -> list[float]:
    """Return the interval [low, high] of median(times) - median(less), in their unit."""
    more, fewer = _drawn_medians(times, less)
    return _interval(more - fewer)


def _interval(values: Any) -> list[float]:
    """Return the interval [low, high] that holds 95 % of the values."""
    import numpy as np

    return [float(value) for value in np.percentile(values, (2.5, 97.5))]


def _drawn_medians(*series: Sequence[float]) -> Any:
    """Return the median of each series in each resample of the rounds: [series, resamples]."""
    import numpy as np

    values = np.asarray(series, dtype=float)
    # a fixed seed, so that the same samples give the same interval
    rounds = np.random.default_rng(0).integers(0, values.shape[1], (DRAWN_ROUNDS, values.shape[1]))
    return np.median(values[:, rounds], axis=-1)


def few_rounds(repeat: int) -> str:
    """Return a warning about intervals of so few rounds; empty where there are enough."""
    if repeat < LEAST_ROUNDS:
        return f"with fewer than {LEAST_ROUNDS} rounds their scatter is unknown: no intervals; raise --repeat"
    if repeat < ENOUGH_ROUNDS:  # at the widest they reach from the smallest to the largest, around the true median
        return (
            f"intervals of {repeat} rounds are too narrow: about {1 - 2 ** (1 - repeat):.0%} hold the true value, where"
            f" 95 % should; raise --repeat to {ENOUGH_ROUNDS} or more"
        )
    return ""
