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
from ladderize.layout import OVERLAPPED
from ladderize.runtime.bench.options import BenchOptions, GroupOptions, TrainingBenchOptions
from ladderize.runtime.collectives.links import Link
from ladderize.runtime.schedule import ScheduleName

if TYPE_CHECKING:
    from ladderize.ranks.group import Ranks

PHASES, PASSES = ("prefill", "decode"), ("forward", "backward")  # the timed parts of inference, and of a training step
END_TO_END = "end_to_end"  # the prefill and all decode steps
MODEL_ROW, BASELINE_ROW = "model", "baseline, for timing only"
PARALLEL, NO_COMM, UNSCHEDULED = "parallel baseline", "no-comm baseline", "sequential baseline"  # their rows

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


def environment(group: "Ranks", *, settings: tuple[str, ...] = (), **more: Any) -> Environment:
    """Describe the machine; all ranks call it.

    settings: prefixes of further environment variables to note.
    """
    import torch
    import transformers

    from ladderize.ranks.threads import cores, processor

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
        settings={key: value for key, value in sorted(os.environ.items()) if key.startswith(noted)},
        **more,
    )


# ---- rows ----


@dataclass(frozen=True)
class PhaseCommunication(Record):
    """The communication of one pass: a prefill, a decode step, or one of the two passes of a training step.

    all_reduces, bytes: of the layers.
    alone_ms: time of all collectives with nothing beside them, the vocabulary's too.
    exposed_ms: time waited for them. It is a difference of two medians, so it may come out below 0.
    hidden_ms: alone_ms - exposed_ms.
    """

    all_reduces: int
    bytes: int
    no_communication_ms: float
    alone_ms: float
    exposed_ms: float
    exposed_interval_ms: list[float]
    hidden_ms: float


@dataclass(frozen=True)
class Overlap(Record):
    """The milliseconds in flight of some traced passes, and those under compute among them.

    proven: True where there is any overlap at all; None where nothing promises any.
    """

    LEFT_OUT: ClassVar = ("proven",)

    in_flight_ms: float
    under_compute_ms: float
    share: float
    proven: bool | None = None


@dataclass(frozen=True)
class VariantRow(Record):
    """A model at one batch size.

    PARTS: the parts that tables show, each with ``..._ms``, ``speedup_...`` and ``speedup_..._interval``.
    tp_size: ranks, real or emulated.
    """

    PARTS: ClassVar[tuple[str, ...]] = ()

    model: str
    layout: str
    attention_sync: list[str]
    mlp_sync: list[str]
    sync_tp_size: int | None
    weights: str
    dtype: str
    tp_size: int
    batch_size: int
    weight_bytes: int
    peak_memory_bytes: int | None

    @property
    def is_random(self) -> bool:
        """True without a checkpoint: only the times mean something."""
        return self.weights == "random"

    @property
    def has_overlap(self) -> bool:
        """True where the layout lets a sum run under compute."""
        return OVERLAPPED in (*self.attention_sync, *self.mlp_sync)

    def part_ms(self, part: str) -> float:
        """Return the time of a part: of a pass, or of a whole step."""
        milliseconds: float = getattr(self, "decode_ms_per_token" if part == "decode" else f"{part}_ms")
        return milliseconds

    def speedup(self, part: str) -> tuple[float, list[float]]:
        """Return a part's speed-up over the first row of the batch size, and its interval."""
        return getattr(self, f"speedup_{part}"), getattr(self, f"speedup_{part}_interval")


@dataclass(frozen=True)
class BenchRow(VariantRow):
    """A measured row of inference: a model, or a baseline. Samples are of every counted round.

    kind: MODEL_ROW or BASELINE_ROW.
    schedule: the schedule of the prefill.
    communication, no_communication_samples_ms: by phase; None in the row of the no-comm baseline, and in vLLM.
    overlap: by phase, with --profile.
    architecture: vLLM's model class.
    fused_norm: True if vLLM was configured to fuse norms into all-reduces; this and ``architecture`` are None on
    ladderize's runtime.
    """

    PARTS: ClassVar = PHASES
    LEFT_OUT: ClassVar = (
        "communication", "no_communication_samples_ms", "overlap", "architecture", "fused_norm",
    )  # fmt: skip

    kind: str
    kv_cache_bytes: int
    prefill_ms: float
    decode_ms_per_token: float
    output_tokens_per_s: float
    end_to_end_ms: float
    speedup_prefill: float
    speedup_decode: float
    speedup_end_to_end: float
    speedup_prefill_interval: list[float]
    speedup_decode_interval: list[float]
    speedup_end_to_end_interval: list[float]
    samples_ms: dict[str, list[float]]
    communication: dict[str, PhaseCommunication] | None = None
    no_communication_samples_ms: dict[str, list[float]] | None = None
    overlap: dict[str, Overlap] | None = None
    schedule: ScheduleName = "sequential"
    architecture: str | None = None
    fused_norm: bool | None = None

    @property
    def is_model(self) -> bool:
        """True for a model, False for a baseline."""
        return self.kind == MODEL_ROW

    def overlaps(self, part: str) -> bool:
        """Return True if the layout or, in the prefill, the schedule lets a sum run under compute."""
        return self.is_model and (self.has_overlap or (part == "prefill" and self.schedule == "domino"))


@dataclass(frozen=True)
class TrainingRow(VariantRow):
    """A measured row of training: a forward and a backward pass over the whole batch, without the optimizer.

    bound_ms: the step of the same model without communication, by the schedule that is fastest then.
    bound_share: bound_ms / step_ms.
    """

    PARTS: ClassVar = ("step", *PASSES)
    LEFT_OUT: ClassVar = ("overlap",)

    schedule: ScheduleName
    step_ms: float
    forward_ms: float
    backward_ms: float
    tokens_per_s: float
    no_communication_ms: float
    bound_ms: float
    bound_share: float
    speedup_step: float
    speedup_forward: float
    speedup_backward: float
    speedup_step_interval: list[float]
    speedup_forward_interval: list[float]
    speedup_backward_interval: list[float]
    communication: dict[str, PhaseCommunication]
    samples_ms: dict[str, list[float]]
    no_communication_samples_ms: dict[str, list[float]]
    overlap: dict[str, Overlap] | None = None

    def overlaps(self, part: str) -> bool:
        """Return True if a sum may run under compute: in a backward pass always, under weights' gradients."""
        return part == "backward" or self.has_overlap or self.schedule == "domino"


def variant_name(model: str, schedule: str) -> str:
    """Return the words for a model that runs by a schedule."""
    return model if schedule == "sequential" else f"{model} by the schedule {schedule}"


# ---- documents ----


@dataclass(frozen=True)
class ReferenceAgreement(Record):
    """The differences of a model from transformers in float32.

    logit_difference: the largest difference of a logit.
    rms_difference: the root mean square of all differences.
    equal_greedy_tokens: decoded tokens that were the reference's.
    prompt_tokens: of the two prompts, padded to one length where they differ.
    """

    logit_difference: float
    tolerance: float
    rms_difference: float
    rms_tolerance: float
    equal_greedy_tokens: int
    greedy_tokens: int
    prompt_tokens: list[int]
    decode_steps: int


@dataclass(frozen=True)
class GradientAgreement(Record):
    """The relative differences of a variant's loss and gradients from those of its model's sequential schedule, whose
    sums block.

    gradient_norm: of all gradients of all ranks together, of this variant.
    gradient_difference: of the worst tensor.
    tolerance: of that tensor.
    """

    loss: float
    gradient_norm: float
    loss_difference: float
    gradient_difference: float
    tolerance: float


@dataclass(frozen=True)
class TimedDocument(Record):
    """The fields that the documents of all benchmarks share.

    complete: False until all is done, and for good where the rest failed.
    backend: the backend of the all-reduces.
    link: the link of an emulated group, whose all-reduces are delays.
    alone_ms: time of each collective with nothing beside it, by name and size.
    failed: the reason why a variant has no row, by its name.
    checks: of the variants that passed, by name.
    """

    complete: bool
    options: GroupOptions
    backend: str
    environment: Environment
    link: Link | None
    alone_ms: dict[str, float]
    rows: Sequence[Any]
    failed: dict[str, str]
    checks: Mapping[str, Any] = field(default_factory=dict)

    @property
    def emulated(self) -> bool:
        """True where all-reduces are delays."""
        return self.link is not None

    @property
    def disproved(self) -> list[str]:
        """The names of the passes in whose trace nothing overlapped, although it should."""
        return [
            f"{variant_name(row.model, row.schedule)} ({part})"
            for row in self.rows
            for part, overlap in (row.overlap or {}).items()
            if overlap.proven is False
        ]

    def has_interval(self, row: VariantRow) -> bool:
        """Return True if a row has an interval: there are enough rounds, and the row is not the first of its batch
        size."""
        first = next(one for one in self.rows if one.batch_size == row.batch_size)
        return self.options.repeat >= LEAST_ROUNDS and row is not first


@dataclass(frozen=True)
class BenchDocument(TimedDocument):
    """The document bench.json of inference, on ladderize's runtime or in vLLM.

    engine: ``vllm``, or None for ladderize's runtime.
    messages: the backend of messages in flight in vLLM; None where no row is in the plugin's class.
    """

    LEFT_OUT: ClassVar = ("engine", "messages")

    options: BenchOptions
    rows: list[BenchRow]
    checks: dict[str, ReferenceAgreement] = field(default_factory=dict)
    engine: EngineName | None = None
    messages: str | None = None


@dataclass(frozen=True)
class TrainingBenchDocument(TimedDocument):
    """The document of ``bench --train``.

    checked: True if gradients were compared before anything was timed.
    """

    options: TrainingBenchOptions
    rows: list[TrainingRow]
    checks: dict[str, GradientAgreement] = field(default_factory=dict)
    checked: bool = True


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
        **{f"{name}_ms": 1e3 * value for name, value in own.items()},
        **{f"speedup_{name}": reference[name] / own[name] for name in own},
        **{f"speedup_{name}_interval": _interval(before[name] / after[name]) for name in own},
    }


def inference_figures(seconds: Seconds, first: Seconds, decode_steps: int, batch: int) -> dict[str, Any]:
    """Return the times, rates and speed-ups of a ``BenchRow``.

    first: the samples that speed-ups are over.
    """
    figures = timed_figures(seconds, first, {"prefill": 1, "decode": decode_steps}, END_TO_END)
    step = figures.pop("decode_ms")
    return {**figures, "decode_ms_per_token": step, "output_tokens_per_s": 1e3 * batch / step}


def speedup_interval(reference: Sequence[float], times: Sequence[float]) -> list[float]:
    """Return the interval [low, high] of median(reference) / median(times); both have one time for each round."""
    before, after = _drawn_medians(reference, times)
    return _interval(before / after)


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
