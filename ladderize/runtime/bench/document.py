"""bench.json: described in docs/files.md. What runs writes it, and reports and pictures read it, by attribute."""

import os
import platform
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch

from ladderize.files.records import Record
from ladderize.ranks.group import Ranks
from ladderize.ranks.threads import cores, processor
from ladderize.runtime.bench.options import BenchOptions, GroupOptions, RoundsOptions
from ladderize.runtime.bench.reference_check import ReferenceAgreement
from ladderize.runtime.bench.rows import LEAST_ROUNDS, PhaseCommunication, SpeedRow, VariantRow
from ladderize.runtime.bench.trace import Overlap
from ladderize.runtime.collectives.links import Link
from ladderize.runtime.schedule import ScheduleName


@dataclass(frozen=True)
class Environment(Record):
    """Machine, versions and settings. ``LEFT_OUT``: what only GPUs have, and what only inference has: by what lies
    between products is computed."""

    LEFT_OUT: ClassVar = ("operations", "gpus", "gpu_memory_bytes", "cuda", "nccl", "link")

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
    link: str | None = None


def environment(group: Ranks, *, settings: tuple[str, ...] = ()) -> Environment:
    """All ranks call it. settings: beginnings of more variables' names that are noted."""
    import transformers

    noted = ("NCCL_", "GLOO_", "OMP_", "TORCH_", *settings)
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
        **(_gpu_figures(group) if group.device.type == "cuda" else {}),
    )


def _gpu_figures(group: Ranks) -> dict[str, Any]:
    properties = torch.cuda.get_device_properties(group.device)
    devices = torch.cuda.device_count()
    peers = devices > 1 and torch.cuda.can_device_access_peer(0, 1)
    link = "peer to peer" if peers else "through the host"
    return {
        "gpus": group.gather(properties.name),
        "gpu_memory_bytes": properties.total_memory,
        "cuda": torch.version.cuda,
        "nccl": ".".join(map(str, torch.cuda.nccl.version())),
        "link": "none" if group.size == 1 else "not known here" if devices < group.size else link,
    }


@dataclass(frozen=True)
class TimedDocument(Record):
    """What the files of all benchmarks have, but the schema in front.

    complete: False in what is written before all is done; it stays so where the rest failed. backend: what carries
    all-reduces. emulated: they are delays.
    """

    complete: bool
    emulated: bool
    options: RoundsOptions
    backend: str
    environment: Environment
    rows: Sequence[VariantRow]

    def has_interval(self, row: VariantRow) -> bool:
        """Whether the rounds say how far a row is off the first of its batch size; that one is not off itself."""
        first = next(one for one in self.rows if one.batch_size == row.batch_size)
        return self.options.repeat >= LEAST_ROUNDS and row is not first


@dataclass(frozen=True)
class RuntimeDocument(TimedDocument):
    """The same of ladderize's runtime. link: of an emulated group. alone_ms: of collectives, by name and size."""

    options: GroupOptions
    link: Link | None
    message_bytes_outside_link_range: list[int]
    alone_ms: dict[str, float]


@dataclass(frozen=True)
class BenchRow(SpeedRow):
    """A measured row; samples are of every counted round. schedule: of the prefill.

    communication and its samples are None in the row of the first model without communication, overlap without
    --profile.
    """

    LEFT_OUT: ClassVar = ("communication", "no_communication_samples_ms", "overlap")

    samples_ms: dict[str, list[float]]
    communication: dict[str, PhaseCommunication] | None = None
    no_communication_samples_ms: dict[str, list[float]] | None = None
    overlap: Overlap | None = None
    schedule: ScheduleName = "sequential"

    def overlaps(self, phase: str) -> bool:
        """Whether its layout lets a sum run under compute, or its schedule does, which is that of prefill alone."""
        return self.has_overlap or (self.is_model and phase == "prefill" and self.schedule == "domino")


@dataclass(frozen=True)
class BenchDocument(RuntimeDocument):
    """Of inference. checks: by checkpoint that passed the reference check; failed: by checkpoint that did not, and has
    no row, why."""

    options: BenchOptions
    checks: dict[str, ReferenceAgreement]
    rows: list[BenchRow]
    failed: dict[str, str] = field(default_factory=dict)

    @property
    def disproved(self) -> list[str]:
        """Models whose layout or schedule overlaps, and in whose trace nothing did."""
        return [row.model for row in self.rows if row.overlap is not None and row.overlap.proven is False]
