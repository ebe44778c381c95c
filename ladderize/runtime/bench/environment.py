"""What a measurement was made on: enough to make it again."""

import os
import platform
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import torch

from ladderize.files.records import Record
from ladderize.ranks.group import Ranks
from ladderize.ranks.threads import cores


@dataclass(frozen=True)
class Environment(Record):
    """Machine, versions and settings. ``LEFT_OUT``: what only GPUs have."""

    LEFT_OUT: ClassVar = ("gpus", "gpu_memory_bytes", "cuda", "nccl", "link")

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
    gpus: list[str] | None = None
    gpu_memory_bytes: int | None = None
    cuda: str | None = None
    nccl: str | None = None
    link: str | None = None


def environment(group: Ranks, *, settings: tuple[str, ...] = ()) -> Environment:
    """All ranks call it. settings: beginnings of more variables' names that are noted."""
    import transformers

    on_gpu = group.device.type == "cuda"
    properties = torch.cuda.get_device_properties(group.device) if on_gpu else None
    return Environment(
        device=group.device.type,
        processor=_processor(),
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
            if key.startswith(("NCCL_", "GLOO_", "OMP_", "TORCH_", *settings))
        },
        gpus=group.gather(properties.name) if properties is not None else None,
        gpu_memory_bytes=properties.total_memory if properties is not None else None,
        cuda=torch.version.cuda if on_gpu else None,
        nccl=".".join(map(str, torch.cuda.nccl.version())) if on_gpu else None,
        link=_link(group) if on_gpu else None,
    )


def _link(group: Ranks) -> str:
    if group.size == 1:
        return "none"
    if torch.cuda.device_count() < group.size:
        return "not known here"
    return "peer to peer" if torch.cuda.can_device_access_peer(0, 1) else "through the host"


def _processor() -> str:
    info = Path("/proc/cpuinfo")
    if info.exists():
        for line in info.read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()
