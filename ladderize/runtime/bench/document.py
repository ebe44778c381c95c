"""The document bench.json (docs/files.md): its rows, and the machine they were measured on. Imports no torch, so that
reports read it at once."""

import os
import platform
import re
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, ClassVar

from ladderize.choices import EngineName
from ladderize.files.records import Record
from ladderize.layout import HIDING
from ladderize.runtime.bench.options import BenchOptions
from ladderize.runtime.collectives.links import Link
from ladderize.runtime.schedule import ScheduleName

if TYPE_CHECKING:
    from ladderize.ranks.group import Ranks

MODEL_ROW, BASELINE_ROW = "model", "baseline, for timing only"
NO_COMM = "no-comm baseline"  # its row

LEAST_ROUNDS = 3  # with fewer there is no interval
ENOUGH_ROUNDS = 5  # with fewer an interval is too narrow


@dataclass(frozen=True)
class Environment(Record):
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
    settings: dict[str, str]  # environment variables that change times
    operations: str | None = None  # between the products, of inference
    gpus: list[str] | None = None
    gpu_memory_bytes: int | None = None
    cuda: str | None = None
    nccl: str | None = None
    vllm: str | None = None


SECRETS = re.compile("KEY|TOKEN|SECRET|PASSWORD")  # in names of variables, such as VLLM_API_KEY: files are published


def environment(
    group: "Ranks", *, settings: tuple[str, ...] = (), operations: str | None = None, vllm: str | None = None
) -> Environment:
    """Describe the machine; all ranks call it. settings: prefixes of further environment variables to note."""
    import torch
    import transformers

    from ladderize.ranks.device import cores, processor

    prefixes = ("NCCL_", "GLOO_", "OMP_", "TORCH_", *settings)
    noted = {key: value for key, value in sorted(os.environ.items()) if key.startswith(prefixes)}
    for key in [key for key in noted if SECRETS.search(key)]:
        del noted[key]
    machine = Environment(
        device=group.device.type,
        processor=processor(),
        cores=len(cores()),
        threads_per_rank=torch.get_num_threads(),
        python=platform.python_version(),
        torch=str(torch.__version__),
        transformers=transformers.__version__,
        system=f"{platform.system()} {platform.release()}",
        hosts=len(set(group.gather(platform.node()))),
        settings=noted,
        operations=operations,
        vllm=vllm,
    )
    if group.device.type != "cuda":
        return machine
    return replace(
        machine,
        gpus=group.gather(torch.cuda.get_device_name(group.device)),
        gpu_memory_bytes=torch.cuda.get_device_properties(group.device).total_memory,
        cuda=torch.version.cuda,
        nccl=".".join(map(str, torch.cuda.nccl.version())),
    )


# ---- rows: docs/files.md describes the fields ----


@dataclass(frozen=True)
class PhaseCommunication(Record):
    """The communication of one pass: a prefill, a decode step, or one of the two passes of a training step."""

    all_reduces: int  # of the layers
    bytes: int
    no_communication_ms: float
    alone_ms: float  # of all collectives, the vocabulary's too
    exposed_ms: float  # a difference of two medians, so it may come out below 0
    exposed_interval_ms: list[float]


@dataclass(frozen=True)
class Overlap(Record):
    """The milliseconds in flight of some traced passes, and those under compute among them."""

    LEFT_OUT: ClassVar = ("proven",)

    in_flight_ms: float
    under_compute_ms: float
    proven: bool | None = None  # there is any overlap at all; None where nothing promises any

    @property
    def share(self) -> float:
        return self.under_compute_ms / self.in_flight_ms if self.in_flight_ms else 0.0


@dataclass(frozen=True)
class BenchRow(Record):
    """A model, or a baseline, at one batch size, by one schedule. Dicts are by phase, ``ms`` by the total, too."""

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
    bound_share: float | None = None  # of the model's fastest step without communication, in training
    architecture: str | None = None  # vLLM's model class

    @property
    def is_model(self) -> bool:
        return self.kind == MODEL_ROW

    @property
    def is_random(self) -> bool:
        return self.weights == "random"

    def overlaps(self, phase: str) -> bool:
        return may_overlap((*self.attention_sync, *self.mlp_sync), self.schedule, phase)


def may_overlap(modes: Sequence[str], schedule: str, phase: str) -> bool:
    """Return True if the modes of a layout, or the schedule, let a sum of ``phase`` run under compute. In a backward
    pass a sum always may, under weights' gradients; decoding is never cut by a schedule."""
    is_cut = schedule == "domino" and phase != "decode"
    return phase == "backward" or is_cut or any(mode in HIDING for mode in modes)


@dataclass
class BenchDocument(Record):
    """The document bench.json. Each rank adds to its own while it measures."""

    LEFT_OUT: ClassVar = ("engine", "messages", "extrapolated_bytes")

    complete: bool  # False for good where the rest failed
    options: BenchOptions
    backend: str  # of the all-reduces
    environment: Environment
    link: Link | None  # of an emulated group, whose all-reduces are delays
    alone_ms: dict[str, float] = field(default_factory=dict)  # of a collective with nothing beside it
    rows: list[BenchRow] = field(default_factory=list)
    failed: dict[str, str] = field(default_factory=dict)  # the reason why a variant has no row
    checks: dict[str, dict[str, float]] = field(default_factory=dict)  # of the variants that passed
    engine: EngineName | None = None  # None: ladderize's runtime
    messages: str | None = None  # the backend of messages in flight in vLLM
    extrapolated_bytes: list[int] | None = None  # sizes of messages beyond those that the link was measured at

    @property
    def disproved(self) -> list[str]:
        """The names of the passes in whose trace nothing overlapped, although it should."""
        overlaps = {
            f"{row.model} ({phase})": overlap for row in self.rows for phase, overlap in (row.overlap or {}).items()
        }
        return [name for name, overlap in overlaps.items() if overlap.proven is False]


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
